// The page: one stream of what changes, and a stream each for the log and the terminal that are
// open. What the server tells of a cell is a cell's word: it is put into the page as text alone.
"use strict";

const KEY = "exocell-key";
const DECISIONS_MAX = 500;
const LINES_MAX = 2000;
const byId = (id) => document.getElementById(id);

// The key comes behind the #, which browsers send to nobody, and stays with this page.
if (location.hash.length > 1) {
  sessionStorage.setItem(KEY, decodeURIComponent(location.hash.slice(1)));
  history.replaceState(null, "", location.pathname);
}

const cells = new Map();
const rows = new Map();
let decisions = [];
let chosen = null;
let order = { at: 0, down: false };
let clock = 0;

function call(path, options = {}) {
  const headers = { Authorization: `Bearer ${sessionStorage.getItem(KEY) || ""}` };
  return fetch(path, { ...options, headers, cache: "no-store", referrerPolicy: "no-referrer" });
}

async function failure(answer) {
  const told = await answer.json().catch(() => ({}));
  const error = new Error(told.message || `the server answers ${answer.status}`);
  error.status = answer.status;
  return error;
}

// What a stream says, one event after the other.
async function* events(path, options) {
  const answer = await call(path, options);
  if (!answer.ok) throw await failure(answer);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    const parts = text.split("\n\n");
    text = parts.pop();
    for (const part of parts) {
      if (part.startsWith("data: ")) yield JSON.parse(part.slice(6));
    }
  }
}

const bytes = (count) => {
  if (count === null || count === undefined) return "";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  for (; count >= 1024 && at < 4; at += 1) count /= 1024;
  return `${at ? count.toFixed(1) : count} ${units[at]}`;
};
const percent = (value) => (typeof value === "number" ? `${value.toFixed(1)} %` : "");
const age = (from) => {
  const seconds = Math.max(0, Math.round((clock - from) / 1000));
  if (!from) return "";
  if (seconds < 120) return `${seconds} s`;
  if (seconds < 7200) return `${Math.floor(seconds / 60)} min`;
  return seconds < 172800 ? `${Math.floor(seconds / 3600)} h` : `${Math.floor(seconds / 86400)} d`;
};
const time = (ms) => new Date(ms).toTimeString().slice(0, 8);
const figure = (cell, name) => (cell.figures ? cell.figures[name] : null);
const lives = (cell) => cell.state === "running" || cell.state === "paused";

// Name, what is shown, what is sorted by, and how it looks.
const COLUMNS = [
  ["Name", (c) => c.name, (c) => c.name, () => "text"],
  ["State", (c) => c.state + (c.exit_code === null ? "" : ` (${c.exit_code})`), (c) => c.state, (c) => c.state],
  ["CPU", (c) => percent(figure(c, "cpu_percent")), (c) => figure(c, "cpu_percent"), () => "number"],
  ["Used", (c) => bytes(figure(c, "used_bytes")), (c) => figure(c, "used_bytes"), () => "number"],
  ["Held", (c) => bytes(figure(c, "held_bytes")), (c) => figure(c, "held_bytes"), () => "number"],
  ["Limit", (c) => bytes(figure(c, "limit_bytes")), (c) => figure(c, "limit_bytes"), () => "number"],
  ["Disk", (c) => bytes(figure(c, "disk_bytes")), (c) => figure(c, "disk_bytes"), () => "number"],
  ["In", (c) => bytes(figure(c, "received_bytes")), (c) => figure(c, "received_bytes"), () => "number"],
  ["Out", (c) => bytes(figure(c, "sent_bytes")), (c) => figure(c, "sent_bytes"), () => "number"],
  ["Age", (c) => age(c.started_ms || c.created_ms), (c) => -c.created_ms, () => "number"],
  ["Door", (c) => c.door, (c) => c.door, () => ""],
  ["Image", (c) => c.image, (c) => c.image, () => "text"],
  ["Id", (c) => c.id.slice(0, 12), (c) => c.id, () => ""],
];
const NETWORK = ["Time", "Cell", "Decision", "What", "Target", "Why"];

function heads(table, names, act) {
  names.forEach((name, at) => {
    const head = document.createElement("th");
    head.textContent = name;
    if (act) head.addEventListener("click", () => act(at));
    byId(table).tHead.rows[0].append(head);
  });
}

function set(node, text, name) {
  if (node.textContent !== text) node.textContent = text;
  if (node.className !== name) node.className = name;
}

function matches(cell) {
  if (!lives(cell) && cell.id !== chosen && !byId("ended").checked) return false;
  const wanted = byId("filter").value.trim().toLowerCase();
  return [cell.name, cell.image, cell.id, cell.state, cell.door]
    .some((text) => text.toLowerCase().includes(wanted));
}

let waits = 0;
function redraw() {
  if (!waits) waits = requestAnimationFrame(() => { waits = 0; draw(); });
}

function draw() {
  const [, , value] = COLUMNS[order.at];
  const shown = [...cells.values()].filter(matches);
  shown.sort((one, other) => {
    const [a, b] = [value(one) ?? -1, value(other) ?? -1];
    const sign = a < b ? -1 : a > b ? 1 : one.id < other.id ? -1 : 1;
    return order.down ? -sign : sign;
  });
  const body = byId("cells").tBodies[0];
  const kept = new Set(shown.map((cell) => cell.id));
  for (const [id, row] of rows) {
    if (!kept.has(id)) { row.remove(); rows.delete(id); }
  }
  shown.forEach((cell, at) => {
    let row = rows.get(cell.id);
    if (!row) {
      row = document.createElement("tr");
      COLUMNS.forEach(() => row.append(document.createElement("td")));
      row.addEventListener("click", () => choose(cell.id));
      rows.set(cell.id, row);
    }
    COLUMNS.forEach(([, text, , name], column) => set(row.cells[column], text(cell), name(cell)));
    row.className = cell.id === chosen ? "chosen" : "";
    if (body.rows[at] !== row) body.insertBefore(row, body.rows[at] || null);
  });
  const living = [...cells.values()].filter(lives);
  const sum = (name) => living.reduce((all, cell) => all + (figure(cell, name) || 0), 0);
  byId("totals").textContent = `${living.length} live, ${bytes(sum("held_bytes"))} held, `
    + `${percent(sum("cpu_percent"))} of a processor`;
  byId("count").textContent = `${shown.length} of ${cells.size}`;
  drawChosen();
}

function drawChosen() {
  const cell = cells.get(chosen);
  byId("cell").hidden = !cell;
  if (!cell) return;
  byId("cell-name").textContent = cell.name;
  set(byId("cell-state"), cell.state, cell.state);
  const parts = [cell.id, cell.image, cell.strength, cell.reason];
  if (cell.figures) parts.push(`${cell.figures.process_count} processes of the host`);
  byId("cell-more").textContent = parts.filter(Boolean).join(" · ");
  byId("pause").disabled = cell.state !== "running";
  byId("resume").disabled = cell.state !== "paused";
  byId("kill").disabled = !lives(cell);
  byId("open-terminal").disabled = cell.state !== "running" || cell.strength !== "vm";
}

function drawDecisions() {
  const refused = byId("refused").checked;
  const own = byId("own").checked;
  const wanted = decisions.filter((it) => (!refused || it.decision === "denied")
    && (!own || it.cell === chosen));
  const lines = wanted.slice(-200).reverse().map((it) => {
    const row = document.createElement("tr");
    const cell = cells.get(it.cell);
    const where = it.port === null || it.port === undefined ? it.target : `${it.target}:${it.port}`;
    const what = it.protocol ? `${it.event} ${it.protocol}` : it.event;
    [time(it.time_ms), cell ? cell.name : it.cell.slice(0, 12), it.decision, what, where, it.reason]
      .forEach((text, at) => {
        const part = document.createElement("td");
        part.textContent = text;
        part.className = at === 2 ? it.decision : "text";
        row.append(part);
      });
    return row;
  });
  byId("decisions").tBodies[0].replaceChildren(...lines);
}

function take(news) {
  clock = news.now_ms;
  if (news.all) {
    cells.clear();
    decisions = [];
  }
  (news.gone || []).forEach((id) => cells.delete(id));
  news.cells.forEach((cell) => cells.set(cell.id, cell));
  if (news.decisions.length || news.all) {
    decisions = decisions.concat(news.decisions).slice(-DECISIONS_MAX);
    drawDecisions();
  }
  if (news.decisions_left_out) {
    byId("left-out").textContent = `${news.decisions_left_out} more at ${time(clock)}`;
  }
  redraw();
}

// One stream for all cells. It is opened again when it breaks, later each time.
async function follow() {
  for (let rest = 500; ; rest = Math.min(rest * 2, 10000)) {
    try {
      set(byId("link"), "connecting", "paused");
      for await (const news of events("/api/stream")) {
        set(byId("link"), "live", "running");
        rest = 500;
        take(news);
      }
    } catch (error) {
      set(byId("link"), error.message, "lost");
      if (error.status === 401) {
        byId("ask").hidden = false;
        return;
      }
    }
    await new Promise((done) => setTimeout(done, rest));
  }
}

// What is open of the chosen cell; closing it ends its stream.
let open = null;
function close() {
  if (open) open.abort();
  open = null;
  byId("log").hidden = byId("terminal").hidden = true;
  byId("log").replaceChildren();
  byId("terminal").replaceChildren();
}

function choose(id) {
  if (id !== chosen) close();
  chosen = id;
  redraw();
  drawDecisions();
}

function note(text) {
  const line = document.createElement("div");
  line.className = "note";
  line.textContent = text;
  byId("log").append(line);
}

async function openLog() {
  close();
  const own = open = new AbortController();
  const place = byId("log");
  place.hidden = false;
  try {
    for await (const told of events(`/api/cells/${chosen}/log`, { signal: own.signal })) {
      const below = place.scrollHeight - place.scrollTop - place.clientHeight < 40;
      (told.lines || []).forEach((it) => {
        const line = document.createElement("div");
        line.className = it.error ? "error" : "";
        line.textContent = it.text || " ";
        place.append(line);
      });
      if (told.over) note(told.message || "the end");
      while (place.childElementCount > LINES_MAX) place.firstElementChild.remove();
      if (below) place.scrollTop = place.scrollHeight;
    }
  } catch (error) {
    if (!own.signal.aborted) note(error.message);
  }
}

function fit(place) {
  const probe = document.createElement("span");
  probe.textContent = "M".repeat(50);
  const line = document.createElement("div");
  line.append(probe);
  place.append(line);
  const box = probe.getBoundingClientRect();
  line.remove();
  const columns = Math.floor((place.clientWidth - 14) / (box.width / 50 || 8));
  const rows = Math.floor((place.clientHeight - 12) / (line.offsetHeight || box.height || 18));
  return { columns: Math.max(20, Math.min(columns, 300)), rows: Math.max(5, Math.min(rows, 100)) };
}

async function openTerminal() {
  close();
  const own = open = new AbortController();
  const place = byId("terminal");
  place.hidden = false;
  const size = fit(place);
  let name = null;
  // Keys that wait to be sent; one call at a time, so that they keep their order.
  let typed = "";
  let sending = false;
  const send = async (text) => {
    typed += text;
    if (sending || !name) return;
    sending = true;
    while (typed && !own.signal.aborted) {
      const body = typed.slice(0, 16384);
      typed = typed.slice(body.length);
      const path = `/api/terminals/${name}/input`;
      await call(path, { method: "POST", body, signal: own.signal }).catch(() => null);
    }
    sending = false;
  };
  const screen = new Screen(place, send);
  screen.resize(size.columns, size.rows);
  place.onkeydown = (event) => {
    const text = screen.key(event);
    if (text === null) return;
    event.preventDefault();
    send(text);
  };
  place.onpaste = (event) => {
    event.preventDefault();
    send(event.clipboardData.getData("text").replace(/\r?\n/g, "\r"));
  };
  place.focus();
  const options = { method: "POST", body: JSON.stringify(size), signal: own.signal };
  const say = (text) => screen.write(new TextEncoder().encode(`\r\n[${text}]\r\n`));
  try {
    for await (const told of events(`/api/cells/${chosen}/terminal`, options)) {
      if (told.terminal) {
        name = told.terminal;
        send("");
      }
      if (told.output) {
        screen.write(Uint8Array.from(atob(told.output), (sign) => sign.charCodeAt(0)));
      }
      if (told.exit_code !== undefined) {
        say(told.exit_code === null ? "the terminal has ended" : `exit ${told.exit_code}`);
      }
    }
  } catch (error) {
    if (!own.signal.aborted) say(error.message);
  }
}

async function act(verb) {
  const cell = cells.get(chosen);
  if (!cell) return;
  if (verb === "kill" && !confirm(`End the cell ${cell.name} at once?`)) return;
  const answer = await call(`/api/cells/${cell.id}/${verb}`, { method: "POST" }).catch(() => null);
  if (!answer || !answer.ok) {
    const error = answer ? await failure(answer) : new Error("the server is gone");
    set(byId("link"), error.message, "lost");
  }
}

heads("cells", COLUMNS.map(([name]) => name), (at) => {
  order = { at, down: order.at === at ? !order.down : at >= 2 && at <= 8 };
  draw();
});
heads("decisions", NETWORK);
["pause", "resume", "kill"].forEach((verb) => byId(verb).addEventListener("click", () => act(verb)));
byId("open-log").addEventListener("click", openLog);
byId("open-terminal").addEventListener("click", openTerminal);
byId("close").addEventListener("click", () => choose(null));
byId("filter").addEventListener("input", redraw);
byId("ended").addEventListener("change", redraw);
["refused", "own"].forEach((id) => byId(id).addEventListener("change", drawDecisions));
byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, byId("key").value.trim());
  byId("key").value = "";
  byId("ask").hidden = true;
  follow();
});
follow();
