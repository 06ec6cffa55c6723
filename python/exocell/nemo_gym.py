"""NeMo Gym's sandboxes in cells: ``{"exocell": {}}`` as the provider's configuration.

Needs nemo_gym 0.4 or newer (``pip install exocell[nemo]``), which finds this
provider by its entry point, and the ``exocell`` command; no server.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemo_gym.sandbox.providers.base import (
    SandboxCreateError,
    SandboxExecResult,
    SandboxHandle,
    SandboxResources,
    SandboxSpec,
    SandboxStatus,
)

from ._cell import Cell, Limits
from ._errors import InvalidArgumentException, NotFoundException, SandboxException
from ._program import text, to_its_end

#: What an execution has as its code where no program ended by itself.
_NO_CODE = 125
_OPTIONS = {"allow_net", "caps"}


class ExocellProvider:
    """Makes a cell of each specification.

    ``allow_net`` are rules of ``--allow-net`` for each sandbox, and ``caps`` is
    a capability table; ``provider_options`` of a specification has them for
    one. Without them a sandbox has no network.
    """

    name = "exocell"

    def __init__(
        self,
        *,
        image: str = "exocell/base:latest",
        allow_net: Sequence[str] = (),
        caps: str | None = None,
        timeout_s: float | None = 180,
    ) -> None:
        self._image, self._allow_net, self._caps = image, tuple(allow_net), caps
        self._timeout = timeout_s

    async def create(self, spec: SandboxSpec) -> SandboxHandle:
        """Starts a cell with the files of ``spec``. Raises a SandboxCreateError."""
        unknown = set(spec.provider_options) - _OPTIONS
        if unknown:
            raise SandboxCreateError(
                f"provider_options: {', '.join(sorted(unknown))} is nothing that exocell takes; "
                f"it takes {', '.join(sorted(_OPTIONS))}"
            )
        resources = spec.resources
        assert isinstance(resources, SandboxResources)
        if resources.gpu or resources.gpu_type:
            raise SandboxCreateError("a cell has no GPU; leave resources.gpu out")
        entrypoint = spec.entrypoint or ["sleep", "infinity"]
        try:
            cell = await Cell.start(
                spec.image or self._image,
                kind="nemo",
                words=entrypoint,
                labels={f"nemo.{key}": value for key, value in spec.metadata.items()},
                envs=spec.env,
                allow_net=spec.provider_options.get("allow_net", self._allow_net),
                limits=Limits.of(
                    memory_mb=resources.memory_mib,
                    cpus=resources.cpu,
                    disk_mb=resources.disk_gib and resources.disk_gib << 10,
                    caps=spec.provider_options.get("caps", self._caps),
                ),
                lifetime=spec.ttl_s,
            )
        except SandboxException as error:
            raise SandboxCreateError(str(error)) from error
        handle = SandboxHandle(cell.id, self.name, _Sandbox(cell, spec.workdir))
        try:
            if spec.workdir:
                made = await cell.exec(["mkdir", "-p", "--", spec.workdir], user="0")
                if made.exit_code:
                    raise SandboxException(text(made.stderr).strip())
            for path, content in spec.files.items():
                await cell.write(path, content.encode())
        except BaseException as error:
            await to_its_end(self.close(handle))
            if isinstance(error, SandboxException):
                raise SandboxCreateError(str(error)) from error
            raise
        return handle

    async def exec(
        self,
        handle: SandboxHandle,
        command: str,
        *,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_s: int | float | None = None,
        user: str | int | None = None,
    ) -> SandboxExecResult:
        """Runs a line of the shell. What is late is killed; its output is in the result."""
        sandbox = _sandbox(handle)
        try:
            ended = await sandbox.cell.exec(
                ["/bin/sh", "-c", command],
                envs=env,
                cwd=cwd or sandbox.workdir,
                user=None if user is None else str(user),
                timeout=self._timeout if timeout_s is None else timeout_s,
            )
        except SandboxException as error:
            return SandboxExecResult(None, str(error), _NO_CODE, error_type="sandbox")
        kind = "timeout" if ended.is_late else "output_limit" if ended.is_cut else None
        code = _NO_CODE if kind else ended.exit_code
        return SandboxExecResult(text(ended.stdout), text(ended.stderr), code, error_type=kind)

    async def upload_file(self, handle: SandboxHandle, source_path: Path, target_path: str) -> None:
        if not Path(source_path).is_file():
            raise InvalidArgumentException(f"{source_path} is no file")
        await _sandbox(handle).cell.upload(source_path, target_path)

    async def download_file(
        self, handle: SandboxHandle, source_path: str, target_path: Path
    ) -> None:
        target = Path(target_path)
        target.parent.mkdir(parents=True, exist_ok=True)
        content = await _sandbox(handle).cell.read(source_path)
        # A link that lies there is replaced, and not followed.
        with tempfile.TemporaryDirectory(prefix=".exocell-", dir=target.parent) as place:
            came = Path(place) / "came"
            came.write_bytes(content)
            came.replace(target)

    async def status(self, handle: SandboxHandle) -> SandboxStatus:
        try:
            is_running = await _sandbox(handle).cell.is_running()
        except SandboxException:
            return SandboxStatus.UNKNOWN
        return SandboxStatus.RUNNING if is_running else SandboxStatus.STOPPED

    async def close(self, handle: SandboxHandle) -> None:
        await _sandbox(handle).cell.remove()

    async def aclose(self) -> None:
        """Nothing is held between calls."""


class _Sandbox:
    def __init__(self, cell: Cell, workdir: str | None) -> None:
        self.cell, self.workdir = cell, workdir


def _sandbox(handle: SandboxHandle) -> _Sandbox:
    raw: Any = handle.raw
    if not isinstance(raw, _Sandbox):
        raise NotFoundException(f"{handle.sandbox_id} is no sandbox of exocell")
    return raw
