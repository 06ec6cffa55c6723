"""A cell as the sandbox of LangChain's Deep Agents.

    from deepagents import create_deep_agent
    from exocell.deepagents import ExocellSandbox

    with ExocellSandbox.create("exocell/base:latest") as sandbox:
        agent = create_deep_agent(backend=sandbox, ...)

Needs deepagents 0.6 or newer (``pip install exocell[deepagents]``), the
``exocell`` command, and Python 3 in the image; no server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

from deepagents.backends.protocol import (
    ExecuteResponse,
    FileDownloadResponse,
    FileOperationError,
    FileUploadResponse,
)
from deepagents.backends.sandbox import BaseSandbox

from ._cell import Cell, Limits
from ._errors import (
    IsDirectoryException,
    NotFoundException,
    PermissionException,
    SandboxException,
)
from ._program import Ended, text

T = TypeVar("T")

#: Seconds that a command may take where nobody says.
COMMAND_TIMEOUT = 30 * 60
#: Of each of a command's two streams that a model is shown.
OUTPUT_BYTES_MAX = 512 << 10
#: What timeout(1) says.
_TIMEOUT_EXIT_CODE = 124


class ExocellSandbox(BaseSandbox):
    """One cell. As a context manager it is ended at the end."""

    def __init__(
        self, cell: Cell, workdir: str | None = None, timeout: int = COMMAND_TIMEOUT
    ) -> None:
        self._cell, self._workdir, self._timeout = cell, workdir, timeout

    @classmethod
    def create(
        cls,
        image: str = "exocell/base:latest",
        *,
        allow_net: Sequence[str] = (),
        envs: Mapping[str, str] | None = None,
        memory_mb: int | None = None,
        cpus: float | None = None,
        disk_mb: int | None = None,
        caps: str | None = None,
        workdir: str | None = None,
        user: str | None = None,
        lifetime: float | None = None,
        timeout: int = COMMAND_TIMEOUT,
    ) -> ExocellSandbox:
        """Starts a cell, without a network unless rules (``allow_net``) grant one.

        ``lifetime`` and ``timeout``, of a command, are in seconds. Raises a
        SandboxException.
        """

        async def start() -> Cell:
            limits = Limits.of(memory_mb, cpus, disk_mb, caps)
            return await Cell.start(
                image,
                kind="deepagents",
                envs=envs,
                allow_net=allow_net,
                limits=limits,
                user=user,
                workdir=workdir,
                lifetime=lifetime,
            )

        return cls(_wait(start()), workdir, timeout)

    @property
    def id(self) -> str:
        return self._cell.id

    def execute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        """Runs a line of the shell; with ``timeout`` 0 for as long as it takes."""
        return _wait(self.aexecute(command, timeout=timeout))

    async def aexecute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        seconds = self._timeout if timeout is None else timeout
        if seconds < 0:
            raise ValueError(f"timeout must not be negative: {seconds}")
        ended = await self._cell.exec(
            ["/bin/sh", "-c", command],
            cwd=self._workdir,
            timeout=seconds or None,
            output_max=OUTPUT_BYTES_MAX,
        )
        return _response(ended, seconds)

    def upload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        return _wait(self.aupload_files(files))

    async def aupload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        return [
            FileUploadResponse(path=path, error=await self._put(path, content))
            for path, content in files
        ]

    def download_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        return _wait(self.adownload_files(paths))

    async def adownload_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        return [await self._get(path) for path in paths]

    async def _put(self, path: str, content: bytes) -> FileOperationError | str | None:
        if not path.startswith("/"):
            return "invalid_path"
        try:
            await self._cell.write(path, content)
        except SandboxException as error:
            return _error(error)
        return None

    async def _get(self, path: str) -> FileDownloadResponse:
        if not path.startswith("/"):
            return FileDownloadResponse(path=path, error="invalid_path")
        try:
            return FileDownloadResponse(path=path, content=await self._cell.read(path))
        except SandboxException as error:
            return FileDownloadResponse(path=path, error=_error(error))

    def kill(self) -> bool:
        """Ends the cell, and all in it. False when it had ended."""
        return _wait(self._cell.remove())

    def __enter__(self) -> ExocellSandbox:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()


def _response(ended: Ended, seconds: int) -> ExecuteResponse:
    parts = [text(ended.stdout), text(ended.stderr)]
    code = ended.exit_code
    if ended.is_late:
        parts.append(f"Command timed out after {seconds} seconds")
        code = _TIMEOUT_EXIT_CODE
    output = "\n".join(part.removesuffix("\n") for part in parts if part)
    return ExecuteResponse(output=output, exit_code=code, truncated=ended.is_cut)


def _error(error: SandboxException) -> FileOperationError | str:
    match error:
        case IsDirectoryException():
            return "is_directory"
        case PermissionException():
            return "permission_denied"
        case NotFoundException():
            return "file_not_found"
        case _:
            return str(error)


def _wait(work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine to its end, for whoever has no event loop in this thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    work.close()
    raise RuntimeError("an event loop runs in this thread; use the method with an a before it")
