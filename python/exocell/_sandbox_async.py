"""Sandboxes for asyncio."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from ._commands import AsyncCommands
from ._engine import Engine
from ._errors import NotFoundException, SandboxException
from ._files import AsyncFiles
from ._streams import Loop, Streams
from ._types import SandboxInfo, SandboxState

#: What a sandbox is made of where nobody says.
TEMPLATE = "exocell/base:latest"
#: Seconds after which a sandbox ends by itself where nobody says.
TIMEOUT = 300
_FOR_EVER = 2**31 - 1
_LABEL = "exocell.sandbox"
_METADATA = "exocell.sandbox.metadata."


class AsyncSandbox:
    """A cell that waits for commands. Make one with :meth:`create`.

    As a context manager it is killed at the end.
    """

    def __init__(self, engine: Engine, sandbox_id: str) -> None:
        self._engine = engine
        self._id = sandbox_id
        self.commands = AsyncCommands(engine, sandbox_id)
        self.files = AsyncFiles(engine, sandbox_id, self.commands)

    @property
    def sandbox_id(self) -> str:
        return self._id

    @classmethod
    async def create(
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
        _streams: Streams | None = None,
    ) -> AsyncSandbox:
        """Starts a sandbox from the image ``template``.

        It ends by itself after ``timeout`` seconds; ``None`` is never.
        ``ports`` are what :meth:`get_host` leads to. With ``allow_network`` it
        reaches what the server grants (``exocell serve --allow-net``), else
        nothing. ``host`` is the server's socket, by default what EXOCELL_HOST
        or DOCKER_HOST names. Raises a NotFoundException when there is no such
        image.
        """
        engine = Engine(_streams or Loop(), host)
        labels = {_LABEL: "1"} | {_METADATA + k: v for k, v in (metadata or {}).items()}
        published = [f"{int(port)}/tcp" for port in ports]
        config: dict[str, Any] = {
            "Image": template,
            "Entrypoint": ["sleep"],
            "Cmd": [str(_FOR_EVER if timeout is None else int(timeout))],
            "Env": [f"{key}={value}" for key, value in (envs or {}).items()],
            "Labels": labels,
            "ExposedPorts": {port: {} for port in published},
            "HostConfig": {
                "AutoRemove": True,
                "NetworkMode": "default" if allow_network else "none",
                "PortBindings": {port: [] for port in published},
                "Memory": (memory_mb or 0) << 20,
                "NanoCpus": (cpus or 0) * 1_000_000_000,
            },
        }
        sandbox = cls(engine, await engine.create(config, name))
        try:
            await engine.start(sandbox._id)
        except BaseException:
            await sandbox.kill()
            raise
        return sandbox

    @classmethod
    async def connect(
        cls, sandbox_id: str, *, host: str | None = None, _streams: Streams | None = None
    ) -> AsyncSandbox:
        """A sandbox that there is, by its id or name; a paused one goes on."""
        engine = Engine(_streams or Loop(), host)
        told = await engine.inspect(sandbox_id)
        sandbox = cls(engine, str(told["Id"]))
        match told["State"]["Status"]:
            case "paused":
                await sandbox.resume()
            case "running":
                pass
            case state:
                raise NotFoundException(f"sandbox {sandbox_id} is not running but {state}")
        return sandbox

    @classmethod
    async def list(
        cls,
        metadata: Mapping[str, str] | None = None,
        *,
        host: str | None = None,
        _streams: Streams | None = None,
    ) -> list[SandboxInfo]:
        """The sandboxes that there are, the youngest first."""
        wanted = [f"{_METADATA}{key}={value}" for key, value in (metadata or {}).items()]
        engine = Engine(_streams or Loop(), host)
        return [_info(row) for row in await engine.containers([_LABEL, *wanted])]

    async def get_info(self) -> SandboxInfo:
        """Raises a NotFoundException when it has ended."""
        for row in await self._engine.containers([_LABEL]):
            if row["Id"] == self._id:
                return _info(row)
        raise NotFoundException(f"sandbox {self._id} has ended")

    async def is_running(self) -> bool:
        """False when it is paused, too."""
        try:
            told = await self._engine.inspect(self._id)
        except NotFoundException:
            return False
        return bool(told["State"]["Status"] == "running")

    async def get_host(self, port: int) -> str:
        """``ADDRESS:PORT`` of this machine that leads to ``port`` of the sandbox.

        Raises a NotFoundException for a port that ``create`` was not told.
        """
        told = (await self._engine.inspect(self._id))["NetworkSettings"]["Ports"]
        bindings: list[dict[str, str]] = told.get(f"{port}/tcp") or []
        for binding in bindings:
            return f"{binding['HostIp']}:{binding['HostPort']}"
        raise NotFoundException(f"port {port} is not published; name it in create(ports=...)")

    async def pause(self) -> None:
        """Stops all of it where it is; its memory stays."""
        await self._engine.pause(self._id)

    async def resume(self) -> None:
        """Lets it go on."""
        await self._engine.unpause(self._id)

    async def kill(self) -> bool:
        """Ends it, and all in it. False when it had ended."""
        try:
            await self._engine.remove(self._id)
        except NotFoundException:
            return False
        return True

    async def __aenter__(self) -> AsyncSandbox:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.kill()


def _info(row: Mapping[str, Any]) -> SandboxInfo:
    labels: Mapping[str, str] = row.get("Labels") or {}
    metadata = {k.removeprefix(_METADATA): v for k, v in labels.items() if k.startswith(_METADATA)}
    try:
        return SandboxInfo(
            sandbox_id=row["Id"],
            name=row["Names"][0].removeprefix("/"),
            template=row["Image"],
            state=SandboxState(row["State"]),
            metadata=metadata,
            started_at=int(row["Created"]),
        )
    except (KeyError, IndexError, ValueError) as error:
        raise SandboxException(f"the server's word on a sandbox cannot be read: {error}") from error
