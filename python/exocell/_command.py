"""The ``exocell`` command of a wheel that carries it."""

import os
import pathlib
import sys


def main() -> None:
    """Becomes the command, with the arguments of this process."""
    program = pathlib.Path(__file__).with_name("bin") / "exocell"
    try:
        os.execv(program, ["exocell", *sys.argv[1:]])
    except OSError as error:
        sys.exit(f"exocell: {program} cannot be executed: {error.strerror}")
