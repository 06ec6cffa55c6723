"""The calls of the server's API that a sandbox is made of."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from ._errors import InvalidArgumentException, SandboxException
from ._http import Response, request
from ._streams import Streams, deadline_of

#: Seconds that a call may take where nobody says.
REQUEST_TIMEOUT = 60.0


def socket_path(host: str | None) -> str:
    """The socket that ``host`` means: an argument, or what the environment says."""
    host = host or os.environ.get("EXOCELL_HOST") or os.environ.get("DOCKER_HOST")
    if not host:
        raise InvalidArgumentException(
            "no server is named; set EXOCELL_HOST to unix:///PATH, as exocell serve prints it"
        )
    if "://" in host and not host.startswith("unix://"):
        raise InvalidArgumentException(f"{host}: an exocell server listens on a unix socket")
    return host.removeprefix("unix://")


class Engine:
    """One server."""

    def __init__(self, streams: Streams, host: str | None) -> None:
        self.streams = streams
        self.socket = socket_path(host)

    async def _call(self, method: str, path: str, **how: Any) -> Response:
        deadline = deadline_of(how.pop("timeout", REQUEST_TIMEOUT))
        return await request(self.streams, self.socket, deadline, method, path, **how)

    async def _json(self, method: str, path: str, **how: Any) -> Any:
        response = await self._call(method, path, **how)
        try:
            return await response.json()
        finally:
            await response.close()

    async def _done(self, method: str, path: str, **how: Any) -> None:
        await (await self._call(method, path, **how)).close()

    async def create(self, config: Mapping[str, Any], name: str | None) -> str:
        """Makes a container; its id."""
        query = {"name": name} if name else None
        made = await self._json("POST", "/containers/create", json_body=config, query=query)
        return _text(made, "Id")

    async def start(self, key: str) -> None:
        await self._done("POST", f"/containers/{key}/start")

    async def remove(self, key: str) -> None:
        await self._done("DELETE", f"/containers/{key}", query={"force": "1", "v": "1"})

    async def pause(self, key: str) -> None:
        await self._done("POST", f"/containers/{key}/pause")

    async def unpause(self, key: str) -> None:
        await self._done("POST", f"/containers/{key}/unpause")

    async def inspect(self, key: str) -> Any:
        return await self._json("GET", f"/containers/{key}/json")

    async def containers(self, labels: Sequence[str]) -> Any:
        """Those that run, or are paused, with all of ``labels``."""
        filters = json.dumps({"label": list(labels)})
        return await self._json("GET", "/containers/json", query={"filters": filters})

    async def exec_create(self, key: str, config: Mapping[str, Any]) -> str:
        return _text(await self._json("POST", f"/containers/{key}/exec", json_body=config), "Id")

    async def exec_start(self, exec_id: str) -> Response:
        """Starts it; the connection is then its output and input."""
        return await self._call(
            "POST", f"/exec/{exec_id}/start", json_body={"Detach": False}, upgrade=True
        )

    async def exec_inspect(self, exec_id: str) -> Any:
        return await self._json("GET", f"/exec/{exec_id}/json")

    async def path_stat(self, key: str, path: str) -> Any:
        response = await self._call("HEAD", f"/containers/{key}/archive", query={"path": path})
        await response.close()
        told = response.headers.get("x-docker-container-path-stat", "")
        try:
            return json.loads(base64.b64decode(told, validate=True))
        except ValueError as error:
            raise SandboxException(f"the server's word on {path} cannot be read") from error

    async def archive(self, key: str, path: str, timeout: float | None) -> Response:
        """The tar stream of ``path``. The caller closes it."""
        query = {"path": path}
        return await self._call("GET", f"/containers/{key}/archive", query=query, timeout=timeout)

    async def unpack(
        self, key: str, path: str, tar: Iterable[bytes], length: int, timeout: float | None
    ) -> None:
        """Unpacks a tar stream of ``length`` bytes below the directory ``path``."""
        await self._done(
            "PUT",
            f"/containers/{key}/archive",
            query={"path": path},
            body=tar,
            length=length,
            timeout=timeout,
        )


def _text(reply: Any, field: str) -> str:
    told = cast(dict[str, object], reply) if isinstance(reply, dict) else {}
    value = told.get(field)
    if not isinstance(value, str):
        raise SandboxException(f"the server's reply lacks {field}")
    return value
