"""A tour of E2B's SDK for Python, unmodified, against a server of sandboxes."""

import asyncio
import datetime
import sys
import time
import urllib.error
import urllib.request

import e2b
from e2b import (
    AsyncSandbox,
    AuthenticationException,
    CommandExitException,
    FileNotFoundException,
    FilesystemEventType,
    FileType,
    InvalidArgumentException,
    NotFoundException,
    PtySize,
    RateLimitException,
    Sandbox,
    SandboxException,
    SandboxNotFoundException,
    SandboxQuery,
    SandboxState,
    TimeoutException,
)
from e2b.exceptions import SandboxNotRunningException


def raises(kind, work, words=""):
    try:
        work()
    except kind as error:
        assert words in str(error), f"{words!r} is not in {error}"
        return error
    except Exception as error:
        raise AssertionError(f"{type(error)} instead of {kind}: {error}") from error
    raise AssertionError(f"no {kind}")


def eventually(what, work):
    until = time.monotonic() + 60
    while time.monotonic() < until:
        if work():
            return
        time.sleep(0.05)
    raise AssertionError(what)


def sandboxes(url):
    box = Sandbox.create(
        timeout=120, metadata={"who": "tour & co", "n": "1"}, envs={"GREETING": "hello world"}
    )
    info = box.get_info()
    assert info.sandbox_id == box.sandbox_id
    assert info.metadata == {"who": "tour & co", "n": "1"}
    assert info.state == SandboxState.RUNNING
    assert info.name == "base" and info.cpu_count > 0 and info.memory_mb == 256
    left = info.end_at - info.started_at
    assert left == datetime.timedelta(seconds=120), left
    assert box.is_running()
    box.set_timeout(600)
    assert box.get_info().end_at - info.end_at > datetime.timedelta(seconds=400)
    # To connect does not shorten its time.
    again = Sandbox.connect(box.sandbox_id, timeout=1)
    assert again.get_info().end_at - info.end_at > datetime.timedelta(seconds=400)
    assert again.commands.run("echo $GREETING").stdout == "hello world\n"
    [metrics] = box.get_metrics()
    assert metrics.mem_total == 256 << 20 and 0 < metrics.mem_used <= metrics.mem_total
    assert metrics.cpu_count > 0 and metrics.disk_total == 256 << 20
    raises(InvalidArgumentException, lambda: box.files.list("/", depth=0))
    raises(SandboxException, lambda: Sandbox.create("no-such-template"), "no-such-template")
    raises(SandboxException, lambda: Sandbox.create(timeout=10**9), "timeout")
    raises(AuthenticationException, lambda: Sandbox.create(api_key="e2b_" + "0" * 40))
    raises(SandboxNotFoundException, lambda: Sandbox.connect("0" * 32))
    assert not Sandbox.kill("0" * 32)
    return box


def lists(box):
    others = [Sandbox.create(timeout=60, metadata={"n": "1"}) for _ in range(2)]
    paginator = Sandbox.list(query=SandboxQuery(metadata={"n": "1"}), limit=2)
    found = paginator.next_items()
    assert len(found) == 2 and paginator.has_next
    found += paginator.next_items()
    assert not paginator.has_next
    assert [it.sandbox_id for it in found] == [
        others[1].sandbox_id, others[0].sandbox_id, box.sandbox_id,
    ]
    query = SandboxQuery(metadata={"who": "tour & co"})
    assert [it.sandbox_id for it in Sandbox.list(query=query).next_items()] == [box.sandbox_id]
    assert not Sandbox.list(query=SandboxQuery(state=[SandboxState.PAUSED])).next_items()
    for other in others:
        assert other.kill()
        assert not other.kill()
        assert not other.is_running()
        raises(SandboxNotRunningException, lambda: other.commands.run("true"))
        raises(SandboxNotRunningException, lambda: other.files.read("/etc/passwd"))


def files(box):
    files = box.files
    told = files.write("notes/a.txt", "one\n")
    assert (told.path, told.name, told.type) == ("/home/user/notes/a.txt", "a.txt", FileType.FILE)
    assert files.read("notes/a.txt") == "one\n"
    assert files.read("~/notes/a.txt", format="bytes") == b"one\n"
    many = files.write_files(
        [{"path": f"many/{n}", "data": bytes([n]) * 100_000} for n in range(5)]
    )
    assert [it.path for it in many] == [f"/home/user/many/{n}" for n in range(5)]
    assert files.read("many/3", format="bytes") == b"\3" * 100_000
    big = bytes(range(256)) * 40_000
    files.write("big", big)
    assert b"".join(files.read("big", format="stream")) == big
    files.write("packed", big, gzip=True)
    assert files.read("packed", format="bytes", gzip=True) == big
    files.write("octets", iter([b"a", b"b" * 70_000]))
    assert len(files.read("octets")) == 70_001
    files.write("kept", "x", metadata={"author": "ann"})
    info = files.get_info("kept")
    assert info.metadata == {"author": "ann"}, info
    assert files.write("kept", "y").metadata is None, "it was said of other bytes"
    info = files.get_info("kept")
    assert not info.metadata, info
    assert (info.size, info.owner, info.group, info.mode) == (1, "user", "user", 0o644)
    assert info.permissions == "-rw-r--r--" and info.type == FileType.FILE
    assert abs(info.modified_time.timestamp() - time.time()) < 3600
    files.write("/root/secret", "r", user="root")
    assert files.get_info("/root/secret").owner == "root"
    assert files.make_dir("d/e/f") and not files.make_dir("d/e")
    names = lambda depth: [it.path for it in files.list("d", depth=depth)]
    assert names(1) == ["/home/user/d/e"]
    assert names(3) == ["/home/user/d/e", "/home/user/d/e/f"]
    assert files.rename("kept", "d/moved").path == "/home/user/d/moved"
    assert files.exists("d/moved") and not files.exists("kept")
    box.commands.run("ln -s /etc/passwd link && ln -s nowhere dangling")
    link = files.get_info("link")
    assert (link.type, link.symlink_target) == (FileType.SYMLINK, "/etc/passwd")
    strange = "line\nbreak\t\u2603 \"quoted\" %0A"
    files.write(strange, "strange")
    assert files.read(strange) == "strange"
    assert strange in [it.name for it in files.list(".")]
    files.remove("d")
    files.remove("d")
    assert not files.exists("d")
    raises(FileNotFoundException, lambda: files.read("no/such"))
    raises(FileNotFoundException, lambda: files.list("no/such"))
    raises(FileNotFoundException, lambda: files.get_info("no"))
    raises(InvalidArgumentException, lambda: files.read("many"))
    raises(InvalidArgumentException, lambda: files.list("big"))
    raises(InvalidArgumentException, lambda: files.write("many", "x"))
    raises(InvalidArgumentException, lambda: files.read("x" * 10_000))
    raises(AuthenticationException, lambda: files.read("big", user="nobody-there"))
    files.write("empty", "")
    assert files.read("empty") == ""


def signed_urls(box):
    box.files.write("signed", "signed words")
    url = box.download_url("signed", use_signature_expiration=600)
    assert urllib.request.urlopen(url).read() == b"signed words"
    def refused(url):
        try:
            urllib.request.urlopen(url)
        except urllib.error.HTTPError as error:
            return error.code
    late = box.download_url("signed", use_signature_expiration=-5)
    assert refused(late) == 401, refused(late)
    assert refused(url.replace("path=signed", "path=big")) in (401, 404)
    boundary = "b0undary"
    body = (
        f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
        f"by url\r\n--{boundary}--\r\n"
    )
    request = urllib.request.Request(
        box.upload_url("uploaded"), data=body.encode(),
        headers={"Content-Type": f"multipart/form-data; boundary={boundary}"},
    )
    urllib.request.urlopen(request).read()
    assert box.files.read("uploaded") == "by url"


def commands(box):
    run = box.commands.run
    done = run("echo out; echo err >&2; pwd; id -un; echo $HOME $USER $LOGNAME")
    assert done.stdout == "out\n/home/user\nuser\n/home/user user user\n", done.stdout
    assert (done.stderr, done.exit_code) == ("err\n", 0)
    assert run("id -un; echo $HOME; pwd", user="root").stdout == "root\n/root\n/root\n"
    assert run("echo $A$GREETING", envs={"A": "b c "}).stdout == "b c hello world\n"
    assert run("pwd", cwd="/tmp").stdout == "/tmp\n"
    raises(InvalidArgumentException, lambda: run("pwd", cwd="/no/such"), "/no/such")
    raises(AuthenticationException, lambda: run("true", user="nobody-there"))
    failed = raises(CommandExitException, lambda: run("echo before; exit 3"))
    assert (failed.exit_code, failed.stdout, failed.error) == (3, "before\n", "exit status 3")
    seen = []
    run("for i in 1 2 3; do echo $i; done", on_stdout=seen.append)
    assert "".join(seen) == "1\n2\n3\n"
    assert len(run("head -c 3000000 /dev/zero | tr '\\0' y").stdout) == 3_000_000
    assert run("printf '\\342\\230\\203'").stdout == "\u2603"


def background(box):
    run = box.commands.run
    cat = run("cat; echo done", background=True, stdin=True)
    assert cat.pid in [it.pid for it in box.commands.list()]
    box.commands.send_stdin(cat.pid, "one\n")
    box.commands.stream_input(cat.pid, ["two\n", "three\n"])
    cat.close_stdin()
    assert cat.wait().stdout == "one\ntwo\nthree\ndone\n"
    raises(NotFoundException, lambda: box.commands.send_stdin(cat.pid, "x"))
    # A command outlives its connection, and another one is told what it says.
    loop = run("while [ ! -e stop ]; do sleep 0.05; done; echo ended", background=True)
    loop.disconnect()
    [listed] = [it for it in box.commands.list() if it.pid == loop.pid]
    assert listed.cmd == "/bin/bash" and listed.args[:2] == ["-l", "-c"]
    joined = box.commands.connect(loop.pid)
    box.files.write("stop", "")
    assert joined.wait().stdout == "ended\n"
    raises(NotFoundException, lambda: box.commands.connect(loop.pid))
    # Two hear the same.
    first = run("read x; echo heard $x", background=True, stdin=True)
    second = box.commands.connect(first.pid)
    first.send_stdin("it\n")
    assert first.wait().stdout == second.wait().stdout == "heard it\n"
    # All of a command ends when it is killed.
    tree = run("sleep 1000 & sleep 1001; true", background=True)
    eventually("it runs", lambda: "sleep 1001" in run("ps -eo args").stdout)
    assert tree.kill()
    killed = raises(CommandExitException, tree.wait)
    assert killed.error == "signal: killed", killed
    assert not box.commands.kill(tree.pid)
    eventually("it is gone", lambda: "sleep 100" not in run("ps -eo args | grep -v grep").stdout)
    # Nobody waits longer than he said, and the command ends.
    raises(TimeoutException, lambda: run("sleep 2000", timeout=1))
    eventually("it is gone", lambda: "sleep 2000" not in run("ps -eo args | grep -v grep").stdout)
    assert box.commands.list() == []


def pty(box):
    heard = []
    terminal = box.pty.create(PtySize(rows=24, cols=80), envs={"MARK": "a mark"}, timeout=60)
    box.pty.send_stdin(terminal.pid, b"stty size; echo $MARK$((40 + 2)); id -un\n")
    box.pty.resize(terminal.pid, PtySize(rows=10, cols=20))
    box.pty.send_stdin(terminal.pid, b"stty size\nexit 7\n")
    failed = raises(
        CommandExitException, lambda: terminal.wait(on_pty=lambda piece: heard.append(piece))
    )
    text = b"".join(heard)
    assert failed.exit_code == 7 and b"a mark42" in text and b"10 20" in text, text
    terminal = box.pty.create(PtySize(rows=24, cols=80))
    assert box.pty.kill(terminal.pid)


def watches(box):
    box.files.make_dir("watched/deep")
    handle = box.files.watch_dir("watched", recursive=True, include_entry=True)
    box.files.write("watched/deep/f", "x")
    box.commands.run("mkdir watched/new; echo y > watched/new/g; rm watched/deep/f; mv watched/new watched/old")
    seen = []

    def has(name, kind):
        seen.extend(handle.get_new_events())
        return any(it.name == name and it.type == kind for it in seen)

    kinds = FilesystemEventType
    for name, kind in [
        ("deep/f", kinds.CREATE), ("deep/f", kinds.WRITE), ("deep/f", kinds.REMOVE),
        ("new", kinds.CREATE), ("new", kinds.RENAME), ("old", kinds.CREATE),
    ]:
        eventually(f"{name} {kind}: {seen}", lambda: has(name, kind))
    new = box.files.watch_dir("watched/deep")
    box.files.write("watched/deep/new", "x")
    told = []
    eventually(f"three: {told}", lambda: told.extend(new.get_new_events()) or len(told) >= 3)
    assert [it.type for it in told] == [kinds.CREATE, kinds.CHMOD, kinds.WRITE], told
    new.stop()
    [old] = [it.entry for it in seen if it.name == "old" and it.type == kinds.CREATE]
    assert old.path == "/home/user/watched/old" and old.type == FileType.DIR
    handle.stop()
    raises(SandboxException, handle.get_new_events)
    raises(FileNotFoundException, lambda: box.files.watch_dir("no/such"))
    raises(InvalidArgumentException, lambda: box.files.watch_dir("watched/old/g"))


def ports(box, url):
    def get(port, path="/", **headers):
        headers |= {"E2b-Sandbox-Id": box.sandbox_id, "E2b-Sandbox-Port": str(port)}
        try:
            reply = urllib.request.urlopen(urllib.request.Request(url + path, headers=headers))
            return reply.status, reply.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    assert box.get_host(8000) == f"8000-{box.sandbox_id}.localhost:{url.rsplit(':')[-1]}"
    status, told = get(8000)
    assert status == 502 and b"port is not open" in told, told
    box.files.write("site/page.html", "a page")
    server = box.commands.run("cd site && exec python3 -m http.server 8000", background=True)
    eventually("it serves", lambda: get(8000, "/page.html") == (200, b"a page"))
    assert get(8000, "/none")[0] == 404
    by_host = urllib.request.Request(url + "/page.html", headers={"Host": box.get_host(8000)})
    assert urllib.request.urlopen(by_host).read() == b"a page"
    server.kill()


def pauses(box):
    counter = box.commands.run(
        "i=0; while [ ! -e enough ]; do i=$((i + 1)); echo $i > count; sleep 0.02; done",
        background=True,
    )
    eventually("it counts", lambda: box.files.exists("count"))
    assert box.pause()
    assert not box.pause()
    assert box.get_info().state == SandboxState.PAUSED
    assert not box.is_running()
    raises(SandboxNotRunningException, lambda: box.files.read("count"))
    assert [it.sandbox_id for it in Sandbox.list(query=SandboxQuery(state=[SandboxState.PAUSED])).next_items()] == [box.sandbox_id]
    resumed = box.connect(timeout=300)
    assert resumed.get_info().state == SandboxState.RUNNING
    at = int(box.files.read("count") or 0)
    eventually("it goes on", lambda: int(box.files.read("count") or 0) > at)
    box.files.write("enough", "")
    counter.wait()
    raises(SandboxException, lambda: box.pause(mode="filesystem"), "501")


def snapshots():
    # An image of a few megabytes, without bash and without users.
    box = Sandbox.create("small", timeout=300)
    assert box.commands.run("echo $HOME; pwd").stdout == "/home/user\n/home/user\n"
    box.files.write("notes", "x")
    box.files.write("/srv/kept/file", "of the snapshot", user="root")
    named = box.create_snapshot("tour-snapshot")
    assert named.names == ["tour-snapshot"], named
    other = box.create_snapshot()
    listed = [it.snapshot_id for it in box.list_snapshots().next_items()]
    assert sorted(listed) == sorted([named.snapshot_id, other.snapshot_id]), listed
    with Sandbox.create(named.snapshot_id, timeout=60) as copy:
        assert copy.files.read("/srv/kept/file") == "of the snapshot"
        assert copy.files.get_info("notes").owner == "user"
        assert copy.commands.list() == [] and copy.commands.run("cat notes").stdout == "x"
    raises(SandboxException, lambda: box.create_snapshot(mode="full"), "501")
    for it in (named, other):
        assert Sandbox.delete_snapshot(it.snapshot_id)
        assert not Sandbox.delete_snapshot(it.snapshot_id)
    raises(SandboxException, lambda: Sandbox.create(named.snapshot_id), "was not found")
    box.kill()


def ends():
    short = Sandbox.create(timeout=2)
    eventually("its time is over", lambda: not short.is_running())
    raises(SandboxNotFoundException, short.get_info)
    gone = Sandbox.create(timeout=60)
    running = gone.commands.run("sleep 1000", background=True)
    assert gone.kill()
    raises(TimeoutException, running.wait, "killed or reached its end of life")
    kept = Sandbox.create(timeout=2, lifecycle={"on_timeout": "pause", "auto_resume": True})
    kept.files.write("f", "kept")
    eventually("it is paused", lambda: kept.get_info().state == SandboxState.PAUSED)
    assert kept.files.read("f") == "kept"
    assert kept.get_info().state == SandboxState.RUNNING
    with kept:
        pass
    gone = Sandbox.create(timeout=60)
    sleeper = gone.commands.run("sleep 1000", background=True)
    gone.kill()
    raises(SandboxNotRunningException, sleeper.wait)


def refused():
    for words, keywords in [
        ("volumeMounts", {"volume_mounts": {"/x": "volume"}}),
        ("egressProxy", {"network": {"egress_proxy": {"address": "a:1"}}}),
        ("rules", {"network": {"rules": {"a.org": [{"transform": {"headers": {"a": "b"}}}]}}}),
    ]:
        raises(SandboxException, lambda: Sandbox.create(**keywords), words)
    first = Sandbox.create(idempotency_key="the-same")
    assert Sandbox.create(idempotency_key="the-same").sandbox_id == first.sandbox_id
    raises(
        SandboxException,
        lambda: Sandbox.create(idempotency_key="the-same", timeout=77),
        "Idempotency-Key",
    )
    raises(SandboxException, lambda: first.fork(), "forking")
    first.kill()
    private = Sandbox.create(network={"allow_public_traffic": False})
    assert private.traffic_access_token
    private.kill()


async def asynchronously():
    box = await AsyncSandbox.create(timeout=120, metadata={"kind": "async"})
    assert await box.is_running()
    done = await asyncio.gather(*(box.commands.run(f"echo {n}") for n in range(8)))
    assert [it.stdout for it in done] == [f"{n}\n" for n in range(8)]
    events = []
    handle = await box.files.watch_dir(".", on_event=events.append)
    await box.files.write("f", "x")
    for _ in range(1200):
        if any(it.name == "f" and it.type == FilesystemEventType.WRITE for it in events):
            break
        await asyncio.sleep(0.05)
    else:
        raise AssertionError(f"{events}")
    await handle.stop()
    cat = await box.commands.run("cat", background=True, stdin=True)
    await cat.send_stdin("words")
    await cat.close_stdin()
    assert (await cat.wait()).stdout == "words"
    try:
        await box.commands.run("exit 4")
    except CommandExitException as error:
        assert error.exit_code == 4
    assert await box.kill()


def main(url):
    box = sandboxes(url)
    steps = [
        lambda: lists(box), lambda: files(box), lambda: signed_urls(box), lambda: commands(box),
        lambda: background(box), lambda: pty(box), lambda: watches(box), lambda: ports(box, url),
        lambda: pauses(box), snapshots, ends, refused, lambda: asyncio.run(asynchronously()),
    ]
    names = "lists files signed_urls commands background pty watches ports pauses snapshots ends refused async"
    only = sys.argv[2:]
    for name, step in zip(names.split(), steps):
        if not only or name in only:
            began = time.monotonic()
            step()
            print(name, file=sys.stdout, flush=True)
            print(f"{name}: {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
    assert box.kill()
    assert not Sandbox.list().next_items()


main(sys.argv[1])
