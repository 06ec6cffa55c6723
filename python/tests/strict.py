"""Checks the types of the package strictly, with pyright as it is on the package registry.

Needs npm, and what ``harnesses.py`` needs: the adapters are checked against the
packages that they adapt to. Prints what pyright says last.
"""

import hashlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import harnesses

NPM = harnesses.HERE / "pyright"
ADAPTED = ["harbor", "inspect", "langchain", "nemo"]


def pyright() -> pathlib.Path:
    """The checker, fetched once."""
    lock = (NPM / "package-lock.json").read_bytes()
    cache = pathlib.Path(os.environ.get("EXOCELL_CACHE", "~/.cache/exocell")).expanduser()
    place = cache / "pyright" / hashlib.sha256(lock).hexdigest()[:16]
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent) as work:
            target = pathlib.Path(work) / "npm"
            target.mkdir()
            for name in ("package.json", "package-lock.json"):
                (target / name).write_bytes((NPM / name).read_bytes())
            words = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--silent"]
            subprocess.run(words, cwd=target, check=True)
            target.rename(place)
    return place / "node_modules/.bin/pyright"


def main() -> int:
    interpreter = harnesses.python()
    packages = [
        harnesses.kept(harnesses.HERE / name / "pins.txt", interpreter) for name in ADAPTED
    ]
    with tempfile.TemporaryDirectory() as work:
        config = {
            "include": ["exocell"],
            "typeCheckingMode": "strict",
            "pythonVersion": "3.12",
            "extraPaths": [str(path) for path in packages],
        }
        (pathlib.Path(work) / "pyrightconfig.json").write_text(json.dumps(config))
        (pathlib.Path(work) / "exocell").symlink_to(harnesses.PACKAGE / "exocell")
        ran = subprocess.run([pyright(), "-p", work], stdout=subprocess.PIPE, text=True)
    said = ran.stdout.strip()
    print(said if ran.returncode else said.splitlines()[-1])
    return ran.returncode


if __name__ == "__main__":
    sys.exit(main())
