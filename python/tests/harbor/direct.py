"""The environment itself, without a job: what it refuses, and what a command leaves."""

import asyncio
import logging
import pathlib
import stat
import tempfile

from exocell import SandboxException
from exocell.harbor import CommandTimeoutError, ExocellEnvironment
from harbor.models.task.config import EnvironmentConfig, NetworkMode, NetworkPolicy
from harbor.models.trial.paths import TrialPaths

TABLE = """
version = 1
[memory]
limit = "512M"
[cpu]
count = 1
[disk]
size = "1G"
[processes]
max = 256
[clock]
[random]
[stdio]
[network]
connect = ["example.org:443"]
"""


def environment(folder, image, policy=None, phases=None, **options):
    (folder / "task").mkdir(exist_ok=True)
    return ExocellEnvironment(
        environment_dir=folder / "task",
        environment_name="direct",
        session_id="direct__1",
        trial_paths=TrialPaths(trial_dir=folder / "trial"),
        task_env_config=EnvironmentConfig(docker_image=image),
        logger=logging.getLogger("direct"),
        network_policy=policy,
        phase_network_policies=phases,
        **options,
    )


def refuses(folder, image):
    def listed(host):
        return NetworkPolicy(network_mode=NetworkMode.ALLOWLIST, allowed_hosts=["pypi.org", host])

    hosts = ["host.docker.internal", "HOST.docker.internal.", "127.0.0.1", "169.254.169.254", "::1"]
    for word, wrong in [
        *(("--ek host=true", dict(policy=listed(host))) for host in hosts),
        *(("--ek host=true", dict(phases=[listed(host)])) for host in hosts),
        ("type 'volume'", dict(mounts=[{"type": "volume", "source": "v", "target": "/v"}])),
        ("Unknown option 'grant'", dict(grant=["a.org"])),
    ]:
        try:
            environment(folder, image, **wrong)
            raise AssertionError(f"{word} was taken")
        except ValueError as error:
            assert word in str(error), error
    compose = folder / "task/docker-compose.yaml"
    compose.write_text("services: {}\n")
    try:
        environment(folder, image)
        raise AssertionError("a compose file was taken")
    except ValueError as error:
        assert "exocell serve --docker" in str(error), error
    compose.unlink()


async def works(folder, image):
    (folder / "shared").mkdir()
    mounts = [{"type": "bind", "source": str(folder / "shared"), "target": "/shared"}]
    entries = ["pypi.org", "*.example.org", "192.0.2.1", "198.51.100.0/24", "2001:db8::1", "2001:db8::/32"]
    listed = NetworkPolicy(network_mode=NetworkMode.ALLOWLIST, allowed_hosts=entries)
    offline = NetworkPolicy(network_mode=NetworkMode.NO_NETWORK)
    box = environment(folder, image, listed, [listed, offline], mounts=mounts)
    await box.start(force_build=False)
    try:
        heard = []

        async def hear(text, stream):
            heard.append((stream, text))

        with box.scoped_output_callback(hear), box.scoped_exec_env({"LINES": "a\nb"}):
            told = await box.exec('echo "$LINES"; echo err >&2; [[ -n $LINES ]] && exit 3')
        assert (told.stdout, told.stderr, told.return_code) == ("a\nb\n", "err\n", 3), told
        assert ("stderr", "err\n") in heard, heard
        try:
            await box.exec("echo so far; sleep 1001 & sleep 1002", timeout_sec=2)
            raise AssertionError("no timeout")
        except CommandTimeoutError as error:
            assert error.stdout == "so far\n", error.stdout
        assert "sleep 100" not in (await box.exec("ps -A -o args")).stdout
        tree = folder / "tree"
        (tree / "empty").mkdir(parents=True)
        (tree / "run").write_text("#!/bin/sh\necho ran\n")
        (tree / "run").chmod(0o755)
        (tree / "link").symlink_to("run")
        await box.upload_dir(tree, "/up/here")
        assert (await box.exec("/up/here/link; mkfifo /up/here/pipe")).stdout == "ran\n"
        back = folder / "back"
        (back / "kept").mkdir(parents=True)
        await box.download_dir("/up/here", back)
        names = sorted(path.name for path in back.iterdir())
        assert names == ["empty", "kept", "link", "run"], names
        assert (back / "run").stat().st_mode & stat.S_IXUSR and (back / "link").is_symlink()
        (folder / "verifier").mkdir()
        (folder / "verifier/reward").write_text("0")
        (folder / "config").write_text("own")
        await box.exec("mkdir -p /logs/agent; cd /logs/agent; ln -s .. x; echo 1 > file; ln -s file y")
        for line in ("true", "rm x; ln -s ../verifier x"):
            await box.exec(f"cd /logs/agent; {line}")
            try:
                await box.download_dir("/logs/agent", folder / "agent")
                raise AssertionError("a link that leads out was taken")
            except SandboxException as error:
                assert "leads out" in str(error), error
        (folder / "agent").mkdir()
        (folder / "agent/x").symlink_to("../verifier")
        (folder / "agent/z").symlink_to("..")
        line = "rm x; mkdir x z; echo 1 > x/reward; echo evil > z/config"
        await box.exec(f"cd /logs/agent; {line}")
        await box.download_dir("/logs/agent", folder / "agent")
        assert (folder / "verifier/reward").read_text() == "0"
        assert (folder / "config").read_text() == "own"
        assert (folder / "agent/x/reward").read_text() == "1\n"
        # A link that is asked for is followed in the cell.
        await box.download_file("/logs/agent/y", folder / "agent/y")
        assert not (folder / "agent/y").is_symlink()
        assert (folder / "agent/y").read_text() == "1\n"
        await box.exec("echo from the cell > /shared/file")
        assert (folder / "shared/file").read_text() == "from the cell\n"
        assert await box.is_dir("/up/here") and not await box.is_file("/up/none")
        # Two names look up; then none does.
        for policy in (offline, listed, offline):
            await box.set_network_policy(policy)
    finally:
        await box.stop(delete=True)


async def keeps_to_a_table(folder, image):
    table = folder / "table.toml"
    table.write_text(TABLE)
    modes = {NetworkMode.NO_NETWORK: 1, NetworkMode.ALLOWLIST: 1, NetworkMode.PUBLIC: 2}
    for mode, count in modes.items():
        box = environment(folder, image, NetworkPolicy(network_mode=mode), caps=str(table))
        assert not box.capabilities.dynamic_network_policy
        await box.start(force_build=False)
        try:
            told = (await box.exec("ls -d /sys/class/net/lo /sys/class/net/eth*")).stdout
            assert len(told.splitlines()) == count, (mode, told)
        finally:
            await box.stop(delete=True)
    wide = NetworkPolicy(network_mode=NetworkMode.ALLOWLIST, allowed_hosts=["example.com"])
    try:
        await environment(folder, image, wide, caps=str(table)).start(force_build=False)
        raise AssertionError("more than the table grants was taken")
    except Exception as error:
        assert "flags can only narrow it" in str(error), error


async def leaves_nothing(folder, image):
    for wrong, word in [("--volume=/:/host", "not an image name"), ("no/such:image", "no")]:
        try:
            await environment(folder, wrong).start(force_build=False)
            raise AssertionError(f"{wrong} was started")
        except Exception as error:
            assert word in str(error), error
    for seconds in (0.02, 0.2, 0.4):
        box = environment(folder, image)
        try:
            await asyncio.wait_for(box.start(force_build=False), seconds)
            await box.stop(delete=True)
        except TimeoutError:
            pass


async def main(image):
    with tempfile.TemporaryDirectory() as place:
        folder = pathlib.Path(place)
        refuses(folder, image)
        await works(folder, image)
        await keeps_to_a_table(folder, image)
        await leaves_nothing(folder, image)


def check(image):
    asyncio.run(main(image))
