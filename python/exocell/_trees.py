"""Trees of files on their way between this machine and a cell.

What comes from a cell was written by whoever runs in it. :func:`unpack` lets
nothing of it lie, or lead, outside of the one entry that was asked for, and
:func:`put` moves it over what there is without following a link there.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import stat
import tarfile
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import IO

from ._errors import InvalidArgumentException, SandboxException

#: Directories below one another. Python's own functions for trees call themselves.
_DEPTH_MAX = 200


def pack(local: Path, name: str, to: IO[bytes]) -> None:
    """Writes a file or a directory, as root's ``name``."""

    def owned(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = ""
        return entry

    with tarfile.open(fileobj=to, mode="w", format=tarfile.PAX_FORMAT) as tar:
        tar.add(local, arcname=name, filter=owned)


def unpack(packed: IO[bytes], target: Path) -> None:
    """Makes ``target`` of the one entry that an archive has.

    Everything lands in a directory of its own, and the entry moves on. Raises
    a SandboxException for what lies or leads outside of the entry.
    """
    if not hasattr(tarfile, "data_filter"):
        raise SandboxException("this Python cannot unpack safely; use 3.11.4 or newer")
    with tempfile.TemporaryDirectory(prefix=".exocell-", dir=target.parent) as place:
        try:
            with tarfile.open(fileobj=packed, mode="r:") as tar:
                tar.extractall(place, filter=_Entries().take)
        except (tarfile.TarError, UnicodeError) as error:
            raise SandboxException(f"the sandbox sends what is refused: {error}") from error
        entries = list(Path(place).iterdir())
        if not entries:
            raise InvalidArgumentException("this is neither a file nor a directory")
        if len(entries) != 1:
            raise SandboxException("the sandbox sends more than what was asked for")
        # Not shutil.move, which follows a link to a directory.
        entries[0].rename(target)


def link_of(packed: IO[bytes]) -> str | None:
    """Where the entry of an archive leads, if it is a symbolic link."""
    try:
        with tarfile.open(fileobj=packed, mode="r:") as tar:
            entry = tar.next()
    except tarfile.TarError as error:
        raise SandboxException(f"the sandbox sends what is refused: {error}") from error
    packed.seek(0)
    return entry.linkname if entry is not None and entry.issym() else None


class _Entries:
    """What has come of one archive, whose first part of each name is the same."""

    def __init__(self) -> None:
        self._top: str | None = None
        self._links: set[tuple[str, ...]] = set()

    def take(self, entry: tarfile.TarInfo, place: str) -> tarfile.TarInfo | None:
        """The filter of ``extractall``. A tarfile's own judges by names that it follows itself,
        and not in each of Python's versions rightly (CVE-2025-4517)."""
        # They have no content, and are easily left in a tree.
        if entry.isdev():
            return None
        taken = tarfile.data_filter(entry, place)
        parts = _parts(taken.name)
        if not parts:
            return taken
        self._top = parts[0] if self._top is None else self._top
        if parts[0] != self._top:
            raise SandboxException("the sandbox sends more than what was asked for")
        if ".." in parts or len(parts) > _DEPTH_MAX or self._is_behind_link(parts):
            raise _refused(entry)
        if taken.issym():
            taken = taken.replace(linkname=_inside(taken, len(parts) - 2), deep=False)
            self._links.add(parts)
        elif taken.islnk():
            of = _parts(taken.linkname)
            if of[:1] != parts[:1] or ".." in of or self._is_behind_link(of):
                raise _refused(entry)
        return taken

    def _is_behind_link(self, parts: tuple[str, ...]) -> bool:
        return any(parts[:count] in self._links for count in range(1, len(parts) + 1))


def _parts(name: str) -> tuple[str, ...]:
    return tuple(part for part in name.split("/") if part not in ("", "."))


def _inside(link: tarfile.TarInfo, depth: int) -> str:
    """Where a link in a directory ``depth`` levels below the entry's leads, which is in the entry.

    It goes up first and then down only, so that no other link changes how far it goes up.
    """
    leads = posixpath.normpath(link.linkname)
    if leads.startswith("/") or leads.split("/").count("..") > depth:
        raise _refused(link)
    return leads


def _refused(entry: tarfile.TarInfo) -> SandboxException:
    to = f" -> {entry.linkname!r}" if entry.linkname else ""
    return SandboxException(
        f"the sandbox sends what is refused: {entry.name!r}{to} leads out of what was asked for"
    )


def put(came: Path, target: Path) -> None:
    """Moves what came over what there is. Links in ``target`` are replaced, and never followed."""
    target = Path(os.path.abspath(target))
    with _opened(came.parent) as source, _opened(target.parent) as place:
        _put(source, came.name, place, target.name)


def _put(source: int, name: str, place: int, to: str) -> None:
    if not stat.S_ISDIR(os.stat(name, dir_fd=source, follow_symlinks=False).st_mode):
        os.rename(name, to, src_dir_fd=source, dst_dir_fd=place)
        return
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISLNK(os.stat(to, dir_fd=place, follow_symlinks=False).st_mode):
            os.unlink(to, dir_fd=place)
    with contextlib.suppress(FileExistsError):
        os.mkdir(to, dir_fd=place)
    with _opened(name, source) as inner, _opened(to, place) as into:
        for one in os.listdir(inner):
            _put(inner, one, into, one)


@contextlib.contextmanager
def _opened(path: str | Path, at: int | None = None) -> Generator[int]:
    """A directory; below another it is no link."""
    flags = os.O_RDONLY | os.O_DIRECTORY | (0 if at is None else os.O_NOFOLLOW)
    opened = os.open(path, flags, dir_fd=at)
    try:
        yield opened
    finally:
        os.close(opened)
