"""Commands in a sandbox."""

from __future__ import annotations

import codecs
import inspect
import shlex
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, overload

from ._engine import REQUEST_TIMEOUT, Engine
from ._errors import (
    BrokenOffException,
    CommandExitException,
    NotFoundException,
    SandboxException,
    TimeoutException,
)
from ._http import Response
from ._streams import deadline_of
from ._types import CommandResult, Output, ProcessInfo

#: Takes a piece of output; may be a coroutine function where the sandbox is asynchronous.
OutputHandler = Callable[[str], Awaitable[None] | None]
#: Seconds that a command may take where nobody says.
COMMAND_TIMEOUT = 60.0
#: Of a command's output that is kept.
OUTPUT_BYTES_MAX = 64 << 20

_HEADER_BYTES = 8
_STREAMS_MAX = 2


class AsyncCommandHandle:
    """A command that runs in the background, or did."""

    def __init__(self, engine: Engine, sandbox: str, exec_id: str, session: Response) -> None:
        self._engine, self._sandbox, self._exec_id = engine, sandbox, exec_id
        self._session = session
        self._pid = 0
        self._left = 0
        self._stream = 0
        decoder = codecs.getincrementaldecoder("utf-8")
        self._decoders = [decoder("replace"), decoder("replace")]
        self._texts: tuple[list[str], list[str]] = ([], [])
        self._size = 0
        self._result: CommandResult | None = None
        self._is_abandoned = False

    @property
    def pid(self) -> int:
        """The process in the sandbox; 0 where it could not be started."""
        return self._pid

    @property
    def exit_code(self) -> int | None:
        """``None`` while its end was not waited for."""
        return None if self._result is None else self._result.exit_code

    async def _started(self) -> None:
        """Waits until there is a pid, or there will be none."""
        until = time.monotonic() + REQUEST_TIMEOUT
        while not self._pid:
            told = await self._engine.exec_inspect(self._exec_id)
            self._pid = int(told.get("Pid") or 0)
            if told.get("ExitCode") is not None:
                return
            if not self._pid:
                if time.monotonic() > until:
                    raise TimeoutException("the command did not start in time")
                await self._engine.streams.sleep(0.002)

    async def _piece(self) -> Output | None:
        """What comes next; ``None`` at the end."""
        reader = self._session.reader
        while not self._left:
            header = await reader.exactly_or_end(_HEADER_BYTES)
            if header is None:
                return None
            if header[0] > _STREAMS_MAX or header[1:4] != b"\0\0\0":
                raise SandboxException("the server's output cannot be told apart")
            self._stream = 1 if header[0] == 2 else 0
            self._left = int.from_bytes(header[4:], "big")
        came = await reader.some_of(self._left)
        self._left -= len(came)
        self._size += len(came)
        return self._keep(self._decoders[self._stream].decode(came), self._stream)

    def _keep(self, text: str, stream: int) -> Output:
        if self._size > OUTPUT_BYTES_MAX:
            raise SandboxException(f"the command wrote more than {OUTPUT_BYTES_MAX} bytes")
        self._texts[stream].append(text)
        return Output(stderr=text) if stream else Output(stdout=text)

    async def __aiter__(self) -> AsyncIterator[Output]:
        """What it writes, as it comes, up to its end.

        Raises a TimeoutException when it takes longer than ``run`` was told;
        it is killed then. Every exception has what came before it, as
        ``stdout`` and ``stderr``.
        """
        while self._result is None:
            try:
                piece = await self._piece()
            except SandboxException as error:
                error.stdout, error.stderr = ("".join(parts) for parts in self._texts)
                await self._abandon()
                raise
            if piece is None:
                for stream, decoder in enumerate(self._decoders):
                    if rest := decoder.decode(b"", final=True):
                        yield self._keep(rest, stream)
                await self._settle()
            elif piece.stdout or piece.stderr:
                yield piece

    async def _settle(self) -> None:
        await self._session.close()
        out, err = ("".join(parts) for parts in self._texts)
        try:
            told = await self._engine.exec_inspect(self._exec_id)
            code = told.get("ExitCode")
            if not isinstance(code, int):
                raise BrokenOffException("the connection to the command was lost")
        except SandboxException as error:
            error.stdout, error.stderr = out, err
            raise
        self._result = CommandResult(out, err, code)

    async def wait(
        self,
        on_stdout: OutputHandler | None = None,
        on_stderr: OutputHandler | None = None,
    ) -> CommandResult:
        """Waits for the end.

        Raises a CommandExitException when the exit code is not 0, and a
        TimeoutException when the command takes longer than ``run`` was told;
        it is killed then. Every exception has what the command had written
        before, as ``stdout`` and ``stderr``.
        """
        try:
            async for piece in self:
                await _tell(on_stdout, piece.stdout)
                await _tell(on_stderr, piece.stderr)
        except BaseException:
            await self._abandon()
            raise
        result = self._result
        assert result is not None, "the loop ends with a result"
        if result.exit_code:
            raise CommandExitException(result.stdout, result.stderr, result.exit_code)
        return result

    async def _abandon(self) -> None:
        if self._is_abandoned:
            return
        self._is_abandoned = True
        await self._session.close()
        with suppress(SandboxException):
            await self.kill()

    async def kill(self) -> bool:
        """Kills it with all that it started in its session. False when it had ended."""
        await self._started()
        return await kill(self._engine, self._sandbox, self._pid)

    async def send_stdin(self, data: str | bytes) -> None:
        """Writes to its input, where ``run`` was told ``stdin=True``."""
        packed = data.encode() if isinstance(data, str) else data
        await self._session.reader.stream.write(packed)

    async def close_stdin(self) -> None:
        """Ends its input."""
        await self._session.reader.stream.write_eof()

    async def disconnect(self) -> None:
        """Leaves it running and hears no more of it."""
        await self._session.close()


async def _tell(handler: OutputHandler | None, text: str) -> None:
    if handler and text:
        told = handler(text)
        if inspect.isawaitable(told):
            await told


async def kill(engine: Engine, sandbox: str, pid: int) -> bool:
    """Kills the session that ``pid`` leads. False when there is none."""
    if pid <= 1:
        return False
    config = {"Cmd": ["/bin/sh", "-c", f"kill -s KILL -- -{int(pid)}"], "User": "0"}
    exec_id = await engine.exec_create(sandbox, config)
    session = await engine.exec_start(exec_id)
    try:
        while await session.reader.some():
            pass
    finally:
        await session.close()
    told = await engine.exec_inspect(exec_id)
    return bool(told.get("ExitCode") == 0)


class AsyncCommands:
    """Starts commands."""

    def __init__(self, engine: Engine, sandbox: str) -> None:
        self._engine, self._sandbox = engine, sandbox

    @overload
    async def run(
        self,
        cmd: str | Sequence[str],
        background: Literal[False] = False,
        envs: Mapping[str, str] | None = None,
        user: str | None = None,
        cwd: str | None = None,
        on_stdout: OutputHandler | None = None,
        on_stderr: OutputHandler | None = None,
        stdin: bool = False,
        timeout: float | None = COMMAND_TIMEOUT,
    ) -> CommandResult: ...

    @overload
    async def run(
        self,
        cmd: str | Sequence[str],
        background: Literal[True],
        envs: Mapping[str, str] | None = None,
        user: str | None = None,
        cwd: str | None = None,
        on_stdout: None = None,
        on_stderr: None = None,
        stdin: bool = False,
        timeout: float | None = COMMAND_TIMEOUT,
    ) -> AsyncCommandHandle: ...

    async def run(
        self,
        cmd: str | Sequence[str],
        background: bool = False,
        envs: Mapping[str, str] | None = None,
        user: str | None = None,
        cwd: str | None = None,
        on_stdout: OutputHandler | None = None,
        on_stderr: OutputHandler | None = None,
        stdin: bool = False,
        timeout: float | None = COMMAND_TIMEOUT,
    ) -> CommandResult | AsyncCommandHandle:
        """Runs a line of the sandbox's shell, or a program with its arguments.

        With ``background`` it returns once the command has started. Raises
        what :meth:`AsyncCommandHandle.wait` raises. ``timeout`` is in seconds;
        ``None`` is as long as the sandbox lives.
        """
        handle = await self._start(cmd, envs, user, cwd, stdin, timeout)
        if not background:
            return await handle.wait(on_stdout, on_stderr)
        await handle._started()  # pyright: ignore[reportPrivateUsage]
        return handle

    async def _start(
        self,
        cmd: str | Sequence[str],
        envs: Mapping[str, str] | None,
        user: str | None,
        cwd: str | None,
        stdin: bool,
        timeout: float | None,
    ) -> AsyncCommandHandle:
        config: dict[str, Any] = {
            "Cmd": ["/bin/sh", "-c", cmd] if isinstance(cmd, str) else list(cmd),
            "Env": [f"{name}={value}" for name, value in (envs or {}).items()],
            "User": user or "",
            "WorkingDir": cwd or "",
            "AttachStdin": stdin,
            "AttachStdout": True,
            "AttachStderr": True,
        }
        exec_id = await self._engine.exec_create(self._sandbox, config)
        session = await self._engine.exec_start(exec_id)
        session.reader.stream.deadline = deadline_of(timeout)
        return AsyncCommandHandle(self._engine, self._sandbox, exec_id, session)

    async def list(self) -> list[ProcessInfo]:
        """The commands that run, whoever started them."""
        ids: list[str] = (await self._engine.inspect(self._sandbox)).get("ExecIDs") or []
        running: list[ProcessInfo] = []
        for exec_id in ids:
            with suppress(NotFoundException):
                told = await self._engine.exec_inspect(exec_id)
                if told.get("Running"):
                    running.append(_process(told))
        return running

    async def kill(self, pid: int) -> bool:
        """Kills a command with all that it started in its session."""
        return await kill(self._engine, self._sandbox, pid)


def _process(told: Mapping[str, Any]) -> ProcessInfo:
    config: Mapping[str, Any] = told.get("ProcessConfig") or {}
    words: list[str] = [config.get("entrypoint") or "", *(config.get("arguments") or [])]
    line = words[2] if words[:2] == ["/bin/sh", "-c"] and len(words) == 3 else shlex.join(words)
    return ProcessInfo(pid=int(told.get("Pid") or 0), cmd=line)

