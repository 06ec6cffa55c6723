"""Inspect's sandboxes in cells: ``sandbox="exocell"``.

Needs inspect_ai 0.3.285 or newer (``pip install exocell[inspect]``), which finds
this provider by its entry point, and the ``exocell`` command; no server. A
sample is a cell. Without a configuration it is one of ``exocell/base`` and has
no network; :class:`ExocellConfig` says more.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import posixpath
import shlex
import tomllib
from collections.abc import Generator
from pathlib import Path
from typing import Any, Literal, overload

from inspect_ai.util import (
    ExecResult,
    OutputLimitExceededError,
    SandboxConnection,
    SandboxEnvironment,
    SandboxEnvironmentLimits,
    SandboxUnavailableError,
    SandboxUserUnsupportedError,
    sandboxenv,
)
from pydantic import BaseModel, ConfigDict, ValidationError

from ._cell import EVERYWHERE, Cell, Limits, build
from ._errors import (
    IsDirectoryException,
    NotFoundException,
    PermissionException,
    SandboxException,
    TimeoutException,
    TooLargeException,
)
from ._program import command, program, text, to_its_end

_LABEL = "exocell.inspect"
#: Seconds for a program of ours in a new cell.
_START_TIMEOUT = 300.0


class ExocellConfig(BaseModel):
    """What a sample's cell is, as ``SandboxEnvironmentSpec("exocell", ExocellConfig(...))``.

    A file ``exocell.toml`` beside the task says the same.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    #: An image of the store, or of a registry; it is not used where there is a Dockerfile.
    image: str = "exocell/base:latest"
    #: A Dockerfile; its folder is the build's context.
    dockerfile: str | None = None
    #: Rules of --allow-net for the cell. None is no network.
    allow_net: tuple[str, ...] = ()
    #: The same for commands of the Dockerfile.
    build_allow_net: tuple[str, ...] = ()
    #: Who programs run as, where a call says nobody.
    user: str | None = None
    memory_mb: int | None = None
    cpus: float | None = None
    disk_mb: int | None = None
    #: A capability table, which all else can only narrow.
    caps: str | None = None
    envs: dict[str, str] = {}


class ExocellSandboxEnvironment(SandboxEnvironment):
    """One sample's cell."""

    def __init__(self, cell: Cell, workdir: str) -> None:
        super().__init__()
        self._cell, self._workdir = cell, workdir

    @classmethod
    def config_files(cls) -> list[str]:
        return ["exocell.toml", "Dockerfile"]

    @classmethod
    def config_deserialize(cls, config: dict[str, Any]) -> BaseModel:
        return ExocellConfig(**config)

    @classmethod
    def default_concurrency(cls) -> int | None:
        return 2 * int(Limits.of().cpus or 1)

    def default_polling_interval(self) -> float:
        return 0.2

    @classmethod
    async def task_init(cls, task_name: str, config: Any) -> None:
        """Makes the image, once for all samples."""
        await _image(_config(config))

    @classmethod
    async def sample_init(
        cls, task_name: str, config: Any, metadata: dict[str, str]
    ) -> dict[str, SandboxEnvironment]:
        wanted = _config(config)
        cell = await Cell.start(
            await _image(wanted),
            kind="inspect",
            labels={_LABEL: task_name},
            envs=wanted.envs,
            allow_net=wanted.allow_net,
            user=wanted.user,
            limits=Limits.of(wanted.memory_mb, wanted.cpus, wanted.disk_mb, wanted.caps),
        )
        try:
            told = await cell.exec(["/bin/sh", "-c", "pwd"], timeout=_START_TIMEOUT)
        except BaseException:
            await to_its_end(_remove(cell))
            raise
        _live[cell.id] = cell
        return {"default": cls(cell, text(told.stdout).removesuffix("\n") or "/")}

    @classmethod
    async def sample_cleanup(
        cls,
        task_name: str,
        config: Any,
        environments: dict[str, SandboxEnvironment],
        interrupted: bool,
    ) -> None:
        # What was interrupted ends with the task.
        if not interrupted:
            for environment in environments.values():
                await _remove(environment.as_type(ExocellSandboxEnvironment)._cell)

    @classmethod
    async def task_cleanup(cls, task_name: str, config: Any, cleanup: bool) -> None:
        left = list(_live.values())
        for cell in left:
            if cleanup:
                await _remove(cell)
            else:
                _live.pop(cell.id, None)
                print(f"left running: exocell exec -it {cell.id[:12]} sh")

    @classmethod
    async def cli_cleanup(cls, id: str | None) -> None:
        """``inspect sandbox cleanup exocell [ID]``: ends what a killed run has left."""
        told = await command("ps", "--quiet", "--no-trunc", "--filter", f"label={_LABEL}")
        for cell_id in told.split():
            if id is None or cell_id.startswith(id):
                await Cell(cell_id).remove()

    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> ExecResult[str]:
        """Runs a program. One that is late is killed, and is not tried again.

        The TimeoutError has what was written, as ``truncated_output``.
        """
        try:
            ended = await self._cell.exec(
                cmd,
                input=input.encode() if isinstance(input, str) else input,
                envs=env,
                cwd=self._path(cwd or "."),
                user=user,
                timeout=timeout,
                output_max=SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE,
            )
        except NotFoundException as error:
            raise SandboxUnavailableError(str(error)) from error
        except SandboxException as error:
            if user is not None and f"no user {user} " in str(error):
                raise SandboxUserUnsupportedError(str(error)) from error
            if "--workdir" in str(error):
                return ExecResult(False, 126, "", f"{error}\n")
            raise SandboxUnavailableError(str(error)) from error
        out, err = text(ended.stdout), text(ended.stderr)
        if ended.is_late:
            late = TimeoutError(f"Command timed out after {timeout} seconds")
            setattr(late, "truncated_output", out + err)
            raise late
        if ended.is_cut:
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE_STR, out)
        if ended.exit_code == 126 and not out and "permission denied" in err.lower():
            raise PermissionError(errno.EACCES, err.strip(), cmd[0])
        return ExecResult(ended.exit_code == 0, ended.exit_code, out, err)

    async def write_file(self, file: str, contents: str | bytes) -> None:
        data = contents.encode() if isinstance(contents, str) else contents
        with _as_os_errors(file):
            await self._cell.write(self._path(file), data)

    @overload
    async def read_file(self, file: str, text: Literal[True] = True) -> str: ...

    @overload
    async def read_file(self, file: str, text: Literal[False]) -> bytes: ...

    async def read_file(self, file: str, text: bool = True) -> str | bytes:
        with _as_os_errors(file):
            limit = SandboxEnvironmentLimits.MAX_READ_FILE_SIZE
            content = await self._cell.read(self._path(file), limit)
        return content.decode("utf-8") if text else content

    async def connection(self, *, user: str | None = None) -> SandboxConnection:
        if not await self._cell.is_running():
            raise ConnectionError(f"cell {self._cell.id[:12]} has ended")
        words = [program(), "exec", "-it", *(["-u", user] if user else [])]
        line = shlex.join([*words, self._cell.id[:12], "/bin/sh", "-l"])
        return SandboxConnection(type="exocell", command=line, container=self._cell.id)

    def _path(self, path: str) -> str:
        return posixpath.normpath(posixpath.join(self._workdir, path))


sandboxenv("exocell")(ExocellSandboxEnvironment)
#: Cells of this process' samples.
_live: dict[str, Cell] = {}


async def _remove(cell: Cell) -> None:
    _live.pop(cell.id, None)
    await cell.remove()


def _config(config: Any) -> ExocellConfig:
    if config is None:
        return ExocellConfig()
    if isinstance(config, ExocellConfig):
        return config
    path = Path(str(config))
    if path.suffix == ".toml":
        try:
            told = ExocellConfig(**tomllib.loads(path.read_text()))
        except (OSError, ValueError, ValidationError) as error:
            raise ValueError(f"{path}: {error}") from error
        own = path.parent / told.dockerfile if told.dockerfile else None
        return told.model_copy(update={"dockerfile": own and str(own)})
    if path.suffix in (".yaml", ".yml"):
        raise ValueError(
            f"{path}: a sample is one cell here, and takes no compose file; run exocell serve "
            '--docker SOCKET, and Inspect with sandbox="docker" and DOCKER_HOST=unix://SOCKET'
        )
    return ExocellConfig(dockerfile=str(path), build_allow_net=EVERYWHERE)


async def _image(config: ExocellConfig) -> str:
    if config.dockerfile is None:
        return config.image
    path = Path(config.dockerfile).resolve()
    tag = f"inspect/{hashlib.sha256(str(path).encode()).hexdigest()[:16]}:latest"
    await build(path.parent, tag, dockerfile=path, allow_net=config.build_allow_net)
    return tag


@contextlib.contextmanager
def _as_os_errors(file: str) -> Generator[None]:
    """Tells of a file in the words that Inspect expects."""
    try:
        yield
    except IsDirectoryException as error:
        raise IsADirectoryError(errno.EISDIR, "Is a directory", file) from error
    except PermissionException as error:
        raise PermissionError(errno.EACCES, "Permission denied", file) from error
    except TooLargeException as error:
        limit = SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR
        raise OutputLimitExceededError(limit, None) from error
    except TimeoutException as error:
        raise TimeoutError(str(error)) from error
    except NotFoundException as error:
        if "no such cell" in str(error):
            raise SandboxUnavailableError(str(error)) from error
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", file) from error
    except SandboxException as error:
        if "Not a directory" in str(error):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", file) from error
        raise OSError(errno.EIO, str(error), file) from error
