"""Templates by E2B's SDK for Python, unmodified: built, started, and refused."""

import os
import tempfile
import uuid

from e2b import BuildException, ConnectionConfig, Sandbox, SandboxException, Template
from e2b.api.client.api.templates import get_templates
from e2b.api.client_sync import get_api_client

NAME = f"tour-{uuid.uuid4().hex[:8]}"


def raises(kind, work, words):
    try:
        work()
    except kind as error:
        assert words in str(error), f"{words!r} is not in {error}"
        return
    raise AssertionError(f"no {kind}")


with tempfile.TemporaryDirectory() as context:
    os.makedirs(os.path.join(context, "app/deep"))
    for name, text in [("app/one.txt", "one"), ("app/deep/two.txt", "two"), ("run.sh", "cat \"$@\"")]:
        with open(os.path.join(context, name), "w", encoding="utf-8") as file:
            file.write(text)
    template = (
        Template(file_context_path=context)
        .from_template("small")
        .set_envs({"A": "b \"c\" $d"})
        .copy("app", "/srv/app")
        .copy("run.sh", "/srv/run.sh", mode=0o755)
        .run_cmd("echo \"$A\" > made; echo 'a line\nof two' >> made")
        .run_cmd("echo $HOME > /by-root", user="root")
        .set_workdir("/srv/app")
        .run_cmd("cat one.txt > /home/user/copied")
        .set_start_cmd("while :; do echo x > ~/started; sleep 1000; done", "cat ~/started")
    )
    lines = []
    assert not Template.exists(NAME)
    info = Template.build(template, NAME, tags=["v1"], on_build_logs=lambda it: lines.append(it.message))
    assert Template.exists(NAME) and info.name == NAME
    assert any("Step" in line for line in lines), lines
client = get_api_client(ConnectionConfig())
found = {it.template_id: it for it in get_templates.sync(client=client)}
assert found[NAME].names == [NAME] and not found[NAME].public, found
assert found["base"].public and found["small"].memory_mb == 256, found
assert {it.tag for it in Template.get_tags(NAME)} == {"latest", "v1"}
told = Template.assign_tags(f"{NAME}:v1", ["v2", "stable"])
assert set(told.tags) == {"v2", "stable"}
Template.remove_tags(NAME, ["v2"])
assert {it.tag for it in Template.get_tags(NAME)} == {"latest", "v1", "stable"}
Template.remove_tags(NAME, ["stable"])
raises(SandboxException, lambda: Template.remove_tags(NAME, ["none"]), "was not found")
raises(SandboxException, lambda: Template.assign_tags("base:latest", ["v9"]), "was not found")
print("built", flush=True)

for name in (NAME, f"{NAME}:v1", info.template_id):
    with Sandbox.create(name, timeout=120) as box:
        read = box.files.read
        assert read("~/made") == "b \"c\" $d\na line\nof two\n", read("~/made")
        assert read("/home/user/copied") == read("one.txt") == "one" and read("/srv/app/deep/two.txt") == "two"
        assert read("/by-root") == "/root\n"
        assert box.files.get_info("/srv/run.sh").mode == 0o755
        assert box.files.get_info("/srv/app/one.txt").owner == "user"
        assert read("~/started") == "x\n"
        [started] = box.commands.list()
        assert started.args[-1].startswith("while :;")
        assert box.commands.run("echo $A; pwd").stdout == "b \"c\" $d\n/srv/app\n"
print("started", flush=True)

# A ready command that only sleeps is slept once; the next sandbox has come as far.
slow = Template().from_template("small").set_start_cmd("sleep 2; echo x > ~/done", "sleep 6")
Template.build(slow, f"{NAME}-slow")
for _ in range(2):
    with Sandbox.create(f"{NAME}-slow", timeout=120, envs={"OWN": "x"}) as box:
        assert box.files.read("~/done") == "x\n"
assert Sandbox.delete_snapshot(f"{NAME}-slow")

raises(
    BuildException,
    lambda: Template.build(Template().from_template("small").run_cmd("exit 3"), f"{NAME}-failed"),
    "returned a non-zero code: 3",
)
raises(SandboxException, lambda: Sandbox.create(f"{NAME}-failed"), "was not found")
print("failed", flush=True)

small = Template().from_template("small")
for words, work in [
    ("memoryMB", lambda: Template.build(small, NAME, memory_mb=1 << 20)),
    ("template's name", lambda: Template.build(small, "Not/A/Name")),
    ("was not found", lambda: Template.build(Template().from_image("no/such:image"), NAME)),
]:
    raises(BuildException, work, words)
for tag in (NAME, f"{NAME}:v1"):
    assert Sandbox.delete_snapshot(tag)
print("refused")
