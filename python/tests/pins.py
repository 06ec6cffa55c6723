"""Writes ``pins.txt`` of a harness anew: ``pins.py NAME IMAGE REQUIREMENT...``

What the requirements ask for is installed, the check is run, and pinned is what
it has imported: the rest is most of the download. Needs ``uv``, and what
``harnesses.py`` needs.
"""

import importlib.metadata
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

import harnesses

TRACE = """
import atexit, os, sys
def write():
    with open(os.environ["EXOCELL_TRACE"], "a") as file:
        file.write("".join(name + "\\n" for name in list(sys.modules)))
atexit.register(write)
"""


def resolved(requirements: list[str]) -> dict[str, str]:
    """Each package's line, by its name."""
    uv = ["uv", "pip", "compile", "--quiet", "--no-annotate", "--no-header", "-"]
    uv += ["--python-version", "3.12", "--no-emit-index-url", "--no-emit-find-links"]
    wanted = "\n".join(requirements)
    pins = subprocess.run(uv, input=wanted, stdout=subprocess.PIPE, text=True, check=True).stdout
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(pins)
        file.flush()
        pip = [harnesses.python(), "-m", "pip", "install", "--quiet", "--dry-run", "--no-deps"]
        pip += ["--ignore-installed", "--only-binary", ":all:", "--report", "-", "-r", file.name]
        told = subprocess.run(pip, stdout=subprocess.PIPE, check=True).stdout
    lines = {}
    for one in json.loads(told)["install"]:
        digest = one["download_info"]["archive_info"]["hashes"]["sha256"]
        name, version = one["metadata"]["name"], one["metadata"]["version"]
        lines[plain(name)] = f"{name}=={version} --hash=sha256:{digest}\n"
    return lines


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def imported(place: pathlib.Path, modules: set[str]) -> set[str]:
    """The packages in ``place`` of which a module was imported."""
    found = set()
    for package in importlib.metadata.distributions(path=[str(place)]):
        for file in package.files or []:
            path = re.sub(r"(\.cpython-[^/]*|\.abi3)?\.(py|so)$", "", str(file))
            if path.replace("/", ".").removesuffix(".__init__") in modules:
                found.add(plain(package.metadata["Name"]))
    return found


def main(name: str, image: str, requirements: list[str]) -> None:
    pins = harnesses.HERE / name / "pins.txt"
    lines = resolved(requirements)
    pins.write_text("".join(lines.values()))
    place = harnesses.kept(pins, harnesses.python())
    with tempfile.TemporaryDirectory() as work:
        trace = pathlib.Path(work) / "trace"
        (pathlib.Path(work) / "sitecustomize.py").write_text(TRACE)
        os.environ |= {"EXOCELL_TRACE": str(trace), "EXOCELL_TEST_PATH": work}
        if harnesses.check(name, image):
            sys.exit("pins: the check failed")
        kept = imported(place, set(trace.read_text().split()))
    head = f"# {', '.join(requirements)}, and what the check imports of all that they ask for.\n"
    pins.write_text(head + "".join(lines[one] for one in sorted(lines) if one in kept))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
