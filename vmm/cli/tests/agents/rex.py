"""SWE-ReX, unmodified: its server in a container, its client here."""

import asyncio
import pathlib
import sys

import yaml
from swerex.deployment.config import DockerDeploymentConfig
from swerex.exceptions import SwerexException
from swerex.runtime.abstract import (
    BashAction,
    Command,
    CreateBashSessionRequest,
    ReadFileRequest,
    WriteFileRequest,
)

IMAGE, CONFIGURATION, PACKAGES, TOOLS = sys.argv[1:]
ARGUMENTS = ["-v", f"{PACKAGES}:/opt/rex:ro", "-v", f"{TOOLS}:/opt/tools:ro", "-e", "PYTHONPATH=/opt/rex"]
PATH = "PATH=/opt/tools:/usr/local/bin:/usr/bin:/bin"


async def use(runtime):
    await runtime.create_session(CreateBashSessionRequest(startup_timeout=120))
    await runtime.run_in_session(BashAction(command="cd /usr; export KEPT='a session'", timeout=120))
    said = await runtime.run_in_session(
        BashAction(command='test "$PWD" = /usr && echo "$KEPT keeps its state"', timeout=120)
    )
    print(said.output.strip())
    ended = await runtime.execute(Command(command=["sh", "-c", "exit 3"], timeout=120))
    print("exit", ended.exit_code)
    await runtime.write_file(WriteFileRequest(path="/job/file", content="written and read"))
    print((await runtime.read_file(ReadFileRequest(path="/job/file"))).content)
    try:
        await runtime.read_file(ReadFileRequest(path="/job/other"))
    except (FileNotFoundError, SwerexException):
        print("no such file")


async def main():
    told = yaml.safe_load(pathlib.Path(CONFIGURATION).read_text())["env"]["deployment"]
    arguments = [*told["docker_args"], *ARGUMENTS, "-e", PATH]
    told |= {"image": IMAGE, "docker_args": arguments}
    deployment = DockerDeploymentConfig(**told).get_deployment()
    await deployment.start()
    try:
        await use(deployment.runtime)
    finally:
        await deployment.stop()


asyncio.run(main())
