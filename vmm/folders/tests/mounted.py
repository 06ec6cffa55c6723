import ctypes, errno, mmap, os, stat, sys
os.chdir(sys.argv[1])
libc = ctypes.CDLL(None, use_errno=True)
fd = os.open(".", os.O_TMPFILE | os.O_RDWR, 0o600)
os.write(fd, b"unnamed")
# AT_FDCWD twice, AT_SYMLINK_FOLLOW.
assert libc.linkat(-100, b"/proc/self/fd/%d" % fd, -100, b"named", 0x400) == 0
assert open("named").read() == "unnamed"
os.posix_fallocate(fd, 0, 1 << 20)
assert os.stat("named").st_size == 1 << 20
# FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
assert libc.fallocate(fd, 3, ctypes.c_long(0), ctypes.c_long(4096)) == 0
assert os.pread(fd, 7, 0) == bytes(7)
assert os.lseek(fd, 0, os.SEEK_DATA) == 4096
os.setxattr("named", "user.note", b"kept")
assert os.getxattr("named", "user.note") == b"kept" and "user.note" in os.listxattr("named")
os.removexattr("named", "user.note")
open("other", "w").write("other")
rename = lambda one, two, flags: libc.renameat2(-100, one, -100, two, flags)
assert rename(b"named", b"other", 1) == -1 and ctypes.get_errno() == errno.EEXIST
assert rename(b"named", b"other", 2) == 0 and open("named").read() == "other"
source, target = os.open("named", os.O_RDONLY), os.open("copy", os.O_RDWR | os.O_CREAT, 0o644)
assert os.copy_file_range(source, target, 5, 0, 0) == 5 and open("copy").read() == "other"
with mmap.mmap(target, 5) as pages:
    pages[0:2] = b"AB"
    pages.flush()
assert os.pread(target, 5, 0) == b"ABher"
os.chmod("copy", 0o751)
os.system("sed -i s/AB/ab/ copy")
assert stat.S_IMODE(os.stat("copy").st_mode) == 0o751 and open("copy").read() == "abher"
name = b"n" * 251 + b"\xff\xfe\xf0\x01"
open(name, "w").write("long")
assert name in os.listdir(b".") and len(name) == 255
try:
    open(b"n" * 256, "w")
    raise SystemExit("a name of 256 bytes")
except OSError as error:
    assert error.errno == errno.ENAMETOOLONG
appends = os.open("copy", os.O_WRONLY | os.O_APPEND)
os.write(appends, b"!")
assert open("copy").read() == "abher!"
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (20000, 20000))
os.mkdir("many")
held = [os.open(f"many/{number}", os.O_RDWR | os.O_CREAT, 0o644) for number in range(5000)]
for number, each in enumerate(held): os.write(each, b"%d" % number)
assert os.pread(held[4999], 9, 0) == b"4999"
print("done")
