"""Byte streams over a unix socket, blocking or of an event loop.

All of the client is written once, in coroutines over :class:`Streams`. With
:class:`Blocking` streams nothing in them ever suspends, so :func:`drive` runs
them to their end where there is no event loop.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from ._errors import BrokenOffException, SandboxException, TimeoutException

T = TypeVar("T")


class Stream(Protocol):
    """One connection."""

    #: When reads and writes give up, by ``time.monotonic()``; ``None``: never.
    deadline: float | None

    async def read(self) -> bytes:
        """Bytes that came, at most 64 KiB; none at the end."""
        ...

    async def write(self, data: bytes) -> None: ...

    async def write_eof(self) -> None: ...

    async def close(self) -> None: ...


class Streams(Protocol):
    """How a client waits."""

    async def connect(self, path: str, deadline: float | None) -> Stream: ...

    async def sleep(self, seconds: float) -> None: ...

    async def call(self, work: Callable[[], T]) -> T:
        """Does work that blocks, on files."""
        ...


READ_BYTES = 64 << 10


def deadline_of(timeout: float | None) -> float | None:
    return None if timeout is None else time.monotonic() + timeout


def _left(deadline: float | None) -> float | None:
    if deadline is None:
        return None
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutException("the time allowed for this is over")
    return left


def drive(work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine over blocking streams to its end."""
    try:
        work.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    work.close()
    raise RuntimeError("something asynchronous was awaited in a blocking sandbox")


@contextmanager
def _told() -> Generator[None]:
    """Tells a connection's errors in our words."""
    try:
        yield
    except (TimeoutError, asyncio.TimeoutError):
        raise TimeoutException("the server did not answer in time") from None
    except OSError as error:
        raise BrokenOffException(f"the server broke the connection off ({error})") from error


class _BlockingStream:
    def __init__(self, connection: socket.socket, deadline: float | None) -> None:
        self._socket = connection
        self.deadline = deadline

    async def read(self) -> bytes:
        self._socket.settimeout(_left(self.deadline))
        with _told():
            return self._socket.recv(READ_BYTES)

    async def write(self, data: bytes) -> None:
        self._socket.settimeout(_left(self.deadline))
        with _told():
            self._socket.sendall(data)

    async def write_eof(self) -> None:
        with _told():
            self._socket.shutdown(socket.SHUT_WR)

    async def close(self) -> None:
        self._socket.close()


class Blocking:
    """Streams of a thread that waits."""

    async def connect(self, path: str, deadline: float | None) -> Stream:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(_left(deadline))
            connection.connect(path)
        except OSError as error:
            connection.close()
            raise _unreachable(path, error) from error
        return _BlockingStream(connection, deadline)

    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    async def call(self, work: Callable[[], T]) -> T:
        return work()


class _LoopStream:
    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, deadline: float | None
    ) -> None:
        self._reader, self._writer = reader, writer
        self.deadline = deadline

    async def read(self) -> bytes:
        with _told():
            return await _within(self.deadline, self._reader.read(READ_BYTES))

    async def write(self, data: bytes) -> None:
        with _told():
            self._writer.write(data)
            await _within(self.deadline, self._writer.drain())

    async def write_eof(self) -> None:
        with _told():
            self._writer.write_eof()

    async def close(self) -> None:
        self._writer.close()


class Loop:
    """Streams of the running event loop."""

    async def connect(self, path: str, deadline: float | None) -> Stream:
        try:
            pair = await _within(deadline, asyncio.open_unix_connection(path))
        except (TimeoutError, asyncio.TimeoutError):
            raise TimeoutException("the server did not answer in time") from None
        except OSError as error:
            raise _unreachable(path, error) from error
        return _LoopStream(*pair, deadline)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def call(self, work: Callable[[], T]) -> T:
        return await asyncio.to_thread(work)


async def _within(deadline: float | None, work: Coroutine[Any, Any, T]) -> T:
    try:
        left = _left(deadline)
    except TimeoutException:
        work.close()
        raise
    # Not wait_for(), which before Python 3.12 forgets a cancellation that comes as work ends.
    async with asyncio.timeout(left):
        return await work


def _unreachable(path: str, error: OSError) -> SandboxException:
    return SandboxException(
        f"no server at {path} ({error}); start one: exocell serve --docker {path}"
    )
