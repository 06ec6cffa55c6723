"""The reference client of the Model Context Protocol against `exocell mcp`.

    tour.py stdio COMMAND...    or    tour.py http URL KEY

Prints a word for each step that went as it should.
"""

import asyncio
import json
import os
import sys
import urllib.request

import httpx2
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError

TOOLS = {
    "create_sandbox",
    "expose_port",
    "kill_sandbox",
    "list_files",
    "list_sandboxes",
    "read_file",
    "run_command",
    "write_file",
}


def say(word):
    print(word, flush=True)


async def call(client, tool, **arguments):
    result = await client.call_tool(tool, arguments)
    text = "".join(block.text for block in result.content if block.type == "text")
    assert not result.is_error, text
    assert result.structured_content == json.loads(text)
    return result.structured_content


async def refused(client, tool, word, **arguments):
    result = await client.call_tool(tool, arguments)
    text = result.content[0].text
    assert result.is_error and word in text, text


async def commands(client, sandbox):
    ran = await call(client, "run_command", sandbox=sandbox, command="echo out; echo err >&2; exit 3")
    assert (ran["exit_code"], ran["stdout"], ran["stderr"]) == (3, "out\n", "err\n"), ran
    ran = await call(
        client,
        "run_command",
        sandbox=sandbox,
        command="cat; pwd; id -u; echo $WORD",
        stdin="in\n",
        workdir="/tmp",
        user="65534",
        env={"WORD": "a b"},
    )
    assert ran["stdout"] == "in\n/tmp\n65534\na b\n", ran
    ran = await call(
        client, "run_command", sandbox=sandbox, command="seq 100000", output_bytes=1000
    )
    assert ran["stdout"].startswith("1\n2\n") and ran["stdout"].endswith("\n100000\n"), ran
    assert len(ran["stdout"]) < 1200 and ran["stdout_left_out"] > 500000, ran
    ran = await call(
        client,
        "run_command",
        sandbox=sandbox,
        command="echo begun; sleep 1001 & sleep 1002",
        timeout_seconds=1,
    )
    assert (ran["timed_out"], ran["exit_code"], ran["stdout"]) == (True, None, "begun\n"), ran
    left = "cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -c 'sleep 100[12]'"
    ran = await call(client, "run_command", sandbox=sandbox, command=left)
    assert ran["stdout"] == "0\n", ran
    await refused(client, "run_command", "no-such-directory", sandbox=sandbox, command="true", workdir="/no-such-directory")
    await refused(client, "run_command", "3600", sandbox=sandbox, command="true", timeout_seconds=99999)
    say("commands")


async def files(client, sandbox):
    path = "/srv/a b/text"
    written = await call(client, "write_file", sandbox=sandbox, path=path, content="ä\nb\n")
    assert (written["path"], written["size"], written["kind"]) == (path, 5, "file"), written
    read = await call(client, "read_file", sandbox=sandbox, path=path)
    assert (read["content"], read["encoding"], read["more"]) == ("ä\nb\n", "utf-8", False), read
    read = await call(client, "read_file", sandbox=sandbox, path=path, offset=3, length=1)
    assert (read["content"], read["more"]) == ("b", True), read
    await call(
        client, "write_file", sandbox=sandbox, path="/srv/bytes", content="//4=", encoding="base64"
    )
    read = await call(client, "read_file", sandbox=sandbox, path="/srv/bytes")
    assert (read["content"], read["encoding"]) == ("//4=", "base64"), read
    listed = await call(client, "list_files", sandbox=sandbox, path="/srv", depth=2)
    told = sorted((entry["path"], entry["kind"]) for entry in listed["entries"])
    assert told == [("/srv/a b", "directory"), (path, "file"), ("/srv/bytes", "file")], told
    await refused(client, "read_file", "/srv/none", sandbox=sandbox, path="/srv/none")
    say("files")


async def resources(client, sandbox):
    roots = (await client.list_resources()).resources
    assert [str(root.uri) for root in roots] == [f"exocell://{sandbox}/"], roots
    templates = (await client.list_resource_templates()).resource_templates
    assert [template.uri_template for template in templates] == ["exocell://{sandbox}/{+path}"]
    read = await client.read_resource(f"exocell://{sandbox}/srv/a%20b/text")
    assert read.contents[0].text == "ä\nb\n", read
    listed = await client.read_resource(f"exocell://{sandbox}/srv")
    assert "/srv/bytes" in listed.contents[0].text, listed
    try:
        await client.read_resource(f"exocell://{sandbox}/none")
    except MCPError as error:
        assert "/none" in str(error), error
    else:
        raise AssertionError("a file that there is not was read")
    say("resources")


async def ports(client, sandbox):
    serve = "cd /srv && nohup python3 -m http.server 8000 > /dev/null 2>&1 & sleep 2"
    await call(client, "run_command", sandbox=sandbox, command=serve)
    told = await call(client, "expose_port", sandbox=sandbox, port=8000)
    again = await call(client, "expose_port", sandbox=sandbox, port=8000)
    assert told == again, (told, again)

    def fetch():
        with urllib.request.urlopen(f"http://{told['address']}/bytes", timeout=60) as answer:
            return answer.read()

    for turn in range(30):
        try:
            assert await asyncio.to_thread(fetch) == b"\xff\xfe"
            break
        except OSError:
            # It does not listen yet.
            await asyncio.sleep(0.5)
    else:
        raise AssertionError("the port is not reached")
    say("ports")


async def tour(client):
    listed = (await client.list_tools()).tools
    assert {tool.name for tool in listed} == TOOLS, listed
    assert all(tool.description and tool.output_schema for tool in listed)
    made = await call(client, "create_sandbox")
    sandbox = made["sandbox"]
    all_of_them = await call(client, "list_sandboxes")
    assert [it["sandbox"] for it in all_of_them["sandboxes"]] == [sandbox], all_of_them
    say("made")
    await commands(client, sandbox)
    await files(client, sandbox)
    await resources(client, sandbox)
    await ports(client, sandbox)
    await refused(client, "create_sandbox", "images", image="other")
    await refused(client, "run_command", "mcp-none", sandbox="mcp-none", command="true")
    await refused(client, "create_sandbox", "as many as", image=None)
    killed = await call(client, "kill_sandbox", sandbox=sandbox)
    assert killed == {"killed": sandbox}
    assert (await call(client, "list_sandboxes"))["sandboxes"] == []
    say("killed")


async def by_stdio(command):
    # Both ways in which a client may begin: by a handshake, and without one.
    for mode in ["legacy", "auto"]:
        server = StdioServerParameters(command=command[0], args=command[1:], env=dict(os.environ))
        async with Client(server, mode=mode) as client:
            await tour(client)


async def by_http(url, key):
    headers = {"Authorization": f"Bearer {key}"}
    async with httpx2.AsyncClient(headers=headers, timeout=120) as http:
        async with Client(streamable_http_client(url, http_client=http)) as client:
            await tour(client)


if sys.argv[1] == "stdio":
    asyncio.run(by_stdio(sys.argv[2:]))
else:
    asyncio.run(by_http(*sys.argv[2:]))
