"""Cells by the ``exocell`` command, for the adapters to other projects' harnesses.

No server is needed: :meth:`Cell.start` is ``exocell run``, and what a cell may
reach is said by its own rules (``--allow-net``). Begin reading there, then at
:meth:`Cell.exec`.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import posixpath
import tarfile
import tempfile
import tomllib
import uuid
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ._errors import (
    InvalidArgumentException,
    IsDirectoryException,
    NotFoundException,
    PermissionException,
    SandboxException,
    TimeoutException,
    TooLargeException,
)
from ._files import DOWNLOAD_BYTES_MAX, READ_BYTES_MAX
from ._program import (
    COMMAND_TIMEOUT,
    LEAD,
    OUTPUT_BYTES_MAX,
    PART_BYTES,
    Ended,
    Following,
    OnOutput,
    begin,
    command,
    env_file,
    is_variable,
    reap,
    refusal,
    text,
    to_its_end,
)
from ._trees import link_of, pack, unpack

#: A tar stream's headers and padding around one file.
_ARCHIVE_BYTES = 64 << 10
_LINKS_MAX = 16
#: Exit codes of :data:`_WRITE` for what is in the way.
_IS_DIRECTORY, _IS_DENIED = 121, 113
#: Writes a file as its user may. Root, too, is refused one that its owner may not write,
#: as :meth:`Cell.read` refuses one that its owner may not read.
_WRITE = f"""
PATH=/usr/sbin:/usr/bin:/sbin:/bin
if [ -d "$1" ]; then exit {_IS_DIRECTORY}; fi
mkdir -p -- "${{1%/*}}/" || exit {_IS_DENIED}
case $(ls -ldL -- "$1" 2> /dev/null) in ??[!w]*) exit {_IS_DENIED} ;; esac
cat > "$1"
"""
_PIDS, _CPUS_MAX = 4096, 16
#: All that a host's own addresses are not: names by HTTP and TLS, and addresses by any protocol.
EVERYWHERE = ("*", "0.0.0.0/0", "[::/0]:1-65535")


async def build(
    context: str | os.PathLike[str],
    tag: str,
    *,
    dockerfile: str | os.PathLike[str] | None = None,
    allow_net: Sequence[str] = (),
) -> str:
    """Makes an image of ``dockerfile``, or of the Dockerfile in ``context``; its id."""
    words = ["build", "--quiet", f"--tag={tag}"]
    words += [f"--file={dockerfile}"] if dockerfile else []
    words += [f"--allow-net={rule}" for rule in allow_net]
    return (await command(*words, "--", str(context), timeout=None)).strip()


async def _image_envs(image: str) -> dict[str, str]:
    """The environment that an image gives; it is pulled where it is missing.

    An image is anybody's: what cannot be the name of a variable is left out.
    """
    try:
        told = await command("image", "inspect", "--", image)
    except NotFoundException:
        await command("image", "pull", "--", image, timeout=None)
        told = await command("image", "inspect", "--", image)
    try:
        entries: list[str] = json.loads(told)[0]["config"].get("Env") or []
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise SandboxException(f"exocell image inspect {image} cannot be read") from error
    pairs = (entry.partition("=") for entry in entries if "\0" not in entry)
    return {key: value for key, equals, value in pairs if equals and is_variable(key)}


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
            words = [f"--caps={self.caps}"]
        else:
            words = [f"--pids-limit={_PIDS}"]
        words += [f"--memory={self.memory_mb}m"] if self.memory_mb else []
        words += [f"--cpus={self.cpus:g}"] if self.cpus else []
        return words + ([f"--disk={self.disk_mb}m"] if self.disk_mb else [])


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
        kind: str,
        words: Sequence[str] = ("sleep", "infinity"),
        labels: Mapping[str, str] | None = None,
        envs: Mapping[str, str] | None = None,
        allow_net: Sequence[str] = (),
        volumes: Sequence[str] = (),
        limits: Limits | None = None,
        user: str | None = None,
        workdir: str | None = None,
        lifetime: float | None = None,
    ) -> Cell:
        """Starts ``words``, which should go on for ever, in a cell of ``image``.

        An image that is not there is pulled. ``kind`` is what the cell's name
        begins with, and ``lifetime`` is in seconds. Raises a SandboxException
        that says what is the matter. Nothing is left when it fails.
        """
        entrypoint, *arguments = words
        name = f"{kind}-{uuid.uuid4().hex[:12]}"
        # exocell exec knows what run was told, and not what the image says.
        envs = {**await _image_envs(image), **(envs or {})}
        # Its own first process waits for no orphans.
        line = ["run", "--detach", "--rm", "--init", f"--name={name}", f"--entrypoint={entrypoint}"]
        line += [f"--label={key}={value}" for key, value in (labels or {}).items()]
        line += [f"--allow-net={rule}" for rule in allow_net]
        line += [f"--volume={volume}" for volume in volumes]
        line += (limits or Limits.of()).words()
        line += [f"--user={user}"] if user else []
        line += [f"--workdir={workdir}"] if workdir else []
        line += [f"--timeout={lifetime:g}s"] if lifetime else []
        try:
            with env_file(envs) as given:
                said = await command(*line, *given, "--", image, *arguments)
        except BaseException:
            await to_its_end(_forget(name))
            raise
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
        line += [f"--workdir={cwd}"] if cwd else []
        line += [f"--user={user}"] if user else []
        with env_file(envs) as given:
            stdin = DEVNULL if input is None else PIPE
            process = await begin(*line, *given, "--", self.id, *LEAD, *words, stdin=stdin)
            following = Following(process, self.kill, output_max, on_output)
            return await following.end(input, timeout)

    async def write(self, path: str, content: bytes) -> None:
        """Makes or replaces a file and the directories above it, as the cell's user.

        Raises an IsDirectoryException or a PermissionException for what is in
        the way.
        """
        words = ["/bin/sh", "-c", _WRITE, "sh", path]
        ended = await self.exec(words, input=content, timeout=COMMAND_TIMEOUT)
        said = text(ended.stderr).strip()
        if ended.is_late:
            raise TimeoutException(f"{path} could not be written in {COMMAND_TIMEOUT:g} seconds")
        if ended.exit_code == _IS_DIRECTORY:
            raise IsDirectoryException(f"{path} is a directory")
        if ended.exit_code == _IS_DENIED or "permission denied" in said.lower():
            raise PermissionException(f"{path}: permission denied")
        if ended.exit_code:
            raise SandboxException(f"{path}: {said or f'exit code {ended.exit_code}'}")

    async def read(self, path: str, max_bytes: int = READ_BYTES_MAX) -> bytes:
        """A file's content. Links are followed within the cell.

        Raises a NotFoundException, an IsDirectoryException, a
        PermissionException for a file that its own owner may not read, and a
        TooLargeException for more than ``max_bytes``.
        """
        at = path
        for _ in range(_LINKS_MAX):
            packed = io.BytesIO()
            await self.archive(at, packed, max_bytes + _ARCHIVE_BYTES)
            content = _content(packed, path, max_bytes)
            if isinstance(content, bytes):
                return content
            at = posixpath.normpath(posixpath.join(posixpath.dirname(at), content))
        raise SandboxException(f"{path}: too many symbolic links")

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

        Nothing is written outside of ``local``, whatever the cell sends, and no link
        in it leads out of it. Where ``path`` is a link itself, it is followed in the cell.
        """
        target = Path(local)
        if target.exists() or target.is_symlink():
            raise InvalidArgumentException(f"{target} exists")
        at = path
        for _ in range(_LINKS_MAX):
            with tempfile.TemporaryFile() as packed:
                await self.archive(at, packed, max_bytes)
                link = await asyncio.to_thread(link_of, packed)
                if link is None:
                    await asyncio.to_thread(unpack, packed, target)
                    return
            at = posixpath.normpath(posixpath.join(posixpath.dirname(at), link))
        raise SandboxException(f"{path}: too many symbolic links")

    async def archive(self, path: str, to: IO[bytes], max_bytes: int) -> None:
        """Writes the tar stream of ``path`` to a file, and goes to its beginning.

        Raises a NotFoundException where there is nothing, and a
        TooLargeException for more than ``max_bytes``.
        """
        process = await begin("cp", f"{self.id}:{path}", "-")
        assert process.stdout is not None and process.stderr is not None
        size = 0
        try:
            while part := await process.stdout.read(PART_BYTES):
                size += len(part)
                if size > max_bytes:
                    raise TooLargeException(f"{path} has more than {max_bytes} bytes")
                to.write(part)
            said = await process.stderr.read(PART_BYTES)
            if await process.wait():
                raise refusal("cp", said)
        finally:
            if process.returncode is None:
                await to_its_end(reap(process))
        to.seek(0)

    async def update(self, *, allow: Sequence[str] = (), deny: Sequence[str] = ()) -> None:
        """Changes what it may reach. What is denied goes first."""
        for flag, rules in (("--deny-net", deny), ("--allow-net", allow)):
            if rules:
                words = [f"{flag}={rule}" for rule in rules]
                await command("update", *words, "--", self.id)

    async def is_running(self) -> bool:
        """False when it has ended."""
        try:
            return bool(await command("ps", "-q", "--no-trunc", "--filter", f"id={self.id}"))
        except NotFoundException:
            return False

    async def remove(self) -> bool:
        """Ends it, and all in it. False when it had ended."""
        try:
            # The command says what it removed; of nothing it says nothing.
            return bool(await command("rm", "--force", self.id))
        except NotFoundException:
            return False

    async def kill(self, pid: int) -> None:
        """Kills the process group that ``pid`` leads."""
        with contextlib.suppress(SandboxException):
            line = f"kill -s KILL -- -{pid}"
            await command("exec", "--user=0", "--", self.id, "/bin/sh", "-c", line, timeout=60)


async def _forget(name: str) -> None:
    with contextlib.suppress(SandboxException):
        await command("rm", "--force", "--", name)


def _content(packed: IO[bytes], path: str, limit: int) -> bytes | str:
    """The bytes of the one file in an archive, or where its symbolic link leads."""
    try:
        with tarfile.open(fileobj=packed, mode="r:") as tar:
            entry = tar.next()
            if entry is None or entry.isdir():
                raise IsDirectoryException(f"{path} is a directory")
            if entry.issym():
                return entry.linkname
            file = tar.extractfile(entry) if entry.isreg() else None
            if file is None:
                raise InvalidArgumentException(f"{path} is no file")
            if entry.size > limit:
                raise TooLargeException(f"{path} has more than {limit} bytes")
            if not entry.mode & 0o400:
                raise PermissionException(f"{path}: permission denied")
            return file.read()
    except tarfile.TarError as error:
        raise SandboxException(f"{path} came as no archive: {error}") from error


@contextlib.contextmanager
def table(caps: str | None, is_offline: bool) -> Generator[str | None]:
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
