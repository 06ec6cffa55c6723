"""Files of a sandbox."""

from __future__ import annotations

import io
import os
import posixpath
import re
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Literal, TypeVar, overload

from ._commands import AsyncCommands
from ._engine import REQUEST_TIMEOUT, Engine
from ._errors import (
    CommandExitException,
    InvalidArgumentException,
    NotFoundException,
    SandboxException,
    TooLargeException,
)
from ._trees import link_of, pack, unpack
from ._types import EntryInfo, FileType

T = TypeVar("T")

#: Of one file that is read, unless the caller says otherwise.
READ_BYTES_MAX = 256 << 20
#: Of one download, as a tar stream.
DOWNLOAD_BYTES_MAX = 8 << 30
#: Kept in memory before a file on disk is used.
_SPOOL_BYTES = 4 << 20
_PART_BYTES = 256 << 10
_LINKS_MAX = 16

# Go's bits for what is no plain file (io/fs, FileMode).
_GO_DIR, _GO_SYMLINK, _GO_OTHER = 1 << 31, 1 << 27, 1 << 26 | 1 << 25 | 1 << 24


class AsyncFiles:
    """Reads, writes, lists and moves files. Paths begin at the root."""

    def __init__(self, engine: Engine, sandbox: str, commands: AsyncCommands) -> None:
        self._engine, self._sandbox, self._commands = engine, sandbox, commands

    @overload
    async def read(
        self, path: str, format: Literal["text"] = "text", *, max_bytes: int = READ_BYTES_MAX
    ) -> str: ...

    @overload
    async def read(
        self, path: str, format: Literal["bytes"], *, max_bytes: int = READ_BYTES_MAX
    ) -> bytes: ...

    async def read(
        self,
        path: str,
        format: Literal["text", "bytes"] = "text",
        *,
        max_bytes: int = READ_BYTES_MAX,
    ) -> str | bytes:
        """A file's content.

        Raises a NotFoundException where there is none, and a SandboxException
        when it has more than ``max_bytes``.
        """
        for _ in range(_LINKS_MAX):
            with tempfile.SpooledTemporaryFile(max_size=_SPOOL_BYTES) as packed:
                await self._fetch(path, packed, max_bytes + (1 << 20), REQUEST_TIMEOUT)
                content = await self._blocking(lambda: _content(packed, path, max_bytes))
            if isinstance(content, bytes):
                return content if format == "bytes" else content.decode()
            path = posixpath.normpath(posixpath.join(posixpath.dirname(path), content))
        raise SandboxException(f"{path}: too many symbolic links")

    async def write(self, path: str, data: str | bytes | IO[bytes], mode: int = 0o644) -> EntryInfo:
        """Makes or replaces a file, and the directories above it."""
        if not isinstance(data, (str, bytes)):
            data = data.read()
        content = data.encode() if isinstance(data, str) else data
        parent, name = posixpath.split(_absolute(path))
        if not name:
            raise InvalidArgumentException(f"{path} names no file")
        entry = tarfile.TarInfo(name)
        entry.size, entry.mode, entry.mtime = len(content), mode, int(time.time())
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as tar:
            tar.addfile(entry, io.BytesIO(content))
        await self._unpack(parent, packed, REQUEST_TIMEOUT)
        return EntryInfo(name, posixpath.join(parent, name), FileType.FILE, len(content), mode)

    async def get_info(self, path: str) -> EntryInfo:
        """Raises a NotFoundException where there is nothing."""
        path = _absolute(path)
        told = await self._engine.path_stat(self._sandbox, path)
        mode = int(told["mode"])
        kinds = {_GO_DIR: FileType.DIR, _GO_SYMLINK: FileType.SYMLINK, _GO_OTHER: FileType.OTHER}
        file_type = next((kind for bits, kind in kinds.items() if mode & bits), FileType.FILE)
        return EntryInfo(told["name"], path, file_type, int(told["size"]), mode & 0o777)

    async def exists(self, path: str) -> bool:
        try:
            await self.get_info(path)
        except NotFoundException:
            return False
        return True

    async def list(self, path: str, depth: int = 1) -> list[EntryInfo]:
        """What a directory holds, ``depth`` levels down, sorted by path."""
        path = _absolute(path)
        await self.get_info(path)
        script = 'cd -- "$1" && find . -mindepth 1 -maxdepth "$2" -exec stat -c "%f %s" {} \\; -print0'
        told = await self._run(path, ["/bin/sh", "-c", script, "sh", path, str(int(depth))])
        return sorted(_entries(path, told), key=lambda entry: entry.path)

    async def make_dir(self, path: str) -> bool:
        """Makes a directory, and those above it. False when it was there."""
        if await self.exists(path):
            return False
        await self._run(path, ["mkdir", "-p", "--", _absolute(path)])
        return True

    async def remove(self, path: str) -> None:
        """Removes a file, or a directory with all in it."""
        await self.get_info(path)
        await self._run(path, ["rm", "-rf", "--", _absolute(path)])

    async def rename(self, old_path: str, new_path: str) -> EntryInfo:
        await self.get_info(old_path)
        await self._run(old_path, ["mv", "--", _absolute(old_path), _absolute(new_path)])
        return await self.get_info(new_path)

    async def upload(
        self, local: str | os.PathLike[str], path: str, timeout: float | None = None
    ) -> None:
        """Copies a file or a directory of this machine to ``path``."""
        parent, name = posixpath.split(_absolute(path))
        with tempfile.TemporaryFile() as packed:
            await self._blocking(lambda: pack(Path(local), name or ".", packed))
            await self._unpack(parent, packed, timeout)

    async def download(
        self,
        path: str,
        local: str | os.PathLike[str],
        timeout: float | None = None,
        *,
        max_bytes: int = DOWNLOAD_BYTES_MAX,
    ) -> None:
        """Copies a file or a directory to ``local``, which must not exist.

        Nothing is written outside of ``local``, whatever the sandbox sends:
        links that lead out of what is copied, and absolute ones, are refused; devices
        and pipes do not come. Where ``path`` is a link itself, it is followed in the sandbox.
        """
        target = Path(local)
        if target.exists() or target.is_symlink():
            raise InvalidArgumentException(f"{target} exists")
        for _ in range(_LINKS_MAX):
            with tempfile.TemporaryFile() as packed:
                await self._fetch(path, packed, max_bytes, timeout)
                link = await self._blocking(lambda: link_of(packed))
                if link is None:
                    await self._blocking(lambda: unpack(packed, target))
                    return
            path = posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
        raise SandboxException(f"{path}: too many symbolic links")

    async def _fetch(self, path: str, to: IO[bytes], limit: int, timeout: float | None) -> None:
        response = await self._engine.archive(self._sandbox, _absolute(path), timeout)
        size = 0
        try:
            async for part in response.chunks():
                size += len(part)
                if size > limit:
                    raise TooLargeException(f"{path} has more than {limit} bytes")
                to.write(part)
        finally:
            await response.close()
        to.seek(0)

    async def _unpack(self, parent: str, packed: IO[bytes], timeout: float | None) -> None:
        length = packed.seek(0, io.SEEK_END)
        try:
            await self._send(parent, packed, length, timeout)
        except NotFoundException:
            await self._run(parent, ["mkdir", "-p", "--", parent])
            await self._send(parent, packed, length, timeout)

    async def _send(self, at: str, packed: IO[bytes], length: int, timeout: float | None) -> None:
        packed.seek(0)
        await self._engine.unpack(self._sandbox, at, _parts(packed), length, timeout)

    async def _run(self, path: str, words: Sequence[str]) -> str:
        try:
            return (await self._commands.run(words, user="0")).stdout
        except CommandExitException as error:
            kind = NotFoundException if "No such file" in error.stderr else SandboxException
            raise kind(f"{path}: {error.stderr.strip() or error}") from None

    async def _blocking(self, work: Callable[[], T]) -> T:
        return await self._engine.streams.call(work)


def _absolute(path: str) -> str:
    if not path.startswith("/") or "\0" in path:
        raise InvalidArgumentException(f"{path!r}: a path in a sandbox begins with /")
    return posixpath.normpath("/" + path.lstrip("/"))


def _parts(file: IO[bytes]) -> Iterator[bytes]:
    while part := file.read(_PART_BYTES):
        yield part


def _entries(root: str, told: str) -> Iterator[EntryInfo]:
    kinds = {0o4: FileType.DIR, 0o10: FileType.FILE, 0o12: FileType.SYMLINK}
    # Each is a line of figures, and a name up to a zero.
    for found in re.finditer(r"([0-9a-f]+) (\d+)\n\./([^\0]*)\0", told):
        mode, path = int(found[1], 16), posixpath.join(root, found[3])
        kind = kinds.get(mode >> 12, FileType.OTHER)
        yield EntryInfo(posixpath.basename(path), path, kind, int(found[2]), mode & 0o777)


def _content(packed: Any, path: str, limit: int) -> bytes | str:
    """A file's content, or where its symbolic link leads."""
    try:
        with tarfile.open(fileobj=packed, mode="r:") as tar:
            entry = tar.next()
            if entry is not None and entry.issym():
                return entry.linkname
            file = tar.extractfile(entry) if entry is not None and entry.isreg() else None
            if file is None:
                raise InvalidArgumentException(f"{path} is no file")
            content = file.read(limit + 1)
    except tarfile.TarError as error:
        raise SandboxException(f"{path} came as no archive: {error}") from error
    if len(content) > limit:
        raise TooLargeException(f"{path} has more than {limit} bytes")
    return content
