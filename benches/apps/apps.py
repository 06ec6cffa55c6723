#!/usr/bin/python3
"""Applications as measurements: `apps.py list` names them, `apps.py serve` takes
`NAME SAMPLES` lines and answers `NAME NANOSECONDS...` or `NAME error REASON`.

All data lies in /dev/shm; what a sample prepares is not timed.
"""

import os
import random
import shutil
import sqlite3
import subprocess
import sys
import time

FOLDER = "/dev/shm/apps-%d" % os.getpid()
# Not every subject may write compiled modules: then none does.
os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
QUIET = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
SMALL, LARGE = 100, 100_000
SMALL_ROWS, BATCH_ROWS, LARGE_ROWS = 1000, 20_000, 200
FILES, FOLDERS = 4000, 80


def timed(work):
    start = time.perf_counter_ns()
    work()
    return time.perf_counter_ns() - start


# --- sqlite: batches of one row and of a thousand, values of 100 bytes and of 100 KB


def database(rows, size):
    """An open database with `rows` values of `size` bytes."""
    path = FOLDER + "/db"
    for name in (path, path + "-journal"):
        if os.path.exists(name):
            os.unlink(name)
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("create table t (k integer primary key, v blob)")
    if rows:
        write(db, range(rows), size, 1000)
    return db


def write(db, keys, size, batch):
    value = os.urandom(size)
    keys = list(keys)
    for at in range(0, len(keys), batch):
        db.execute("begin")
        db.executemany("replace into t values (?, ?)", ((k, value) for k in keys[at:at + batch]))
        db.execute("commit")


def read(db, keys):
    for key in keys:
        db.execute("select v from t where k = ?", (key,)).fetchone()


def shuffled(count):
    keys = list(range(count))
    random.Random(1).shuffle(keys)
    return keys


def sqlite_fill():
    db = database(0, 0)
    return timed(lambda: write(db, range(SMALL_ROWS), SMALL, 1))


def sqlite_fill_batch():
    db = database(0, 0)
    return timed(lambda: write(db, range(BATCH_ROWS), SMALL, 1000))


def sqlite_overwrite():
    db = database(SMALL_ROWS, SMALL)
    return timed(lambda: write(db, shuffled(SMALL_ROWS), SMALL, 1))


def sqlite_read():
    db = database(BATCH_ROWS, SMALL)
    return timed(lambda: read(db, shuffled(BATCH_ROWS)))


def sqlite_fill_100k():
    db = database(0, 0)
    return timed(lambda: write(db, range(LARGE_ROWS), LARGE, 1))


def sqlite_read_100k():
    db = database(LARGE_ROWS, LARGE)
    return timed(lambda: read(db, shuffled(LARGE_ROWS)))


# --- a tree of files


def tree():
    """A git repository with FILES committed files, made once."""
    root = FOLDER + "/tree"
    if os.path.exists(root):
        return root
    for folder in range(FOLDERS):
        os.makedirs("%s/%d" % (root, folder))
    for number in range(FILES):
        with open("%s/%d/%d.txt" % (root, number % FOLDERS, number), "w") as file:
            file.write("line %d\n" % number * (number % 100))
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.invalid", "-C", root]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "all"]):
        subprocess.run(git + words, check=True, **QUIET)
    return root


def git_status():
    root = tree()
    os.utime(root + "/0/0.txt")
    return timed(lambda: subprocess.run(["git", "-C", root, "status"], check=True, **QUIET))


def tar_tree():
    words = ["tar", "-C", tree(), "--exclude=.git", "-cf", FOLDER + "/tree.tar", "."]
    return timed(lambda: subprocess.run(words, check=True, **QUIET))


# --- programs


def gcc_file():
    path = FOLDER + "/big.c"
    with open(path, "w") as file:
        file.write("#include <stdio.h>\n#include <stdlib.h>\n#include <string.h>\n")
        for n in range(60):
            file.write(
                "int f%d(int x) { int s = %d; for (int i = 0; i < x; i++)"
                " s += i %% 7 ? s * i : printf(\"%%d\", s); return s; }\n" % (n, n)
            )
    words = ["gcc", "-O1", "-c", path, "-o", FOLDER + "/big.o"]
    return timed(lambda: subprocess.run(words, check=True, **QUIET))


TEST = '''
import json, os, re, subprocess, sys, tempfile, unittest

class Test%d(unittest.TestCase):
    def test_files(self):
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            for n in range(20):
                path = os.path.join(folder, str(n))
                with open(path, "w") as file:
                    file.write("x" * n)
                self.assertEqual(os.stat(path).st_size, n)
    def test_text(self):
        value = json.loads(json.dumps({str(n): list(range(n)) for n in range(100)}))
        self.assertEqual(len(re.findall(r"[0-9]+", json.dumps(value))), 5050)
    def test_program(self):
        self.assertEqual(subprocess.check_output(["echo", "x"]), b"x\\n")
    def test_objects(self):
        self.assertEqual(len({(a, b): [a] * b for a in range(60) for b in range(60)}), 3600)
'''


def python_suite():
    folder = FOLDER + "/suite"
    os.makedirs(folder, exist_ok=True)
    for n in range(25):
        with open("%s/test_%d.py" % (folder, n), "w") as file:
            file.write(TEST % n)
    words = ["/usr/bin/python3", "-m", "unittest", "discover", "-q", "-s", folder]
    return timed(lambda: subprocess.run(words, check=True, **QUIET))


def python_start():
    words = ["/usr/bin/python3", "-c", "import json, re, unittest"]
    return timed(lambda: subprocess.run(words, check=True, **QUIET))


def python_compute():
    def work():
        values = [(n * 7919) % 10007 for n in range(60_000)]
        for _ in range(5):
            values = sorted(values, key=lambda v: -v) + values[:10]
        return sum(v * v for v in values)

    return timed(work)


APPS = [
    sqlite_fill, sqlite_fill_batch, sqlite_overwrite, sqlite_read, sqlite_fill_100k,
    sqlite_read_100k, git_status, tar_tree, gcc_file, python_suite, python_start, python_compute,
]


def serve():
    apps = {app.__name__: app for app in APPS}
    os.makedirs(FOLDER)
    try:
        print("ready", flush=True)
        for line in sys.stdin:
            name, samples = line.split()
            try:
                values = [apps[name]() for _ in range(int(samples))]
                print(name, *values, flush=True)
            except Exception as error:
                print(name, "error", repr(error).replace("\n", " "), flush=True)
    finally:
        shutil.rmtree(FOLDER, ignore_errors=True)


if sys.argv[1:] == ["list"]:
    for app in APPS:
        print(app.__name__, "ns", 1)
elif sys.argv[1:] == ["serve"]:
    serve()
else:
    sys.exit("usage: apps.py list|serve")
