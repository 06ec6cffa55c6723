"""Sandboxes for a thread that waits: the same calls, driven to their end."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import IO, Literal, overload

from ._commands import COMMAND_TIMEOUT, AsyncCommandHandle, AsyncCommands
from ._files import DOWNLOAD_BYTES_MAX, READ_BYTES_MAX, AsyncFiles
from ._sandbox_async import TEMPLATE, TIMEOUT, AsyncSandbox
from ._streams import Blocking, drive
from ._types import CommandResult, EntryInfo, Output, ProcessInfo, SandboxInfo

#: Takes a piece of output.
OutputHandler = Callable[[str], None]


class CommandHandle:
    """A command that runs in the background, or did."""

    def __init__(self, inner: AsyncCommandHandle) -> None:
        self._inner = inner

    @property
    def pid(self) -> int:
        """The process in the sandbox; 0 where it could not be started."""
        return self._inner.pid

    @property
    def exit_code(self) -> int | None:
        """``None`` while its end was not waited for."""
        return self._inner.exit_code

    def __iter__(self) -> Iterator[Output]:
        """What it writes, as it comes, up to its end.

        Raises a TimeoutException when it takes longer than ``run`` was told;
        it is killed then. Every exception has what came before it, as
        ``stdout`` and ``stderr``.
        """
        pieces = self._inner.__aiter__()

        async def following() -> Output | None:
            return await anext(pieces, None)

        while (piece := drive(following())) is not None:
            yield piece

    def wait(
        self, on_stdout: OutputHandler | None = None, on_stderr: OutputHandler | None = None
    ) -> CommandResult:
        """Waits for the end.

        Raises a CommandExitException when the exit code is not 0, and a
        TimeoutException when the command takes longer than ``run`` was told;
        it is killed then. Every exception has what the command had written
        before, as ``stdout`` and ``stderr``.
        """
        return drive(self._inner.wait(on_stdout, on_stderr))

    def kill(self) -> bool:
        """Kills it with all that it started in its session. False when it had ended."""
        return drive(self._inner.kill())

    def send_stdin(self, data: str | bytes) -> None:
        """Writes to its input, where ``run`` was told ``stdin=True``."""
        drive(self._inner.send_stdin(data))

    def close_stdin(self) -> None:
        """Ends its input."""
        drive(self._inner.close_stdin())

    def disconnect(self) -> None:
        """Leaves it running and hears no more of it."""
        drive(self._inner.disconnect())


class Commands:
    """Starts commands."""

    def __init__(self, inner: AsyncCommands) -> None:
        self._inner = inner

    @overload
    def run(
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
    def run(
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
    ) -> CommandHandle: ...

    def run(
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
    ) -> CommandResult | CommandHandle:
        """Runs a line of the sandbox's shell, or a program with its arguments.

        With ``background`` it returns once the command has started. Raises
        what :meth:`CommandHandle.wait` raises. ``timeout`` is in seconds;
        ``None`` is as long as the sandbox lives.
        """
        inner = self._inner
        if background:
            work = inner.run(cmd, True, envs, user, cwd, stdin=stdin, timeout=timeout)
            return CommandHandle(drive(work))
        return drive(
            inner.run(cmd, False, envs, user, cwd, on_stdout, on_stderr, stdin, timeout)
        )

    def list(self) -> list[ProcessInfo]:
        """The commands that run, whoever started them."""
        return drive(self._inner.list())

    def kill(self, pid: int) -> bool:
        """Kills a command with all that it started in its session."""
        return drive(self._inner.kill(pid))


class Files:
    """Reads, writes, lists and moves files. Paths begin at the root."""

    def __init__(self, inner: AsyncFiles) -> None:
        self._inner = inner

    @overload
    def read(
        self, path: str, format: Literal["text"] = "text", *, max_bytes: int = READ_BYTES_MAX
    ) -> str: ...

    @overload
    def read(
        self, path: str, format: Literal["bytes"], *, max_bytes: int = READ_BYTES_MAX
    ) -> bytes: ...

    def read(
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
        if format == "bytes":
            return drive(self._inner.read(path, "bytes", max_bytes=max_bytes))
        return drive(self._inner.read(path, max_bytes=max_bytes))

    def write(self, path: str, data: str | bytes | IO[bytes], mode: int = 0o644) -> EntryInfo:
        """Makes or replaces a file, and the directories above it."""
        return drive(self._inner.write(path, data, mode))

    def get_info(self, path: str) -> EntryInfo:
        """Raises a NotFoundException where there is nothing."""
        return drive(self._inner.get_info(path))

    def exists(self, path: str) -> bool:
        return drive(self._inner.exists(path))

    def list(self, path: str, depth: int = 1) -> list[EntryInfo]:
        """What a directory holds, ``depth`` levels down, sorted by path."""
        return drive(self._inner.list(path, depth))

    def make_dir(self, path: str) -> bool:
        """Makes a directory, and those above it. False when it was there."""
        return drive(self._inner.make_dir(path))

    def remove(self, path: str) -> None:
        """Removes a file, or a directory with all in it."""
        drive(self._inner.remove(path))

    def rename(self, old_path: str, new_path: str) -> EntryInfo:
        return drive(self._inner.rename(old_path, new_path))

    def upload(
        self, local: str | os.PathLike[str], path: str, timeout: float | None = None
    ) -> None:
        """Copies a file or a directory of this machine to ``path``."""
        drive(self._inner.upload(local, path, timeout))

    def download(
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
        drive(self._inner.download(path, local, timeout, max_bytes=max_bytes))


class Sandbox:
    """A cell that waits for commands. Make one with :meth:`create`.

    As a context manager it is killed at the end.
    """

    def __init__(self, inner: AsyncSandbox) -> None:
        self._inner = inner
        self.commands = Commands(inner.commands)
        self.files = Files(inner.files)

    @property
    def sandbox_id(self) -> str:
        return self._inner.sandbox_id

    @classmethod
    def create(
        cls,
        template: str = TEMPLATE,
        timeout: int | None = TIMEOUT,
        metadata: Mapping[str, str] | None = None,
        envs: Mapping[str, str] | None = None,
        *,
        ports: Sequence[int] = (),
        allow_network: bool = True,
        memory_mb: int | None = None,
        cpus: int | None = None,
        name: str | None = None,
        host: str | None = None,
    ) -> Sandbox:
        """Starts a sandbox from the image ``template``.

        It ends by itself after ``timeout`` seconds; ``None`` is never.
        ``ports`` are what :meth:`get_host` leads to. With ``allow_network`` it
        reaches what the server grants (``exocell serve --allow-net``), else
        nothing. ``host`` is the server's socket, by default what EXOCELL_HOST
        or DOCKER_HOST names. Raises a NotFoundException when there is no such
        image.
        """
        made = AsyncSandbox.create(
            template,
            timeout,
            metadata,
            envs,
            ports=ports,
            allow_network=allow_network,
            memory_mb=memory_mb,
            cpus=cpus,
            name=name,
            host=host,
            _streams=Blocking(),
        )
        return cls(drive(made))

    @classmethod
    def connect(cls, sandbox_id: str, *, host: str | None = None) -> Sandbox:
        """A sandbox that there is, by its id or name; a paused one goes on."""
        return cls(drive(AsyncSandbox.connect(sandbox_id, host=host, _streams=Blocking())))

    @classmethod
    def list(
        cls, metadata: Mapping[str, str] | None = None, *, host: str | None = None
    ) -> list[SandboxInfo]:
        """The sandboxes that there are, the youngest first."""
        return drive(AsyncSandbox.list(metadata, host=host, _streams=Blocking()))

    def get_info(self) -> SandboxInfo:
        """Raises a NotFoundException when it has ended."""
        return drive(self._inner.get_info())

    def is_running(self) -> bool:
        """False when it is paused, too."""
        return drive(self._inner.is_running())

    def get_host(self, port: int) -> str:
        """``ADDRESS:PORT`` of this machine that leads to ``port`` of the sandbox.

        Raises a NotFoundException for a port that ``create`` was not told.
        """
        return drive(self._inner.get_host(port))

    def pause(self) -> None:
        """Stops all of it where it is; its memory stays."""
        drive(self._inner.pause())

    def resume(self) -> None:
        """Lets it go on."""
        drive(self._inner.resume())

    def kill(self) -> bool:
        """Ends it, and all in it. False when it had ended."""
        return drive(self._inner.kill())

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()
