"""Harbor's tasks in cells: ``harbor run -e exocell.harbor:ExocellEnvironment``.

Needs Harbor 0.26 or newer (``pip install exocell[harbor]``) and the ``exocell``
command; no server, and no Docker. A trial is a cell of the task's image, which
``exocell build`` makes of its Dockerfile, and a task's network policy becomes
the cell's rules.
"""

from __future__ import annotations

import asyncio
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import (
    EnvironmentCapabilities,
    EnvironmentResourceCapabilities,
)
from harbor.environments.definition import (
    COMPOSE_FILE_NAME,
    require_agent_environment_definition,
    should_use_prebuilt_docker_image,
)
from harbor.environments.options import EnvironmentOptions
from harbor.models.task.config import NetworkMode, NetworkPolicy
from harbor.models.trial.config import ResourceMode
from pydantic import Field

from ._cell import EVERYWHERE, Cell, Limits, build, table
from ._errors import SandboxException
from ._hosts import opens_host
from ._program import OUTPUT_BYTES_MAX, decoder, program, text, to_its_end
from ._trees import put

#: Gives a cell a network that leads nowhere, for rules that come later (RFC 2606).
_NOWHERE = "nowhere.invalid:1"
#: One build at a time of each image, in this process.
_builds: dict[str, asyncio.Lock] = {}


class CommandTimeoutError(RuntimeError):
    """A command took longer than it was allowed, and was killed."""

    def __init__(self, seconds: float, stdout: str, stderr: str) -> None:
        super().__init__(f"Command timed out after {seconds:g} seconds")
        #: What it had written.
        self.stdout = stdout
        self.stderr = stderr


class ExocellOptions(EnvironmentOptions):
    """What ``--ek NAME=VALUE`` may say."""

    public: list[str] = Field(
        default=list(EVERYWHERE),
        description="What a task with a public network may reach, as rules of --allow-net.",
    )
    build: list[str] | None = Field(
        default=None,
        description="What commands of a Dockerfile may reach. Default: the same as public, and "
        "nothing where there is a capability table.",
    )
    host: bool = Field(
        default=False,
        description="Whether an allow list may name this host (host.docker.internal is its "
        "loopback, and its addresses), its link and its cloud's metadata.",
    )
    caps: str | None = Field(
        default=None,
        description="A capability table, which a task can only narrow. A public network is "
        "then what the table grants.",
    )


class ExocellEnvironment(BaseEnvironment):
    """One trial's cell."""

    options_model: ClassVar[type[EnvironmentOptions] | None] = ExocellOptions

    _cell: Cell | None = None
    _shell: str = "/bin/sh"

    @staticmethod
    def type() -> str:
        return "exocell"

    @classmethod
    def preflight(cls, kwargs: dict[str, Any] | None = None) -> None:
        """Refuses to start where there is no command."""
        super().preflight(kwargs)
        try:
            program()
        except SandboxException as error:
            raise SystemExit(str(error)) from None

    @classmethod
    def resource_capabilities(cls) -> EnvironmentResourceCapabilities:
        return EnvironmentResourceCapabilities(
            cpu_limit=True, memory_limit=True, fractional_cpus=True
        )

    @property
    def _exocell(self) -> ExocellOptions:
        assert isinstance(self.options, ExocellOptions)
        return self.options

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(
            disable_internet=True,
            network_allowlist=True,
            network_allowlist_hostnames=True,
            network_allowlist_wildcard_hostnames=True,
            network_allowlist_ipv4_addresses=True,
            network_allowlist_ipv6_addresses=True,
            network_allowlist_ipv4_cidrs=True,
            network_allowlist_ipv6_cidrs=True,
            # A cell's later rules are not held against its table.
            dynamic_network_policy=self._exocell.caps is None,
            mounted=True,
        )

    def _validate_definition(self) -> None:
        image = self.task_env_config.docker_image
        require_agent_environment_definition(self.environment_dir, docker_image=image)
        if (self.environment_dir / COMPOSE_FILE_NAME).exists():
            raise ValueError(
                f"{self.environment_dir / COMPOSE_FILE_NAME}: this environment is one cell, and "
                "takes no compose file; run exocell serve --docker SOCKET, and harbor with "
                "-e docker and DOCKER_HOST=unix://SOCKET"
            )
        for mount in self._host_mounts:
            if mount["type"] != "bind":
                raise ValueError(
                    f"a mount of type {mount['type']!r} at {mount['target']} is not possible; "
                    "only folders and files of this host are (type bind)"
                )

    async def start(self, force_build: bool) -> None:
        """Makes the image if need be, and starts the cell."""
        config = self.task_env_config
        image = await self._image(force_build)
        is_offline = not (self._network_is_public or self._rules(self._network_policy))
        with table(self._exocell.caps, is_offline) as caps:
            self._cell = await Cell.start(
                image,
                kind="harbor",
                labels={"harbor.session": self.session_id},
                envs=self._startup_env(),
                allow_net=self._rules_at_start(),
                volumes=[_volume(mount) for mount in self._host_mounts],
                limits=Limits.of(
                    memory_mb=self._resource_limit_value("memory", auto_mode=ResourceMode.LIMIT),
                    cpus=self._resource_limit_value("cpu", auto_mode=ResourceMode.LIMIT),
                    disk_mb=self._effective_storage_mb,
                    caps=caps,
                ),
            )
        try:
            if config.workdir:
                await self._cell.exec(["mkdir", "-p", config.workdir], user="0")
            if not (await self._cell.exec(["/bin/sh", "-c", "test -x /bin/bash"])).exit_code:
                self._shell = "/bin/bash"
            await self.ensure_dirs(self._mount_targets(writable_only=True))
            await self._upload_environment_dir_after_start()
        except BaseException:
            await to_its_end(self.stop(delete=True))
            raise

    async def _image(self, force_build: bool) -> str:
        prebuilt = self.task_env_config.docker_image
        if prebuilt and should_use_prebuilt_docker_image(
            self.environment_dir, docker_image=prebuilt, force_build=force_build
        ):
            return prebuilt
        tag = f"harbor/{re.sub(r'[^a-z0-9_.-]+', '-', self.environment_id.lower())}:latest"
        rules = self._exocell.build
        if rules is None:
            # A build takes no table: what it would allow is not known.
            rules = self._exocell.public if self._exocell.caps is None else []
        async with _builds.setdefault(tag, asyncio.Lock()):
            await build(self.environment_dir.resolve(), tag, allow_net=rules)
        return tag

    async def stop(self, delete: bool) -> None:
        """Ends the cell, or leaves it; ``exocell ps`` lists those that were left."""
        cell, self._cell = self._cell, None
        if cell is None:
            return
        if not delete:
            self.logger.info(f"left running: exocell exec -it {cell.id[:12]} sh")
            return
        await cell.remove()

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Runs a line of bash, or of sh where the image has no bash.

        Raises a CommandTimeoutError, which carries what was written.
        """
        callback = self._output_callback()
        decoders = {"stdout": decoder(), "stderr": decoder()}

        async def tell(data: bytes, stream: str) -> None:
            words = decoders[stream].decode(data)
            if callback is not None and words:
                await callback(words, "stderr" if stream == "stderr" else "stdout")

        who = self._resolve_user(user)
        ended = await self._running.exec(
            [self._shell, "-c", command],
            envs=self._merge_env(env),
            cwd=cwd or self.task_env_config.workdir,
            user=None if who is None else str(who),
            timeout=timeout_sec,
            on_output=None if callback is None else tell,
        )
        out, err = text(ended.stdout), text(ended.stderr)
        if ended.is_late:
            raise CommandTimeoutError(timeout_sec or 0, out, err)
        if ended.is_cut:
            err += f"\nexocell: killed, for it wrote more than {OUTPUT_BYTES_MAX} bytes\n"
        return ExecResult(stdout=out, stderr=err, return_code=ended.exit_code)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        await self._running.upload(source_path, target_path)

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        await self._running.upload(source_dir, target_dir)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        await self._download(source_path, Path(target_path))

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        await self._download(source_dir, Path(target_dir))

    async def _download(self, path: str, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".exocell-", dir=target.parent) as place:
            came = Path(place) / "came"
            await self._running.download(path, came)
            await asyncio.to_thread(put, came, target)

    async def _apply_network_policy(self, network_policy: NetworkPolicy) -> None:
        before = self._rules(self._network_policy)
        after = self._rules(network_policy)
        # What is denied takes narrower rules with it, which are then granted anew.
        deny = [rule for rule in before if rule not in after]
        await self._running.update(deny=deny, allow=after)

    @property
    def _running(self) -> Cell:
        if self._cell is None:
            raise RuntimeError("the environment is not running; start it first")
        return self._cell

    def validate_network_policy_support(self, network_policy: NetworkPolicy | None = None) -> None:
        """Also refuses this host and what only it may ask, which no task is to open by itself."""
        super().validate_network_policy_support(network_policy)
        policy = network_policy or self._network_policy
        for entry in policy.allowed_hosts:
            why = None if self._exocell.host else opens_host(entry)
            if why is not None:
                raise ValueError(
                    f"the task's allow list names {entry}, {why}; --ek host=true lets it"
                )

    def _rules(self, policy: NetworkPolicy) -> Sequence[str]:
        match policy.network_mode:
            case NetworkMode.PUBLIC:
                options = self._exocell
                is_narrowed = options.caps is None or "public" in options.model_fields_set
                # With a table and no more words, what the table grants.
                return options.public if is_narrowed else []
            case NetworkMode.ALLOWLIST:
                return [_rule(entry) for entry in policy.allowed_hosts]
            case _:
                return []

    def _rules_at_start(self) -> list[str]:
        rules = list(self._rules(self._network_policy))
        later = [policy for policy in self._phase_network_policies if self._rules(policy)]
        if not rules and later and self._exocell.caps is None:
            rules.append(_NOWHERE)
        return rules


def _rule(entry: str) -> str:
    """A rule of an entry of an allow list, which is a name, an address or a range."""
    return f"[{entry}]:1-65535" if ":" in entry else entry


def _volume(mount: Any) -> str:
    words = f"{Path(mount['source']).resolve()}:{mount['target']}"
    return f"{words}:ro" if mount.get("read_only") else words
