"""Cells by the ``exocell`` command, for the adapters to other projects' harnesses.

No server is needed: :meth:`Cell.start` is ``exocell run``, and what a cell may
reach is said by its own rules (``--allow-net``). Begin reading there, then at
:meth:`Cell.exec`.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import json
import os
import posixpath
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ._errors import InvalidArgumentException, NotFoundException, SandboxException
from ._files import DOWNLOAD_BYTES_MAX, pack, unpack

#: Of each of a command's two streams that is kept, where nobody says.
OUTPUT_BYTES_MAX = 64 << 20
#: Seconds that the command may take for what is not a program of the cell.
_COMMAND_TIMEOUT = 300.0
#: What the guest's shell says first on standard error, before the program begins.
_MARK = b"exocell-pid "
#: A session's first process keeps its number when the program takes its place.
_LEAD = f'printf "{_MARK.decode()}%s\\n" "$$" >&2; exec "$@"'
_PART_BYTES = 64 << 10
#: Of what the command itself says on standard error.
_SAID_BYTES_MAX = 64 << 10

#: What the command says of a cell, an image or a file that is not there.
_MISSING = ("no such cell", "no image `", "No such file")

_PIDS, _CPUS_MAX = 4096, 16
#: All that a host's own addresses are not: names by HTTP and TLS, and addresses by any protocol.
EVERYWHERE = ("*", "0.0.0.0/0", "[::/0]:1-65535")

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


async def command(
    *words: str, timeout: float | None = _COMMAND_TIMEOUT, input: IO[bytes] | None = None
) -> str:
    """Runs ``exocell WORDS``; its standard output.

    Raises a NotFoundException for a cell or an image that is not there, and
    otherwise a SandboxException with what the command says.
    """
    process = await asyncio.create_subprocess_exec(
        program(),
        *words,
        stdin=asyncio.subprocess.DEVNULL if input is None else input,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(timeout):
            stdout, stderr = await process.communicate()
    except BaseException as error:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        if isinstance(error, TimeoutError):
            raise SandboxException(f"exocell {words[0]} took longer than {timeout} s") from None
        raise
    if process.returncode:
        raise refusal(words[0], stderr)
    return stdout.decode(errors="replace")


def refusal(verb: str, stderr: bytes) -> SandboxException:
    """What the command says when it fails, as an exception."""
    said = stderr.decode(errors="replace").strip().splitlines()
    message = said[-1].removeprefix("exocell: ") if said else f"exocell {verb} failed"
    is_missing = any(words in message for words in _MISSING)
    return NotFoundException(message) if is_missing else SandboxException(message)


async def build(
    context: str | os.PathLike[str],
    tag: str,
    *,
    allow_net: Sequence[str] = (),
    memory_mb: int | None = None,
    disk_mb: int | None = None,
    no_cache: bool = False,
    timeout: float | None = None,
) -> str:
    """Makes an image of the Dockerfile in ``context``; its id."""
    words = ["build", "-q", "-t", tag]
    words += [word for rule in allow_net for word in ("--allow-net", rule)]
    words += ["--memory", f"{memory_mb}m"] if memory_mb else []
    words += ["--disk", f"{disk_mb}m"] if disk_mb else []
    words += ["--no-cache"] if no_cache else []
    return (await command(*words, str(context), timeout=timeout)).strip()


async def _image_envs(image: str) -> dict[str, str]:
    """The environment that an image gives; it is pulled where it is missing."""
    try:
        told = await command("image", "inspect", image)
    except NotFoundException:
        await command("image", "pull", image, timeout=None)
        told = await command("image", "inspect", image)
    try:
        entries: list[str] = json.loads(told)[0]["config"].get("Env") or []
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise SandboxException(f"exocell image inspect {image} cannot be read") from error
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


@dataclass(frozen=True)
class Limits:
    """What a cell may use; what is ``None`` is left to the command."""

    memory_mb: int | None = None
    cpus: float | None = None
    disk_mb: int | None = None
    caps: str | None = None

    @classmethod
    def of(
        cls,
        memory_mb: int | None = None,
        cpus: float | None = None,
        disk_mb: int | None = None,
        caps: str | None = None,
    ) -> Limits:
        """What is asked for, and else what ``exocell serve`` gives a container.

        With a capability table (``caps``, a file) the table says the rest.
        """
        if caps is not None:
            return cls(memory_mb, cpus, disk_mb, caps)
        pages, page = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
        half = pages * page // (2 << 20)
        return cls(memory_mb or min(2048, half), cpus or _processors(), disk_mb or 10240)

    def words(self) -> list[str]:
        """The options of ``exocell run``."""
        if self.caps is not None:
            words = ["--caps", self.caps]
        else:
            words = ["--pids-limit", str(_PIDS)]
        words += ["--memory", f"{self.memory_mb}m"] if self.memory_mb else []
        words += ["--cpus", f"{self.cpus:g}"] if self.cpus else []
        return words + (["--disk", f"{self.disk_mb}m"] if self.disk_mb else [])


def _processors() -> int:
    return min(len(os.sched_getaffinity(0)), _CPUS_MAX)


class Cell:
    """One that runs until :meth:`remove`."""

    def __init__(self, cell_id: str) -> None:
        self.id = cell_id

    @classmethod
    async def start(
        cls,
        image: str,
        *,
        words: Sequence[str] = ("sleep", "infinity"),
        name: str | None = None,
        labels: Mapping[str, str] | None = None,
        envs: Mapping[str, str] | None = None,
        allow_net: Sequence[str] = (),
        volumes: Sequence[str] = (),
        publish: Sequence[int] = (),
        limits: Limits | None = None,
        user: str | None = None,
        workdir: str | None = None,
        lifetime: float | None = None,
        options: Sequence[str] = (),
    ) -> Cell:
        """Starts ``words``, which should go on for ever, in a cell of ``image``.

        An image that is not there is pulled. ``lifetime`` is in seconds.
        ``options`` are more options of ``exocell run``. Raises a
        SandboxException that says what is the matter.
        """
        program_, *arguments = words
        # exocell exec knows what run was told, and not what the image says.
        envs = {**await _image_envs(image), **(envs or {})}
        line = ["run", "--detach", "--rm", "--entrypoint", program_]
        line += ["--name", name] if name else []
        for key, value in (labels or {}).items():
            line += ["--label", f"{key}={value}"]
        line += [word for rule in allow_net for word in ("--allow-net", rule)]
        line += [word for volume in volumes for word in ("--volume", volume)]
        line += [word for port in publish for word in ("--publish", str(port))]
        line += (limits or Limits.of()).words()
        line += ["--user", user] if user else []
        line += ["--workdir", workdir] if workdir else []
        line += ["--timeout", f"{lifetime:g}s"] if lifetime else []
        with _env_file(envs) as given:
            said = await command(*line, *given, *options, image, *arguments)
        return cls(said.strip())

    async def exec(
        self,
        words: Sequence[str],
        *,
        input: bytes | None = None,
        envs: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        timeout: float | None = None,
        output_max: int = OUTPUT_BYTES_MAX,
        on_output: OnOutput | None = None,
    ) -> Ended:
        """Runs a program in the cell, with /bin/sh of the image to start it.

        What is late, or writes more than ``output_max`` bytes to a stream, is
        killed with all that it started in its process group; what it had
        written is in the result. The same happens when the caller is
        cancelled. Raises a NotFoundException when the cell has ended, and a
        SandboxException when the program could not be started.
        """
        line = ["exec"] + (["--interactive"] if input is not None else [])
        line += ["--workdir", cwd] if cwd else []
        line += ["--user", user] if user else []
        with _env_file(envs) as given:
            process = await asyncio.create_subprocess_exec(
                program(),
                *[*line, *given, self.id, "/bin/sh", "-c", _LEAD, "sh", *words],
                stdin=asyncio.subprocess.DEVNULL if input is None else asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            return await _Running(self, process, output_max, on_output).end(input, timeout)

    async def shell(self, line: str, *, user: str | None = "0") -> str:
        """Runs a line of the shell, of ours and as root; its output.

        Raises a SandboxException when it fails.
        """
        ended = await self.exec(["/bin/sh", "-c", line], user=user, timeout=_COMMAND_TIMEOUT)
        if ended.exit_code:
            said = ended.stderr.decode(errors="replace").strip()
            raise SandboxException(said or f"{line} ended with exit code {ended.exit_code}")
        return ended.stdout.decode(errors="replace")

    async def upload(self, local: str | os.PathLike[str], path: str) -> None:
        """Copies a file, or a directory's content, to ``path``, as root's."""
        source = Path(local)
        if not source.exists():
            raise InvalidArgumentException(f"{source} does not exist")
        parent, name = (path, ".") if source.is_dir() else posixpath.split(path)
        with tempfile.TemporaryFile() as packed:
            await asyncio.to_thread(pack, source, name, packed)
            packed.seek(0)
            await command("cp", "-", f"{self.id}:{parent or '/'}", input=packed)

    async def download(
        self,
        path: str,
        local: str | os.PathLike[str],
        *,
        max_bytes: int = DOWNLOAD_BYTES_MAX,
    ) -> None:
        """Copies a file or a directory to ``local``, which must not exist.

        Nothing is written outside of ``local``, whatever the cell sends.
        """
        target = Path(local)
        if target.exists() or target.is_symlink():
            raise InvalidArgumentException(f"{target} exists")
        with tempfile.TemporaryFile() as packed:
            await self.archive(path, packed, max_bytes)
            await asyncio.to_thread(unpack, packed, target)

    async def archive(self, path: str, to: IO[bytes], max_bytes: int) -> None:
        """Writes the tar stream of ``path`` to a file, and goes to its beginning.

        Raises a NotFoundException where there is nothing, and a
        SandboxException for more than ``max_bytes``.
        """
        process = await asyncio.create_subprocess_exec(
            program(),
            *("cp", f"{self.id}:{path}", "-"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None and process.stderr is not None
        saying = asyncio.ensure_future(process.stderr.read(_SAID_BYTES_MAX))
        size = 0
        try:
            while part := await process.stdout.read(_PART_BYTES):
                size += len(part)
                if size > max_bytes:
                    raise SandboxException(f"{path} has more than {max_bytes} bytes")
                to.write(part)
            if await process.wait():
                raise refusal("cp", await saying)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            saying.cancel()
        to.seek(0)

    async def update(self, *, allow: Sequence[str] = (), deny: Sequence[str] = ()) -> None:
        """Changes what it may reach. What is denied goes first."""
        for flag, rules in (("--deny-net", deny), ("--allow-net", allow)):
            if rules:
                words = [word for rule in rules for word in (flag, rule)]
                await command("update", *words, self.id)

    async def is_running(self) -> bool:
        """False when it has ended."""
        try:
            return bool(await command("ps", "-q", "--no-trunc", "--filter", f"id={self.id}"))
        except NotFoundException:
            return False

    async def remove(self) -> bool:
        """Ends it, and all in it. False when it had ended."""
        try:
            await command("rm", "--force", self.id)
        except NotFoundException:
            return False
        return True

    async def kill(self, pid: int) -> None:
        """Kills the process group that ``pid`` leads."""
        with contextlib.suppress(SandboxException):
            words = ["exec", "--user", "0", self.id, "/bin/sh", "-c", f"kill -s KILL -- -{pid}"]
            await command(*words, timeout=60)


class _Running:
    """A program of a cell, and what has come of it so far."""

    def __init__(
        self,
        cell: Cell,
        process: asyncio.subprocess.Process,
        output_max: int,
        on_output: OnOutput | None,
    ) -> None:
        self._cell, self._process = cell, process
        self._output_max, self._on_output = output_max, on_output
        self._kept = {"stdout": bytearray(), "stderr": bytearray()}
        #: What comes before the mark is the command's own.
        self._said = bytearray()
        self._pid: int | None = None

    async def end(self, input: bytes | None, timeout: float | None) -> Ended:
        """Feeds it, hears it, and waits for its end."""
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
                await asyncio.shield(self._kill())
        out, err = (bytes(self._kept[name]) for name in ("stdout", "stderr"))
        if is_late or is_cut:
            return Ended(out, err, 137, is_late, is_cut)
        if self._pid is None:
            raise refusal("exec", bytes(self._said))
        return Ended(out, err, self._process.returncode or 0)

    async def _kill(self) -> None:
        if self._pid is not None:
            await self._cell.kill(self._pid)
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()

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
        while part := await stream.read(_PART_BYTES):
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
def _env_file(envs: Mapping[str, str] | None) -> Iterator[list[str]]:
    """Options that give a program ``envs``: other users of this host see no arguments' values."""
    lines = {key: value for key, value in (envs or {}).items() if _fits_a_line(key, value)}
    rest = [
        word
        for key, value in (envs or {}).items()
        if key not in lines
        for word in ("--env", f"{key}={value}")
    ]
    if not lines:
        yield rest
        return
    with tempfile.NamedTemporaryFile("w", prefix="exocell-env-") as file:
        file.writelines(f"{key}={value}\n" for key, value in lines.items())
        file.flush()
        yield ["--env-file", file.name, *rest]


def _fits_a_line(key: str, value: str) -> bool:
    is_whole = value == value.rstrip() and not value.splitlines()[1:]
    return is_whole and key == key.strip() and key[:1] != "#"


@contextlib.contextmanager
def table(caps: str | None, is_offline: bool) -> Iterator[str | None]:
    """The capability table ``caps``, or one without its network: no flag takes that away."""
    if caps is None or not is_offline:
        yield caps
        return
    try:
        content = Path(caps).read_text()
        told = json.loads(content) if content.lstrip()[:1] == "{" else tomllib.loads(content)
    except (OSError, ValueError) as error:
        raise InvalidArgumentException(f"{caps}: {error}") from error
    told.pop("network", None)
    with tempfile.NamedTemporaryFile("w", prefix="exocell-caps-", suffix=".json") as file:
        json.dump(told, file)
        file.flush()
        yield file.name


def text(data: bytes) -> str:
    """UTF-8, with U+FFFD for what is none."""
    return data.decode("utf-8", "replace")


def warn(message: str) -> None:
    """A line for whoever runs the harness."""
    print(f"exocell: {message}", file=sys.stderr)


def decoder() -> codecs.IncrementalDecoder:
    """The same for what comes in pieces."""
    return codecs.getincrementaldecoder("utf-8")("replace")
