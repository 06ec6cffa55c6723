"""docker-py, unmodified, against the server at DOCKER_HOST: what harnesses do."""

import io
import socket
import sys
import tarfile
import time

import docker

client = docker.from_env(timeout=120)
IMAGE = sys.argv[1]
NO_NETWORK = {"network_mode": "none"}


def archive(**files):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


def system():
    assert client.ping() is True
    version = client.version()
    assert version["ApiVersion"] == client.api._version == "1.47", version
    assert client.info()["ServerVersion"] == version["Version"]
    image = client.images.get(IMAGE)
    assert IMAGE in image.tags and image.id in [i.id for i in client.images.list()]
    try:
        client.images.get("no/such:image")
        raise AssertionError("an image that is not there")
    except docker.errors.ImageNotFound:
        pass
    assert client.networks.list(names=["none"])[0].name == "none"


def run():
    out = client.containers.run(IMAGE, ["echo", "hello"], remove=True, **NO_NETWORK)
    assert out == b"hello\n", out
    try:
        client.containers.run(IMAGE, "sh -c 'echo oh >&2; exit 3'", remove=True, **NO_NETWORK)
        raise AssertionError("an exit code of 3")
    except docker.errors.ContainerError as error:
        assert (error.exit_status, error.stderr) == (3, b"oh\n"), error
    lines = client.containers.run(IMAGE, "seq 3", stream=True, **NO_NETWORK)
    assert b"".join(lines) == b"1\n2\n3\n"


def execute(container):
    code, out = container.exec_run(["sh", "-c", "echo out; echo err >&2; exit 4"])
    assert code == 4 and sorted(out.split()) == [b"err", b"out"], (code, out)
    code, (out, err) = container.exec_run(["sh", "-c", "echo out; echo err >&2"], demux=True)
    assert (code, out, err) == (0, b"out\n", b"err\n"), (code, out, err)
    result = container.exec_run("sh -c 'for i in 1 2; do echo $i; sleep 0.2; done'", stream=True)
    assert b"".join(result.output) == b"1\n2\n"
    code, out = container.exec_run(
        "sh -c 'echo $A; pwd; id -u'", environment={"A": "b"}, workdir="/usr", user="1000"
    )
    assert out == b"b\n/usr\n1000\n", out
    assert container.exec_run("no-such-program").exit_code == 127
    code, out = container.exec_run("tty", tty=True)
    assert code == 0 and out.startswith(b"/dev/pts/"), out
    result = container.exec_run(["sh", "-c", "echo one line"], tty=True, stream=True)
    assert list(result.output) == [b"one line\r\n"]


def by_socket(container):
    made = client.api.exec_create(container.id, "cat", stdin=True)
    connection = client.api.exec_start(made["Id"], socket=True)
    raw = connection._sock if hasattr(connection, "_sock") else connection
    raw.sendall(b"over the socket")
    raw.shutdown(socket.SHUT_WR)
    told = b""
    while chunk := raw.recv(4096):
        told += chunk
    assert told == b"\x01\0\0\0\0\0\0\x0fover the socket", told
    inspected = client.api.exec_inspect(made["Id"])
    assert inspected["ExitCode"] == 0 and not inspected["Running"], inspected


def signalled_by_pid(container):
    """How the SWE-bench harness ends a program that takes too long."""
    made = client.api.exec_create(container.id, "sleep 1000")
    stream = client.api.exec_start(made["Id"], stream=True)
    # It starts once its client has the reply's head.
    while not (pid := client.api.exec_inspect(made["Id"])["Pid"]):
        time.sleep(0.01)
    assert pid > 1
    assert container.exec_run(f"kill -TERM {pid}").exit_code == 0
    assert b"".join(stream) == b""
    assert client.api.exec_inspect(made["Id"])["ExitCode"] == 143


def files(container):
    assert container.put_archive("/tmp", archive(a=b"first", b=b"second"))
    assert container.exec_run("cat /tmp/a /tmp/b").output == b"firstsecond"
    stream, stat = container.get_archive("/tmp/a")
    assert (stat["name"], stat["size"]) == ("a", 5), stat
    with tarfile.open(fileobj=io.BytesIO(b"".join(stream))) as tar:
        assert tar.extractfile("a").read() == b"first"
    for call in (lambda: container.get_archive("/no/such"), lambda: container.put_archive("/no", b"")):
        try:
            call()
            raise AssertionError("a path that is not there")
        except docker.errors.NotFound:
            pass


def container():
    made = client.containers.create(
        IMAGE, "sleep infinity", name="py", labels={"k": "v"}, mem_limit="128m", **NO_NETWORK
    )
    assert made.status == "created"
    made.start()
    made.reload()
    assert made.status == "running" and made.labels == {"k": "v"}
    assert client.containers.get("py").id == made.id
    assert [c.name for c in client.containers.list(filters={"label": "k=v"})] == ["py"]
    execute(made)
    by_socket(made)
    signalled_by_pid(made)
    files(made)
    stats = made.stats(stream=False)
    assert 0 < stats["memory_stats"]["usage"] and stats["memory_stats"]["limit"] == 128 << 20
    assert stats["cpu_stats"]["cpu_usage"]["total_usage"] > 0
    assert next(made.stats(decode=True))["name"] == "/py"
    assert any("sleep infinity" in row[-1] for row in made.top()["Processes"])
    made.stop(timeout=60)
    assert made.wait()["StatusCode"] == 143
    made.remove()
    try:
        client.containers.get("py")
        raise AssertionError("a container that is not there")
    except docker.errors.NotFound:
        pass


def events():
    heard = client.events(since=1, until=4_000_000_000, decode=True, filters={"container": "py"})
    actions = []
    for event in heard:
        actions.append(event["Action"])
        if event["Action"] == "destroy":
            break
    heard.close()
    assert actions[:2] == ["create", "start"] and actions[-2:] == ["stop", "destroy"], actions


for step in (system, run, container, events):
    step()
    print("passed:", step.__name__)
