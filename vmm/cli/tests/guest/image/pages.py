"""Uses a file of the image in each way in which the kernel comes to its pages."""

import ctypes
import errno
import mmap
import os
import signal
import subprocess

PAGE = 4096
READ, WRITE, EXECUTE = 1, 2, 4
SHARED, PRIVATE = 1, 2
FAILED = ctypes.c_void_p(-1).value
FUTEX = 202
FUTEX_WAIT = 0

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.mlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.pwrite.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_long]

path = os.path.realpath("/usr/bin/python3")
with open(path, "rb") as opened:
    whole = opened.read()
size = len(whole)
file = os.open(path, os.O_RDONLY)


class Vector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


def mapped(access=READ, kind=PRIVATE, length=size, offset=0):
    at = libc.mmap(None, length, access, kind, file, offset)
    assert at != FAILED, os.strerror(ctypes.get_errno())
    return at


def memory(at, length=size):
    return ctypes.string_at(at, length)


def read_by(pid, at):
    into = ctypes.create_string_buffer(size)
    ours, theirs = Vector(ctypes.addressof(into), size), Vector(at, size)
    count = libc.process_vm_readv(pid, ctypes.byref(ours), 1, ctypes.byref(theirs), 1, 0)
    assert count == size, os.strerror(ctypes.get_errno())
    return into.raw


def child(work):
    """The status of a process that does it."""
    pid = os.fork()
    if pid == 0:
        work()
        os._exit(0)
    return os.waitpid(pid, 0)[1]


def same(condition):
    if not condition:
        os._exit(1)


# By calls
for offset, length in ((0, 1), (PAGE - 1, 2), (size - 5, 100), (12345, 70000), (size, 10)):
    assert os.pread(file, length, offset) == whole[offset : offset + length], offset
copy = os.open("/tmp/copy", os.O_RDWR | os.O_CREAT)
sent = 0
while sent < size:
    sent += os.sendfile(copy, file, sent, size - sent)
assert os.pread(copy, size, 0) == whole
end, begin = os.pipe()
count = os.splice(file, begin, 1 << 16, offset_src=2 * PAGE)
assert os.read(end, count) == whole[2 * PAGE : 2 * PAGE + count]
aligned = mmap.mmap(-1, 1 << 16)
assert os.preadv(os.open(path, os.O_RDONLY | os.O_DIRECT), [aligned], PAGE) == 1 << 16
assert aligned[:] == whole[PAGE : PAGE + (1 << 16)]

# By mappings, of which a write changes a page of the program's own
plain, written = mapped(), mapped(READ | WRITE)
assert memory(plain) == whole
assert memory(written, PAGE) == whole[:PAGE]
ctypes.memset(written, 7, 10)
ctypes.memset(written + 5 * PAGE + 3, 9, 1)
assert memory(written, PAGE) == b"\7" * 10 + whole[10:PAGE]
assert memory(written + 5 * PAGE, 5) == whole[5 * PAGE :][:3] + b"\t" + whole[5 * PAGE + 4 :][:1]
assert memory(plain) == whole
assert child(lambda: same(memory(plain) == whole and memory(written, 10) == b"\7" * 10)) == 0
assert child(lambda: ctypes.memset(written + 100, 3, 1)) == 0
assert memory(written + 100, 1) == whole[100:101]
assert memory(mapped(READ, SHARED)) == whole
assert libc.mmap(None, PAGE, READ | WRITE, SHARED, file, 0) == FAILED
assert ctypes.get_errno() == errno.EACCES
last = (size - 1) // PAGE * PAGE
tail = mapped(length=2 * PAGE, offset=last)
assert memory(tail, PAGE) == whole[last:].ljust(PAGE, b"\0")
status = child(lambda: memory(tail + PAGE, 1))
assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGBUS, status

# By the kernel's way to pages of programs: its own, and another's
used = mapped()
assert memory(used) == whole and read_by(os.getpid(), used) == whole and memory(used) == whole
ready, told = os.pipe()
pid = os.fork()
if pid == 0:
    memory(plain)
    os.write(told, b".")
    signal.pause()
os.read(ready, 1)
assert read_by(pid, plain) == whole
with open(f"/proc/{pid}/mem", "rb", 0) as theirs:
    theirs.seek(plain + PAGE)
    assert theirs.read(5000) == whole[PAGE : PAGE + 5000]
os.kill(pid, signal.SIGKILL)
os.waitpid(pid, 0)
direct = os.open("/var/tmp/direct", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
assert libc.pwrite(direct, used, 1 << 16, 0) == 1 << 16, os.strerror(ctypes.get_errno())
with open("/var/tmp/direct", "rb") as opened:
    assert opened.read() == whole[: 1 << 16]
futex = libc.syscall(FUTEX, ctypes.c_void_p(mapped(READ, SHARED)), FUTEX_WAIT, 1, None)
assert futex == -1 and ctypes.get_errno() == errno.EAGAIN, os.strerror(ctypes.get_errno())

# By what changes mappings
for advice in (mmap.MADV_RANDOM, mmap.MADV_WILLNEED, mmap.MADV_DONTNEED, mmap.MADV_NORMAL):
    assert libc.madvise(used, size, advice) == 0 and memory(used) == whole, advice
assert libc.mlock(used, size) == 0
assert libc.mprotect(used, 16 * PAGE, READ | WRITE) == 0
ctypes.memset(used + PAGE, 1, 1)
assert libc.mprotect(used, 16 * PAGE, READ | EXECUTE) == 0
assert memory(used, PAGE) == whole[:PAGE] and memory(used + PAGE, 1) == b"\1"

# What changes a file of the image changes a copy of it
with open("/etc/debian_version", "r+b") as changed:
    old = changed.read()
    kept = mmap.mmap(os.open("/etc/debian_version", os.O_RDONLY), len(old), prot=mmap.PROT_READ)
    changed.seek(0)
    changed.write(b"#")
with open("/etc/debian_version", "rb") as opened:
    assert opened.read() == b"#" + old[1:]
subprocess.run(["sh", "-c", "cp /bin/true /tmp/true && /tmp/true && chmod a+x /bin/sed"], check=True)
subprocess.run(["sed", "--version"], check=True, stdout=subprocess.DEVNULL)
with open(path, "rb") as opened:
    assert opened.read() == whole
