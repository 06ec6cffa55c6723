"""HTTP/1.1, as much as the server speaks: one request a connection.

What comes is bounded: a line, the head, a body that is read whole.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any
from urllib.parse import quote, urlencode

from ._errors import (
    BrokenOffException,
    InvalidArgumentException,
    NotFoundException,
    SandboxException,
)
from ._streams import Stream, Streams

LINE_BYTES_MAX = 64 << 10
HEADERS_MAX = 128
#: Of a body that is read whole.
BODY_BYTES_MAX = 64 << 20


class Reader:
    """Reads a stream by lines and counts."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self._held = b""

    async def some(self) -> bytes:
        """What comes next; nothing at the end."""
        held, self._held = self._held, b""
        return held or await self.stream.read()

    async def some_of(self, count: int) -> bytes:
        """As :meth:`some`, at most ``count`` bytes.

        Raises a BrokenOffException at the end.
        """
        came = await self.some()
        if not came:
            raise BrokenOffException("the server broke the connection off")
        came, self._held = came[:count], came[count:]
        return came

    async def exactly(self, count: int) -> bytes:
        parts: list[bytes] = []
        missing = count
        while missing:
            part = await self.some_of(missing)
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)

    async def exactly_or_end(self, count: int) -> bytes | None:
        """``None`` when the stream is over before the first byte."""
        first = await self.some()
        if not first:
            return None
        self._held = first + self._held
        return await self.exactly(count)

    async def line(self) -> bytes:
        """A line without its end."""
        line = b""
        while b"\n" not in line:
            if len(line) > LINE_BYTES_MAX:
                raise SandboxException("the server sends a line without end")
            line += await self.some_of(LINE_BYTES_MAX + 1)
        line, _, rest = line.partition(b"\n")
        self._held = rest + self._held
        return line.removesuffix(b"\r")


class Response:
    """A reply: its head, and a body that is still to be read."""

    def __init__(self, status: int, headers: Mapping[str, str], reader: Reader) -> None:
        self.status = status
        self.headers = headers
        self.reader = reader

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body, as it comes."""
        if self.status == 204 or self.status == 304:
            return
        if self.headers.get("transfer-encoding", "").lower() == "chunked":
            while left := _size(await self.reader.line(), 16):
                while left:
                    part = await self.reader.some_of(left)
                    left -= len(part)
                    yield part
                await self.reader.line()
        elif "content-length" in self.headers:
            left = _size(self.headers["content-length"].encode(), 10)
            while left:
                part = await self.reader.some_of(left)
                left -= len(part)
                yield part
        else:
            while part := await self.reader.some():
                yield part

    async def body(self) -> bytes:
        parts: list[bytes] = []
        size = 0
        async for part in self.chunks():
            parts.append(part)
            size += len(part)
            if size > BODY_BYTES_MAX:
                raise SandboxException(f"the server's reply has more than {BODY_BYTES_MAX} bytes")
        return b"".join(parts)

    async def json(self) -> Any:
        try:
            return json.loads(await self.body())
        except ValueError as error:
            raise SandboxException(f"the server's reply cannot be read: {error}") from error

    async def close(self) -> None:
        await self.reader.stream.close()


def _size(text: bytes, base: int) -> int:
    digits = text.split(b";")[0].strip()
    if not digits.isalnum() or len(digits) > 16:
        raise SandboxException(f"the server sends the length {digits[:32]!r}")
    try:
        return int(digits, base)
    except ValueError:
        raise SandboxException(f"the server sends the length {digits[:32]!r}") from None


async def _head(reader: Reader) -> tuple[int, dict[str, str]]:
    first = (await reader.line()).split(b" ", 2)
    if len(first) < 2 or not first[0].startswith(b"HTTP/1.") or not first[1].isdigit():
        raise SandboxException("what answers there is no HTTP server")
    headers: dict[str, str] = {}
    while line := await reader.line():
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip()
        if len(headers) > HEADERS_MAX:
            raise SandboxException("the server sends headers without end")
    return int(first[1]), headers


async def request(
    streams: Streams,
    socket: str,
    deadline: float | None,
    method: str,
    path: str,
    *,
    query: Mapping[str, str] | None = None,
    json_body: object = None,
    body: Iterable[bytes] = (),
    length: int = 0,
    upgrade: bool = False,
) -> Response:
    """Sends a request; the response once its head is there.

    ``body`` has ``length`` bytes. The caller closes the response. Raises a
    SandboxException for what the server refuses.
    """
    content = "application/x-tar"
    if json_body is not None:
        packed = json.dumps(json_body).encode()
        body, length, content = [packed], len(packed), "application/json"
    target = quote(path) + (f"?{urlencode(query)}" if query else "")
    lines = [f"{method} {target} HTTP/1.1", "Host: exocell"]
    lines += ["Connection: Upgrade", "Upgrade: tcp"] if upgrade else ["Connection: close"]
    if length:
        lines.append(f"Content-Type: {content}")
    lines += [f"Content-Length: {length}", "", ""]
    stream = await streams.connect(socket, deadline)
    try:
        await stream.write("\r\n".join(lines).encode())
        try:
            for part in body:
                await stream.write(part)
        except BrokenOffException:
            pass  # A server that takes no more may have said why.
        reader = Reader(stream)
        status, headers = await _head(reader)
        response = Response(status, headers, reader)
        if status >= 400:
            raise await _refusal(response, method == "HEAD")
        return response
    except BaseException:
        await stream.close()
        raise


async def _refusal(response: Response, bodiless: bool) -> SandboxException:
    message = "" if bodiless else (await response.body()).decode(errors="replace")
    try:
        message = json.loads(message)["message"]
    except (ValueError, KeyError, TypeError):
        pass
    kinds = {400: InvalidArgumentException, 404: NotFoundException, 501: InvalidArgumentException}
    kind = kinds.get(response.status, SandboxException)
    return kind(message or f"the server answers with status {response.status}")
