"""Runs a harness of others, as it is on the package registry, against this package.

    harnesses.py NAME IMAGE

NAME is a folder beside this file with ``check.py``, and ``pins.txt``, by whose
hashes packages are fetched once, to a folder below EXOCELL_CACHE. They need a
Python of version 3.12 or newer (EXOCELL_TEST_PYTHON says which). A folder
``serves`` has words for ``exocell serve``, which then runs on a state root of its
own. What the check prints is what this prints. ``pins.py`` writes the pins.
"""

import contextlib
import hashlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib

HERE = pathlib.Path(__file__).resolve().parent
PACKAGE = HERE.parent
#: The oldest that Harbor runs on.
PYTHON = (3, 12)


def python() -> str:
    """A Python that is new enough."""
    roots = [pathlib.Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"]
    installed = sorted(path for root in roots for path in root.glob("3.*/bin/python3"))
    names = ["python3", *(f"python3.{minor}" for minor in range(PYTHON[1], PYTHON[1] + 6))]
    for name in [os.environ.get("EXOCELL_TEST_PYTHON"), *names, *map(str, installed)]:
        found = name and shutil.which(name)
        says = "import sys; sys.exit(sys.version_info[:2] != (3, 12))"
        if found and subprocess.run([found, "-c", says], capture_output=True).returncode == 0:
            return found
    sys.exit("harnesses: no Python 3.12; install one, or name it in EXOCELL_TEST_PYTHON")


def kept(pins: pathlib.Path, interpreter: str) -> pathlib.Path:
    """The packages of a list of pins, fetched once."""
    cache = pathlib.Path(os.environ.get("EXOCELL_CACHE", "~/.cache/exocell")).expanduser()
    place = cache / "harnesses" / hashlib.sha256(pins.read_bytes()).hexdigest()[:16]
    if place.exists():
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent) as work:
        target = pathlib.Path(work) / "packages"
        words = ["install", "--quiet", "--no-deps", "--require-hashes", "--no-compile"]
        words += ["--only-binary", ":all:", "--disable-pip-version-check"]
        words += ["--root-user-action", "ignore"]
        pip = [interpreter, "-m", "pip", *words, "--target", str(target), "-r", str(pins)]
        if subprocess.run(pip).returncode:
            sys.exit(
                "harnesses: cannot fetch what to test with; does this machine reach a Python "
                "package registry (pip config list)?"
            )
        # Another run may have been faster; its tree is the same.
        with contextlib.suppress(OSError):
            target.rename(place)
    return place


def installed(place: pathlib.Path) -> None:
    """What an installer would note of this package, for who looks for entry points."""
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    info = place / f"exocell-{project['version']}.dist-info"
    info.mkdir()
    told = f"Metadata-Version: 2.1\nName: exocell\nVersion: {project['version']}\n"
    (info / "METADATA").write_text(told)
    groups = [
        f"[{group}]\n" + "".join(f"{name} = {to}\n" for name, to in points.items())
        for group, points in project["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("\n".join(groups))


def exocell() -> str:
    return os.environ.get("EXOCELL_COMMAND") or shutil.which("exocell") or "exocell"


@contextlib.contextmanager
def served(root: pathlib.Path):
    """A server of Docker's and of E2B's protocol; what its clients want to know."""
    words = [exocell(), "--root", str(root), "serve", "--docker", str(root / "docker.sock")]
    words += ["--e2b", "127.0.0.1:0", "--memory", "512m", "--disk", "1g"]
    server = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        lines = [server.stdout.readline().split()[-1] for _ in range(2)]
        (url,) = (line for line in lines if line.startswith("http"))
        key = (root / "e2b/key").read_text().strip()
        docker = f"unix://{root / 'docker.sock'}"
        yield {
            "E2B_API_URL": url,
            "E2B_SANDBOX_URL": url,
            "E2B_API_KEY": key,
            "DOCKER_HOST": docker,
        }
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()


def images(root: pathlib.Path) -> set[str]:
    told = subprocess.run(
        [exocell(), "--root", str(root), "image", "ls", "--json"], capture_output=True, text=True
    )
    return {tag for line in told.stdout.splitlines() for tag in json.loads(line)["tags"]}


def state_root() -> pathlib.Path:
    return pathlib.Path(os.environ.get("EXOCELL_ROOT", "/var/lib/exocell"))


def check(name: str, image: str) -> int:
    interpreter = python()
    packages = kept(HERE / name / "pins.txt", interpreter)
    with contextlib.ExitStack() as stack:
        work = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="exocell-")))
        root = work / "root"
        root.mkdir()
        (root / "images").symlink_to(state_root() / "images")
        (work / "home").mkdir()
        (work / "info").mkdir()
        installed(work / "info")
        # A module of the start-up's, for pins.py, goes first.
        paths = [os.environ.get("EXOCELL_TEST_PATH", ""), PACKAGE, work / "info", packages]
        environment = {
            **os.environ,
            "EXOCELL_COMMAND": exocell(),
            "EXOCELL_ROOT": str(root),
            "HOME": str(work / "home"),
            "PYTHONPATH": os.pathsep.join(filter(None, map(str, paths))),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        if (HERE / name / "serves").exists():
            environment |= stack.enter_context(served(root))
        before = images(root)
        ran = subprocess.run([interpreter, str(HERE / name / "check.py"), image], env=environment)
        for tag in images(root) - before:
            # Another check may run beside this one.
            if tag.startswith(f"{name}/"):
                subprocess.run([exocell(), "--root", str(root), "image", "rm", tag], check=True, stdout=subprocess.DEVNULL)
        left = [path.name for path in (root / "cells").glob("[!.]*")]
        if left:
            sys.exit(f"harnesses: cells are left: {left}")
    return ran.returncode


if __name__ == "__main__":
    sys.exit(check(*sys.argv[1:]))
