"""The ``exocell`` command as a process: its output, its refusals, its end.

:func:`command` runs it for an answer; :class:`Following` is a program of a cell
under ``exocell exec``. Cells are in ``_cell.py``.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import os
import shutil
import tempfile
import unicodedata
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ._errors import InvalidArgumentException, NotFoundException, SandboxException

#: Of each of a program's two streams that is kept, where nobody says.
OUTPUT_BYTES_MAX = 64 << 20
#: Seconds that the command may take for what is not a program of the cell.
COMMAND_TIMEOUT = 300.0
PART_BYTES = 64 << 10
#: Of what the command itself says on standard error.
_SAID_BYTES_MAX = 64 << 10
#: What the guest's shell says first on standard error, before the program begins.
_MARK = b"exocell-pid "
#: A session's first process keeps its number when the program takes its place.
LEAD = ["/bin/sh", "-c", f'printf "{_MARK.decode()}%s\\n" "$$" >&2; exec "$@"', "sh"]
#: What the command says of a cell, an image or a file that is not there.
_MISSING = ("no such cell", "no image `", "No such file")

#: Takes a piece of output, and ``"stdout"`` or ``"stderr"``.
OnOutput = Callable[[bytes, str], Awaitable[None]]


def program() -> str:
    """The ``exocell`` command: EXOCELL_COMMAND, the wheel's own, or the first in PATH."""
    own = Path(__file__).with_name("bin") / "exocell"
    found = os.environ.get("EXOCELL_COMMAND") or (str(own) if own.exists() else None)
    found = found or shutil.which("exocell")
    if found is None:
        raise SandboxException(
            "there is no exocell command; install a wheel that brings it, "
            "or name it in EXOCELL_COMMAND"
        )
    return found


async def begin(*words: str, stdin: int | IO[bytes] = DEVNULL) -> Process:
    """Starts ``exocell WORDS``. Whoever began it ends it by :func:`reap`."""
    return await asyncio.create_subprocess_exec(
        program(), *words, stdin=stdin, stdout=PIPE, stderr=PIPE
    )


async def reap(process: Process) -> None:
    """Kills a process that has not ended, and waits for its end.

    What it has written is read: asyncio knows of no end before that.
    """
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    if process.stdin is not None:
        process.stdin.close()
    for stream in (process.stdout, process.stderr):
        while stream is not None and await stream.read(PART_BYTES):
            pass
    await process.wait()


async def command(
    *words: str, timeout: float | None = COMMAND_TIMEOUT, input: IO[bytes] | None = None
) -> str:
    """Runs ``exocell WORDS``; its standard output.

    Raises a NotFoundException for a cell or an image that is not there, and
    otherwise a SandboxException with what the command says.
    """
    process = await begin(*words, stdin=DEVNULL if input is None else input)
    try:
        async with asyncio.timeout(timeout):
            stdout, stderr = await process.communicate()
    except TimeoutError:
        raise SandboxException(f"exocell {words[0]} took longer than {timeout} s") from None
    finally:
        if process.returncode is None:
            await to_its_end(reap(process))
    if process.returncode:
        raise refusal(words[0], stderr)
    return stdout.decode(errors="replace")


def refusal(verb: str, stderr: bytes) -> SandboxException:
    """What the command says when it fails, as an exception."""
    said = stderr.decode(errors="replace").strip().splitlines()
    message = said[-1].removeprefix("exocell: ") if said else f"exocell {verb} failed"
    is_missing = any(words in message for words in _MISSING)
    return NotFoundException(message) if is_missing else SandboxException(message)


#: What goes on though who wanted it is cancelled.
_ending: set[asyncio.Future[None]] = set()


async def to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Does work that a cancellation of the caller does not stop."""
    task = asyncio.ensure_future(work)
    _ending.add(task)
    task.add_done_callback(_ending.discard)
    await asyncio.shield(task)


@dataclass(frozen=True)
class Ended:
    """How a program of a cell ended, and what it wrote."""

    stdout: bytes
    stderr: bytes
    #: The program's own; 137 where it was killed for its time or its output.
    exit_code: int
    #: It took longer than it was allowed, and was killed.
    is_late: bool = False
    #: It wrote more than it was allowed to one stream, and was killed.
    is_cut: bool = False


class Following:
    """A program under ``exocell exec``, started by :data:`LEAD`, and what has come of it."""

    def __init__(
        self,
        process: Process,
        kill: Callable[[int], Coroutine[Any, Any, None]],
        output_max: int,
        on_output: OnOutput | None,
    ) -> None:
        self._process, self._kill = process, kill
        self._output_max, self._on_output = output_max, on_output
        self._kept = {"stdout": bytearray(), "stderr": bytearray()}
        #: What comes before the mark is the command's own.
        self._said = bytearray()
        self._pid: int | None = None

    async def end(self, input: bytes | None, timeout: float | None) -> Ended:
        """Feeds it, hears it, and waits for its end.

        Raises what the command says where the program did not start.
        """
        works = (
            self._feed(input),
            self._hear("stdout", self._process.stdout),
            self._hear("stderr", self._process.stderr),
        )
        tasks = [asyncio.ensure_future(work) for work in works]
        is_late = is_cut = False
        try:
            async with asyncio.timeout(timeout):
                await asyncio.gather(*tasks)
                await self._process.wait()
        except TimeoutError:
            is_late = True
        except _TooMuch:
            is_cut = True
        finally:
            for task in tasks:
                task.cancel()
            if self._process.returncode is None:
                await to_its_end(self._finish(tasks))
        out, err = (bytes(self._kept[name]) for name in ("stdout", "stderr"))
        if is_late or is_cut:
            return Ended(out, err, 137, is_late, is_cut)
        if self._pid is None:
            raise refusal("exec", bytes(self._said))
        return Ended(out, err, self._process.returncode or 0)

    async def _finish(self, tasks: Iterable[asyncio.Future[None]]) -> None:
        # One reader of a stream at a time.
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._pid is not None:
            await self._kill(self._pid)
        await reap(self._process)

    async def _feed(self, input: bytes | None) -> None:
        if self._process.stdin is None:
            return
        # A program need not read what it is given.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._process.stdin.write(input or b"")
            await self._process.stdin.drain()
        self._process.stdin.close()

    async def _hear(self, name: str, stream: asyncio.StreamReader | None) -> None:
        assert stream is not None
        while part := await stream.read(PART_BYTES):
            if name == "stderr" and self._pid is None:
                part = self._marked(part)
                if not part:
                    continue
            kept = self._kept[name]
            room = self._output_max - len(kept)
            kept += part[:room]
            if self._on_output is not None and room > 0:
                await self._on_output(part[:room], name)
            if len(part) > room:
                raise _TooMuch

    def _marked(self, part: bytes) -> bytes:
        """Takes what comes up to the mark's end; what is after it is the program's."""
        self._said += part
        at = self._said.find(_MARK)
        end = self._said.find(b"\n", at) if at >= 0 else -1
        if end < 0:
            del self._said[:-_SAID_BYTES_MAX]
            return b""
        self._pid = int(self._said[at + len(_MARK) : end])
        rest = bytes(self._said[end + 1 :])
        del self._said[at:]
        return rest


class _TooMuch(Exception):
    """A stream has more than is kept."""


@contextlib.contextmanager
def env_file(envs: Mapping[str, str] | None) -> Generator[list[str]]:
    """Options that give a program ``envs``: other users of this host see no arguments' values.

    Raises an InvalidArgumentException for what can be no variable.
    """
    for key, value in (envs or {}).items():
        if not is_variable(key):
            raise InvalidArgumentException(
                f"{key!r} cannot be the name of a variable: it is empty, or has = or a line "
                "break or another control character"
            )
        if "\0" in value:
            raise InvalidArgumentException(f"the value of the variable {key} has a zero byte")
    lines = {key: value for key, value in (envs or {}).items() if _fits_a_line(key, value)}
    rest = [f"--env={key}={value}" for key, value in (envs or {}).items() if key not in lines]
    if not lines:
        yield rest
        return
    with tempfile.NamedTemporaryFile("w", prefix="exocell-env-", encoding="utf-8") as file:
        file.writelines(f"{key}={value}\n" for key, value in lines.items())
        file.flush()
        yield [f"--env-file={file.name}", *rest]


#: Control characters, what separates lines and paragraphs, and halves of a character.
_NOT_IN_NAMES = {"Cc", "Zl", "Zp", "Cs"}


def is_variable(key: str) -> bool:
    """Whether a variable can have this name.

    A file of lines gives one that is named without ``=`` this host's value, so that no
    name may have a line's end.
    """
    return key != "" and not any(c == "=" or unicodedata.category(c) in _NOT_IN_NAMES for c in key)


def _fits_a_line(key: str, value: str) -> bool:
    is_whole = value == value.rstrip() and not value.splitlines()[1:]
    return is_whole and key == key.strip() and key[:1] != "#"


def text(data: bytes) -> str:
    """UTF-8, with U+FFFD for what is none."""
    return data.decode("utf-8", "replace")


def decoder() -> codecs.IncrementalDecoder:
    """The same for what comes in pieces."""
    return codecs.getincrementaldecoder("utf-8")("replace")
