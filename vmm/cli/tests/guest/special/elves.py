"""Executes ELF files whose segments lie where mappings of the kernel's own are, or where
nothing can be. Each must end by an error of execve or by a signal, or run; after each, a
program must run as before. Prints a line for each: its name and how it ended."""
import os
import struct
import subprocess
import sys

CODE = b"\x31\xff\xb8\x3c\x00\x00\x00\x0f\x05"  # exit(0)
ENTRY = 0x400F00
ALL = 7


def load(at, file_size=0x1000, size=0x1000):
    return (1, ALL, 0, at, at, file_size, size, 0x1000)


def elf(segments, entry=ENTRY, kind=2):
    head = b"\x7fELF" + bytes([2, 1, 1]) + b"\0" * 9
    head += struct.pack("<HHIQQQIHHHHHH", kind, 62, 1, entry, 64, 0, 0, 64, 56, len(segments), 0, 0, 0)
    body = head + b"".join(struct.pack("<IIQQQQQQ", *segment) for segment in segments)
    return body.ljust(0xF00, b"\x90") + CODE.ljust(0x100, b"\x90")


own = {}
for line in open("/proc/self/maps"):
    words = line.split()
    if words[-1] in ("[gates]", "[kernel]", "[vdso]", "[vvar]"):
        start, end = (int(word, 16) for word in words[0].split("-"))
        own[words[-1].strip("[]")] = (start, end - start)

elves = {"plain": elf([load(0x400000)])}
for name, (start, size) in own.items():
    end = start + size
    elves[f"{name}_first"] = elf([load(0x400000), load(start)])
    elves[f"{name}_last"] = elf([load(0x400000), load(end - 0x1000)])
    elves[f"{name}_whole"] = elf([load(0x400000), load(start, 0x1000, size)])
    elves[f"{name}_over"] = elf([load(0x400000), load(start - 0x1000, 0x1000, size + 0x2000)])
    elves[f"{name}_entry"] = elf([load(start, 0x1000, size)], start + 0xF00)
    elves[f"{name}_jump"] = elf([load(0x400000)], start)
    elves[f"{name}_dyn"] = elf([load(start, 0x1000, size)], start + 0xF00, 3)
    elves[f"{name}_brk"] = elf([load(0x400000), load(start - 0x2000, 0x1000, 0x2000)])
elves["top"] = elf([load(0x400000), load(0x7F7FFFFFF000)])
elves["above"] = elf([load(0x400000), load(0x7FFFFDF00000)])
elves["huge"] = elf([load(0x400000, 0x1000, 1 << 46)])
elves["wrap"] = elf([load(0x400000, 0x1000, 0xFFFFFFFFFFFF0000)])

for name, content in elves.items():
    path = f"{sys.argv[1]}/{name}"
    with open(path, "wb") as file:
        file.write(content)
    os.chmod(path, 0o755)
    try:
        ended = subprocess.run([path], timeout=20).returncode
    except subprocess.TimeoutExpired:
        ended = "no end"
    except OSError as error:
        ended = error.strerror
    alive = subprocess.run(["/bin/echo", "on"], capture_output=True).stdout == b"on\n"
    print(name, ended if alive else "and nothing runs any more")
