"""Asks the kernel for one facility, named by the first argument, and fails if it is not there."""

import ctypes
import errno
import fcntl
import mmap
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time

libc = ctypes.CDLL(None, use_errno=True)
AT_FDCWD = -100


def call(number, *arguments):
    """A system call; its error is an exception."""
    passed = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    result = libc.syscall(ctypes.c_long(number), *passed)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def failure(number, *arguments):
    """The name of the error that a system call has."""
    try:
        call(number, *arguments)
        return "none"
    except OSError as error:
        return errno.errorcode[error.errno]


def read(path):
    with open(path) as file:
        return file.read()


LANDLOCK_CREATE_RULESET = 444


def landlock():
    version = call(LANDLOCK_CREATE_RULESET, None, 0, 1)
    assert version >= 5, version
    # A ruleset that handles making directories, and permits it nowhere.
    make_directories = struct.pack("Q", 1 << 7)
    ruleset = call(LANDLOCK_CREATE_RULESET, make_directories, len(make_directories), 0)
    if os.fork() == 0:
        libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
        call(446, ruleset, 0)  # landlock_restrict_self
        try:
            os.mkdir("/tmp/denied")
        except PermissionError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 7


def ptrace_scope():
    assert read("/proc/sys/kernel/yama/ptrace_scope") == "0\n"


def core():
    with tempfile.TemporaryDirectory() as folder:
        pid = os.fork()
        if pid == 0:
            os.chdir(folder)
            most = resource.RLIM_INFINITY
            resource.setrlimit(resource.RLIMIT_CORE, (most, most))
            os.kill(os.getpid(), signal.SIGABRT)
        status = os.waitpid(pid, 0)[1]
        assert os.WCOREDUMP(status), status
        (name,) = os.listdir(folder)
        with open(f"{folder}/{name}", "rb") as file:
            head = file.read(18)
        assert head[:4] == b"\x7fELF" and head[16] == 4, head  # ET_CORE


def processes():
    for name in (
        "smaps smaps_rollup pagemap clear_refs io schedstat timers coredump_filter timerslack_ns"
    ).split():
        assert os.path.exists(f"/proc/self/{name}"), name
    assert "Pss:" in read("/proc/self/smaps_rollup")
    counted = read("/proc/self/io")
    assert "rchar: 0\n" not in counted and "read_bytes:" in counted, counted
    page = mmap.mmap(-1, mmap.PAGESIZE)
    page[0] = 1
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    with open("/proc/self/pagemap", "rb") as file:
        file.seek(address // mmap.PAGESIZE * 8)
        (entry,) = struct.unpack("Q", file.read(8))
    assert entry >> 63 == 1, hex(entry)
    for path in "/proc/swaps /proc/sys/kernel/msg_next_id /proc/pressure/io".split():
        read(path)


def fanotify():
    queue = call(300, 0x4, 0)  # fanotify_init: FAN_CLASS_CONTENT
    with tempfile.TemporaryDirectory() as folder:
        call(301, queue, 1, ctypes.c_ulonglong(0x20 | 1 << 27), AT_FDCWD, folder.encode())
        read_end = os.open(f"{folder}/file", os.O_CREAT | os.O_RDWR)
        length, _, _, _, mask, fd, pid = struct.unpack("=IBBHQii", os.read(queue, 24))
        assert mask & 0x20 and pid == os.getpid(), (hex(mask), pid)
        os.close(read_end)


def handles():
    path = tempfile.mkstemp(dir="/dev/shm")[1]
    handle = ctypes.create_string_buffer(8 + 128)
    struct.pack_into("Ii", handle, 0, 128, 0)
    mount = ctypes.c_int()
    call(303, AT_FDCWD, path.encode(), handle, ctypes.byref(mount), 0)  # name_to_handle_at
    root = os.open("/dev/shm", os.O_RDONLY)
    call(304, root, handle, os.O_RDONLY)  # open_by_handle_at


def perf_open(kind, config):
    attributes = struct.pack("IIQQQQQ", kind, 64, config, 0, 0, 0, 0).ljust(64, b"\0")
    return call(298, attributes, 0, -1, -1, 0)


def perf():
    def counted(config, work):
        event = perf_open(1, config)  # PERF_TYPE_SOFTWARE
        work()
        return struct.unpack("Q", os.read(event, 8))[0]

    def touch():
        pages = mmap.mmap(-1, 64 * mmap.PAGESIZE)
        for page in range(64):
            pages[page * mmap.PAGESIZE] = 1

    def compute():
        end = time.process_time() + 0.1
        while time.process_time() < end:
            pass

    assert counted(1, compute) > 0  # task clock
    assert counted(3, lambda: time.sleep(0.01)) > 0  # context switches
    assert counted(2, touch) > 0  # page faults


def keys():
    add, keyctl = 248, 250
    key = call(add, b"user", b"exocell", b"value", 5, -2)  # the process keyring
    found = ctypes.create_string_buffer(16)
    length = call(keyctl, 11, key, found, 16, 0)  # KEYCTL_READ
    assert found.raw[:length] == b"value"
    call(keyctl, 1, None, 0, 0, 0)  # a session keyring of one's own
    assert read("/proc/key-users")


def binary_formats():
    folder = "/proc/sys/fs/binfmt_misc"
    if libc.mount(b"binfmt_misc", folder.encode(), b"binfmt_misc", 0, None) != 0:
        raise OSError(ctypes.get_errno(), "mount")
    with open("/tmp/shows", "w") as file:
        file.write('#!/bin/sh\necho "shown: $1"\n')
    os.chmod("/tmp/shows", 0o755)
    with open(f"{folder}/register", "w") as file:
        file.write(":exo:E::exo::/tmp/shows:")
    with open("/tmp/program.exo", "w") as file:
        file.write("data")
    os.chmod("/tmp/program.exo", 0o755)
    said = subprocess.run(["/tmp/program.exo"], stdout=subprocess.PIPE, check=True).stdout
    assert said == b"shown: /tmp/program.exo\n", said
    with open(f"{folder}/exo", "w") as file:
        file.write("-1")


def userfaultfd():
    assert failure(323, 0x800) == "none"  # O_NONBLOCK
    assert read("/proc/sys/vm/unprivileged_userfaultfd") == "0\n"


def accounting():
    path = tempfile.mkstemp()[1]
    call(163, path.encode())  # acct
    subprocess.run(["true"], check=True)
    call(163, None)
    assert os.path.getsize(path) >= 64, os.path.getsize(path)


def taskstats():
    generic = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 16)  # NETLINK_GENERIC
    generic.bind((0, 0))

    def ask(family, command, kind, value):
        attribute = struct.pack("HH", 4 + len(value), kind) + value
        attribute += b"\0" * (-len(attribute) % 4)
        body = struct.pack("BBH", command, 1, 0) + attribute
        generic.send(struct.pack("IHHII", 16 + len(body), family, 1, 1, 0) + body)
        answer = generic.recv(1 << 16)
        assert struct.unpack_from("H", answer, 4)[0] != 2, struct.unpack_from("i", answer, 16)
        return answer

    answer = ask(16, 3, 2, b"TASKSTATS\0")  # the controller: by its name
    at, family = 20, None
    while at < len(answer):
        length, kind = struct.unpack_from("HH", answer, at)
        if kind == 1:
            (family,) = struct.unpack_from("H", answer, at + 4)
        at += (length + 3) & ~3
    assert len(ask(family, 1, 1, struct.pack("I", os.getpid()))) > 300


def kcmp():
    one, other = os.open("/", os.O_RDONLY), os.open("/", os.O_RDONLY)
    pid = os.getpid()
    assert call(312, pid, pid, 0, one, os.dup(one)) >= 0
    assert call(312, pid, pid, 0, one, other) > 0


def tun():
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, 0x400454CA, struct.pack("16sH22x", b"probe0", 0x1001))
    assert os.path.exists("/sys/class/net/probe0")


def refusal():
    """Says the error of the call whose number and arguments follow."""
    print(failure(*map(int, sys.argv[2:])))


def perf_refusal():
    try:
        perf_open(1, 1)
        print("none")
    except OSError as error:
        print(errno.errorcode[error.errno])


globals()[sys.argv[1]]()
