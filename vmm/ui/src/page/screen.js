// A screen for a terminal, as far as console_codes(4) goes that shells and editors use. What comes
// out of a cell is hostile: numbers are bounded, and cells of the screen are set as text alone.
"use strict";

class Screen {
  constructor(place, answer) {
    this.place = place;
    this.answer = answer;
    this.columns = 80;
    this.rows = 24;
    this.past = 0;
    this.decoder = new TextDecoder();
    this.blanks = new WeakSet();
    this.reset();
    this.lines = [];
    this.draw();
  }

  reset() {
    this.x = 0;
    this.y = 0;
    this.look = "";
    this.fore = this.back = null;
    this.bold = this.under = this.reverse = false;
    this.saved = null;
    this.wraps = false;
    this.hidden = false;
    this.keys = false;
    this.top = 0;
    this.bottom = this.rows - 1;
    this.state = "";
    this.words = "";
    this.grid = new Array(this.rows).fill(this.blank(""));
    this.dirty = new Uint8Array(this.rows).fill(1);
  }

  // An empty line, which all that look so share: a cell that clears its screen again and again has
  // no work done for each place of it.
  blank(look) {
    if (!this.shared || this.shared.look !== look || this.shared.line.length !== this.columns) {
      this.shared = { look, line: Array.from({ length: this.columns }, () => [" ", look]) };
      this.blanks.add(this.shared.line);
    }
    return this.shared.line;
  }

  // A line to be changed.
  own(y) {
    if (this.blanks.has(this.grid[y])) this.grid[y] = this.grid[y].slice();
    return this.grid[y];
  }

  resize(columns, rows) {
    if (columns === this.columns && rows === this.rows) return;
    this.grid.forEach((_, y) => {
      const line = this.own(y);
      while (line.length < columns) line.push([" ", ""]);
      line.length = columns;
    });
    while (this.grid.length > rows) {
      this.grid.shift();
      this.y = Math.max(0, this.y - 1);
    }
    this.columns = columns;
    while (this.grid.length < rows) this.grid.push(this.blank(""));
    this.rows = rows;
    this.top = 0;
    this.bottom = rows - 1;
    this.x = Math.min(this.x, columns - 1);
    this.y = Math.min(this.y, rows - 1);
    this.place.replaceChildren();
    this.lines = [];
    this.dirty = new Uint8Array(rows).fill(1);
    this.draw();
  }

  write(bytes) {
    this.touch(this.y);
    for (const sign of this.decoder.decode(bytes, { stream: true })) this.take(sign);
    this.touch(this.y);
    if (!this.waits) {
      this.waits = requestAnimationFrame(() => { this.waits = 0; this.draw(); });
    }
  }

  touch(y) {
    this.dirty[y] = 1;
  }

  take(sign) {
    const code = sign.codePointAt(0);
    if (this.state === "title") {
      // It ends with BEL, or with ESC and a backslash.
      if (code === 7) this.state = "";
      if (code === 27) this.state = "escape";
    } else if (code === 27) {
      this.state = "escape";
    } else if (code < 32 || code === 127) {
      this.control(code);
    } else if (this.state === "escape") {
      this.escape(sign);
    } else if (this.state === "set") {
      this.state = "";
    } else if (this.state === "codes") {
      if (code >= 0x40 && code <= 0x7e) {
        this.state = "";
        this.codes(sign, this.words);
      } else if (this.words.length < 64) {
        this.words += sign;
      }
    } else {
      this.put(sign);
    }
  }

  control(code) {
    if (code === 8) this.x = Math.max(0, this.x - 1);
    else if (code === 9) this.x = Math.min(this.columns - 1, (this.x | 7) + 1);
    else if (code >= 10 && code <= 12) this.down();
    else if (code === 13) this.x = 0;
    if (code !== 127) this.wraps = false;
  }

  escape(sign) {
    this.state = "";
    if (sign === "[") [this.state, this.words] = ["codes", ""];
    else if (sign === "]" || sign === "P" || sign === "_" || sign === "^") this.state = "title";
    else if ("()*+%#".includes(sign)) this.state = "set";
    else if (sign === "7") this.saved = [this.x, this.y];
    else if (sign === "8" && this.saved) this.go(...this.saved);
    else if (sign === "D") this.down();
    else if (sign === "E") { this.x = 0; this.down(); }
    else if (sign === "M") this.up();
    else if (sign === "c") this.reset();
  }

  put(sign) {
    if (this.wraps) {
      this.x = 0;
      this.down();
      this.wraps = false;
    }
    this.own(this.y)[this.x] = [sign, this.look];
    if (this.x === this.columns - 1) this.wraps = true;
    else this.x += 1;
    this.touch(this.y);
  }

  go(x, y) {
    this.touch(this.y);
    this.x = Math.max(0, Math.min(this.columns - 1, x));
    this.y = Math.max(0, Math.min(this.rows - 1, y));
    this.wraps = false;
    this.touch(this.y);
  }

  down() {
    this.touch(this.y);
    if (this.y === this.bottom) this.scroll(this.top, 1);
    else this.y = Math.min(this.rows - 1, this.y + 1);
    this.touch(this.y);
  }

  up() {
    this.touch(this.y);
    if (this.y === this.top) this.scroll(this.top, -1);
    else this.y = Math.max(0, this.y - 1);
    this.touch(this.y);
  }

  // Moves the lines from `from` to the bottom of the region up, or down for a number below zero.
  scroll(from, count) {
    const end = this.bottom + 1;
    if (from >= end) return;
    const many = Math.min(Math.abs(count), end - from);
    const blank = this.blank("");
    if (count > 0) {
      this.grid.copyWithin(from, from + many, end);
      this.grid.fill(blank, end - many, end);
    } else {
      this.grid.copyWithin(from + many, from, end - many);
      this.grid.fill(blank, from, from + many);
    }
    this.dirty.fill(1, from, end);
  }

  clear(y, from, to) {
    if (from <= 0 && to >= this.columns) {
      this.grid[y] = this.blank(this.look);
    } else {
      this.own(y).fill([" ", this.look], Math.max(0, from), Math.min(to, this.columns));
    }
    this.touch(y);
  }

  codes(verb, words) {
    const own = words.startsWith("?");
    const all = words.replace(/[^0-9;]/g, "").split(";")
      .map((word) => Math.min(Number(word) || 0, 9999));
    const one = Math.max(1, all[0]);
    if (own) {
      if (all[0] === 25) this.hidden = verb === "l";
      if (all[0] === 1) this.keys = verb === "h";
      this.touch(this.y);
      return;
    }
    switch (verb) {
      case "A": this.go(this.x, this.y - one); break;
      case "B": case "e": this.go(this.x, this.y + one); break;
      case "C": case "a": this.go(this.x + one, this.y); break;
      case "D": this.go(this.x - one, this.y); break;
      case "E": this.go(0, this.y + one); break;
      case "F": this.go(0, this.y - one); break;
      case "G": case "`": this.go(one - 1, this.y); break;
      case "d": this.go(this.x, one - 1); break;
      case "H": case "f": this.go(Math.max(1, all[1] || 1) - 1, one - 1); break;
      case "J": {
        const [from, to] = [[this.y + 1, this.rows], [0, this.y], [0, this.rows]][all[0]] || [0, this.rows];
        for (let y = from; y < to; y += 1) this.clear(y, 0, this.columns);
        if (all[0] === 0) this.clear(this.y, this.x, this.columns);
        if (all[0] === 1) this.clear(this.y, 0, this.x + 1);
        break;
      }
      case "K":
        this.clear(this.y, all[0] === 0 ? this.x : 0, all[0] === 1 ? this.x + 1 : this.columns);
        break;
      case "L": this.scroll(this.y, -one); break;
      case "M": this.scroll(this.y, one); break;
      case "P": {
        const [line, many] = [this.own(this.y), Math.min(one, this.columns - this.x)];
        line.copyWithin(this.x, this.x + many);
        line.fill([" ", ""], this.columns - many);
        this.touch(this.y);
        break;
      }
      case "@": {
        const [line, many] = [this.own(this.y), Math.min(one, this.columns - this.x)];
        line.copyWithin(this.x + many, this.x, this.columns - many);
        line.fill([" ", ""], this.x, this.x + many);
        this.touch(this.y);
        break;
      }
      case "X": this.clear(this.y, this.x, this.x + one); break;
      case "m": this.paint(all); break;
      case "r":
        this.top = Math.min(one, this.rows) - 1;
        this.bottom = Math.min(all[1] || this.rows, this.rows) - 1;
        if (this.top >= this.bottom) [this.top, this.bottom] = [0, this.rows - 1];
        this.go(0, 0);
        break;
      case "s": this.saved = [this.x, this.y]; break;
      case "u": if (this.saved) this.go(...this.saved); break;
      case "n":
        if (all[0] === 6) this.answer(`\x1b[${this.y + 1};${this.x + 1}R`);
        break;
      case "c": this.answer("\x1b[?6c"); break;
    }
  }

  paint(all) {
    for (let at = 0; at < all.length; at += 1) {
      const code = all[at];
      if (code === 0) {
        this.fore = this.back = null;
        this.bold = this.under = this.reverse = false;
      } else if (code === 1) this.bold = true;
      else if (code === 4) this.under = true;
      else if (code === 7) this.reverse = true;
      else if (code === 22) this.bold = false;
      else if (code === 24) this.under = false;
      else if (code === 27) this.reverse = false;
      else if (code >= 30 && code <= 37) this.fore = code - 30;
      else if (code >= 90 && code <= 97) this.fore = code - 90;
      else if (code === 39) this.fore = null;
      else if (code >= 40 && code <= 47) this.back = code - 40;
      else if (code >= 100 && code <= 107) this.back = code - 100;
      else if (code === 49) this.back = null;
      else if (code === 38 || code === 48) at += all[at + 1] === 5 ? 2 : 4;
    }
    const [fore, back] = this.reverse ? [this.back ?? 0, this.fore ?? 7] : [this.fore, this.back];
    const names = [fore === null ? "" : `f${fore}`, back === null ? "" : `b${back}`,
      this.bold ? "bold" : "", this.under ? "under" : ""];
    this.look = names.filter(Boolean).join(" ");
  }

  draw() {
    while (this.lines.length < this.rows) {
      const line = document.createElement("div");
      this.place.append(line);
      this.lines.push(line);
    }
    this.dirty.forEach((is, y) => { if (is) this.show(y); });
    this.dirty.fill(0);
  }

  show(y) {
    const parts = [];
    this.grid[y].forEach(([sign, look], x) => {
      const here = y === this.y && x === this.x && !this.hidden;
      const name = here ? "cursor" : look;
      const last = parts[parts.length - 1];
      if (last && last.name === name) last.text += sign;
      else parts.push({ name, text: sign });
    });
    this.lines[y].replaceChildren(...parts.map(({ name, text }) => {
      const part = document.createElement("span");
      part.className = name;
      part.textContent = text;
      return part;
    }));
  }

  // What a key sends; null for one that is the browser's.
  key(event) {
    const arrow = this.keys ? "\x1bO" : "\x1b[";
    const named = {
      Enter: "\r", Backspace: "\x7f", Tab: "\t", Escape: "\x1b", Delete: "\x1b[3~",
      ArrowUp: `${arrow}A`, ArrowDown: `${arrow}B`, ArrowRight: `${arrow}C`, ArrowLeft: `${arrow}D`,
      Home: "\x1b[1~", End: "\x1b[4~", PageUp: "\x1b[5~", PageDown: "\x1b[6~", Insert: "\x1b[2~",
    };
    if (event.metaKey || (event.ctrlKey && event.shiftKey)) return null;
    if (named[event.key]) return named[event.key];
    if (event.key.length !== 1 && [...event.key].length !== 1) return null;
    if (event.ctrlKey) {
      const code = event.key.toUpperCase().charCodeAt(0);
      if (event.key === " ") return "\0";
      return code >= 64 && code < 96 ? String.fromCharCode(code - 64) : null;
    }
    return (event.altKey ? "\x1b" : "") + event.key;
  }
}
