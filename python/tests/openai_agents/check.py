"""The sandbox clients of OpenAI's Agents SDK, unmodified: ``check.py IMAGE``.

DOCKER_HOST is a server's socket, and E2B_API_URL another's address.
"""

import asyncio
import io
import os
import sys
from pathlib import Path

import docker
from agents import Model, ModelResponse, Runner, Usage
from agents.extensions.sandbox.e2b import E2BSandboxClient, E2BSandboxClientOptions
from agents.run import RunConfig
from agents.sandbox import Manifest, SandboxAgent, SandboxRunConfig
from agents.sandbox.entries import File
from agents.sandbox.sandboxes.docker import DockerSandboxClient, DockerSandboxClientOptions
from openai.types.responses import (
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseOutputText,
)

IMAGE = sys.argv[1]


class Scripted(Model):
    """Says what it is told to say, and keeps what it hears."""

    def __init__(self, *outputs):
        self.outputs, self.heard = list(outputs), []

    async def get_response(self, system_instructions, input, *args, **kwargs):
        self.heard.append(str(input))
        return ModelResponse(output=[self.outputs.pop(0)], usage=Usage(), response_id=None)

    async def stream_response(self, *args, **kwargs):
        raise NotImplementedError
        yield


def calls(name, arguments, call="c1"):
    return ResponseFunctionToolCall(type="function_call", call_id=call, name=name, arguments=arguments)


def says(text):
    words = ResponseOutputText(type="output_text", text=text, annotations=[])
    return ResponseOutputMessage(
        id="m", type="message", role="assistant", status="completed", content=[words]
    )


async def tour(client, options, workspace):
    manifest = Manifest(root=workspace, entries={"given/a.txt": File(content=b"given to it\n")})
    session = await client.create(manifest=manifest, options=options)
    try:
        async with session:
            told = await session.exec("cat given/a.txt; id -u; echo no >&2; exit 3")
            assert (told.exit_code, told.stderr) == (3, b"no\n"), told
            assert told.stdout.startswith(b"given to it\n"), told
            await session.write(Path("made.bin"), io.BytesIO(bytes(range(256)) * 4096))
            back = await session.read(Path("made.bin"))
            assert back.read() == bytes(range(256)) * 4096
            assert await session.running()
            model = Scripted(
                calls("exec_command", '{"cmd": "wc -c < made.bin; cat given/a.txt"}'), says("done")
            )
            agent = SandboxAgent(name="a", model=model, instructions="work")
            config = RunConfig(sandbox=SandboxRunConfig(session=session), tracing_disabled=True)
            ran = await Runner.run(agent, "go", run_config=config)
            assert ran.final_output == "done", ran
            assert "1048576" in model.heard[-1] and "given to it" in model.heard[-1], model.heard[-1]
    finally:
        await client.delete(session)
    return type(client).__name__


async def main():
    engine = DockerSandboxClient(docker.from_env())
    print(await tour(engine, DockerSandboxClientOptions(image=IMAGE), "/workspace"))
    if "E2B_API_URL" in os.environ:
        options = E2BSandboxClientOptions(sandbox_type="e2b", template="base")
        print(await tour(E2BSandboxClient(), options, "/home/user/workspace"))


asyncio.run(main())
