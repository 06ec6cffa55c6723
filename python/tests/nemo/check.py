"""NeMo Gym's sandbox API, unmodified, with the provider of this package: ``check.py IMAGE``."""

import asyncio
import pathlib
import sys
import tempfile

from nemo_gym.sandbox.api import AsyncSandbox
from nemo_gym.sandbox.providers import SandboxCreateError, SandboxSpec, SandboxStatus
from nemo_gym.sandbox.providers.registry import list_providers

IMAGE = sys.argv[1]


def spec(**more):
    return SandboxSpec(
        image=IMAGE,
        ttl_s=600,
        workdir="/job",
        env={"WHO": "all of it"},
        files={"/job/deep/given": "a file\n"},
        metadata={"run": "7"},
        resources={"cpu": 1, "memory_mib": 512, "disk_gib": 1},
        **more,
    )


async def main():
    assert "exocell" in list_providers(), list_providers()
    async with AsyncSandbox({"exocell": {}}) as box:
        await box.start(spec())
        assert await box.status() == SandboxStatus.RUNNING
        told = await box.exec("pwd; cat deep/given; echo $WHO $MORE; id -u >&2; exit 3",
                              env={"MORE": "and more"}, user=1)
        assert (told.stdout, told.stderr) == ("/job\na file\nall of it and more\n", "1\n"), told
        assert (told.return_code, told.error_type) == (3, None), told
        late = await box.exec("echo so far; sleep 1001", timeout_s=1)
        assert (late.stdout, late.error_type) == ("so far\n", "timeout"), late
        with tempfile.TemporaryDirectory() as place:
            given, back = pathlib.Path(place, "given"), pathlib.Path(place, "a/back")
            given.write_bytes(bytes(range(256)) * 4096)
            await box.upload(given, "/srv/new/given")
            await box.download("/srv/new/given", back)
            assert back.read_bytes() == given.read_bytes()
        lines = (await box.exec("ps -A -o args; ls /sys/class/net")).stdout.splitlines()
        assert "sleep 1001" not in lines and lines[-1] == "lo", lines
        await box.stop()
    for bad, word in [({"gpu": 1}, "GPU"), ({}, "rules")]:
        options = {} if bad else {"rules": []}
        try:
            await AsyncSandbox({"exocell": {}}).start(
                SandboxSpec(image=IMAGE, resources=bad, provider_options=options)
            )
            raise AssertionError(f"{word} was taken")
        except SandboxCreateError as error:
            assert word in str(error), error
    print("nemo_gym")


asyncio.run(main())
