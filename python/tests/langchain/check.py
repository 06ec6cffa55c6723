"""LangChain's Deep Agents in cells: ``check.py IMAGE``.

By exocell.deepagents, and by langchain-e2b, unmodified, where E2B_API_URL
names a server.
"""

import os
import sys

from deepagents import create_deep_agent
from exocell.deepagents import ExocellSandbox
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, ToolMessage

IMAGE = sys.argv[1]


class Scripted(GenericFakeChatModel):
    """Says what it is told to say, whatever tools there are."""

    def bind_tools(self, tools, **kwargs):
        return self


def call(name, **arguments):
    return AIMessage("", tool_calls=[{"name": name, "args": arguments, "id": name}])


def steps(home):
    return [
        call("write_file", file_path=f"{home}/tool.py", content="def double(n):\n    return n\n"),
        call("edit_file", file_path=f"{home}/tool.py", old_string="return n", new_string="return 2 * n"),
        call("execute", command=f"cd {home} && python3 -c 'import tool; print(tool.double(21))'; exit 3"),
        call("read_file", file_path=f"{home}/tool.py"),
        call("grep", pattern="double", path=home),
        call("glob", pattern="*.py", path=home),
        call("ls", path=home),
        AIMessage("done"),
    ]


def tour(backend, home):
    told = steps(home)
    agent = create_deep_agent(model=Scripted(messages=iter(told)), backend=backend)
    ended = agent.invoke({"messages": [("user", "double what is given")]})
    assert ended["messages"][-1].content == "done"
    said = {m.name: str(m.content) for m in ended["messages"] if isinstance(m, ToolMessage)}
    assert "42" in said["execute"] and "3" in said["execute"], said
    assert "return 2 * n" in said["read_file"], said
    for name in ("grep", "glob", "ls"):
        assert "tool.py" in said[name], said
    every_byte = bytes(range(256)) * 1024
    (put,) = backend.upload_files([(f"{home}/bytes", every_byte)])
    assert put.error is None, put
    got, none, folder = backend.download_files([f"{home}/bytes", f"{home}/none", home])
    assert (got.content, none.error, folder.error) == (every_byte, "file_not_found", "is_directory")
    late = backend.execute("echo so far; sleep 1001", timeout=1)
    assert late.exit_code == 124, late
    return late.output


def main():
    with ExocellSandbox.create(IMAGE, memory_mb=512) as sandbox:
        assert tour(sandbox, "/job").startswith("so far\n")
        assert "sleep" not in sandbox.execute("ps -A -o args | grep '[s]leep 1001'").output
        (denied,) = sandbox.upload_files([("/job", b"")])
        assert denied.error == "is_directory", denied
        offline = sandbox.execute("ls /sys/class/net")
        assert offline.output == "lo", offline
    assert not sandbox.kill()
    print("exocell")
    if "E2B_API_URL" in os.environ:
        import e2b
        from langchain_e2b import E2BSandbox

        with e2b.Sandbox.create() as box:
            tour(E2BSandbox(sandbox=box), "/home/user/job")
        print("langchain-e2b")


main()
