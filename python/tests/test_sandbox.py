"""A sandbox, against the server that EXOCELL_HOST names."""

import os
import pathlib
import tempfile
import time
import unittest
import urllib.request

from exocell import (
    CommandExitException,
    FileType,
    InvalidArgumentException,
    NotFoundException,
    Sandbox,
    SandboxException,
    SandboxState,
    TimeoutException,
)

IMAGE = os.environ["EXOCELL_IMAGE"]


def create(**how):
    return Sandbox.create(IMAGE, **how)


def eventually(what, condition):
    until = time.monotonic() + 60
    while not condition():
        if time.monotonic() > until:
            raise AssertionError(f"never happened: {what}")
        time.sleep(0.01)


class Life(unittest.TestCase):
    def test_a_sandbox_is_listed_paused_and_killed(self):
        with create(metadata={"run": "a"}, envs={"A": "b"}, name="life") as sandbox:
            self.assertEqual(sandbox.commands.run("echo $A").stdout, "b\n")
            info = sandbox.get_info()
            self.assertEqual((info.name, info.template), ("life", IMAGE))
            self.assertEqual((info.state, info.metadata), (SandboxState.RUNNING, {"run": "a"}))
            self.assertEqual(Sandbox.list({"run": "a"}), [info])
            self.assertEqual(Sandbox.list({"run": "b"}), [])
            sandbox.pause()
            self.assertEqual(sandbox.get_info().state, SandboxState.PAUSED)
            self.assertFalse(sandbox.is_running())
            with self.assertRaisesRegex(SandboxException, "paused"):
                sandbox.commands.run("true")
            same = Sandbox.connect("life")
            self.assertEqual(same.sandbox_id, sandbox.sandbox_id)
            self.assertTrue(same.is_running())
            self.assertTrue(same.kill())
            self.assertFalse(sandbox.kill())
            self.assertFalse(sandbox.is_running())
            for gone in (sandbox.get_info, lambda: Sandbox.connect("life")):
                with self.assertRaises(NotFoundException):
                    gone()
            with self.assertRaises(NotFoundException):
                sandbox.commands.run("true")
        self.assertEqual(Sandbox.list({"run": "a"}), [])

    def test_a_sandbox_ends_by_itself(self):
        sandbox = create(timeout=2)
        with self.assertRaises(SandboxException) as gone:
            sandbox.commands.run("echo so far; sleep 1000", timeout=None)
        self.assertEqual(gone.exception.stdout, "so far\n")
        eventually("its record goes", lambda: not sandbox.is_running())
        self.assertNotIn(sandbox.sandbox_id, [info.sandbox_id for info in Sandbox.list()])

    def test_what_cannot_be_is_refused(self):
        with self.assertRaisesRegex(NotFoundException, "no/such:image"):
            Sandbox.create("no/such:image")
        with self.assertRaisesRegex(InvalidArgumentException, "unix socket"):
            create(host="tcp://127.0.0.1:1")
        with self.assertRaisesRegex(SandboxException, "exocell serve"):
            create(host="unix:///no/such/socket")


class Commands(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.sandbox = create(ports=[8000])
        cls.addClassCleanup(cls.sandbox.kill)

    def test_output_and_exit_codes_are_the_commands_own(self):
        run = self.sandbox.commands.run
        result = run("echo out; echo err >&2; id -un; pwd", user="daemon", cwd="/usr")
        self.assertEqual((result.stdout, result.stderr), ("out\ndaemon\n/usr\n", "err\n"))
        self.assertEqual(run(["printf", "%s|", "a b", "$c"]).stdout, "a b|$c|")
        self.assertEqual(run("printf '\\303\\244\\377'").stdout, "ä\ufffd")
        with self.assertRaises(CommandExitException) as caught:
            run("echo so far; echo no >&2; exit 7")
        error = caught.exception
        self.assertEqual((error.exit_code, error.stdout, error.stderr), (7, "so far\n", "no\n"))
        with self.assertRaises(CommandExitException) as caught:
            run(["no-such-program"])
        self.assertEqual(caught.exception.exit_code, 127)
        whole = run("seq 1 200000").stdout
        self.assertEqual(whole, "".join(f"{number}\n" for number in range(1, 200_001)))

    def test_output_comes_as_it_is_written(self):
        told = []
        result = self.sandbox.commands.run(
            "echo a; echo b >&2; echo c",
            on_stdout=lambda text: told.append(("out", text)),
            on_stderr=lambda text: told.append(("err", text)),
        )
        self.assertEqual("".join(text for of, text in told if of == "out"), result.stdout)
        self.assertEqual("".join(text for of, text in told if of == "err"), "b\n")

    def test_a_command_in_the_background_is_talked_to(self):
        handle = self.sandbox.commands.run("cat; echo over; exit 3", True, stdin=True)
        self.assertGreater(handle.pid, 1)
        handle.send_stdin("one\n")
        pieces = iter(handle)
        self.assertEqual(next(pieces).stdout, "one\n")
        self.assertIn("cat; echo over; exit 3", [p.cmd for p in self.sandbox.commands.list()])
        handle.close_stdin()
        self.assertEqual("".join(piece.stdout for piece in pieces), "over\n")
        self.assertEqual(handle.exit_code, 3)
        with self.assertRaises(CommandExitException):
            handle.wait()
        self.assertFalse(handle.kill())

    def test_what_takes_too_long_is_killed_with_what_it_started(self):
        line = "printf 'so far \\303'; echo and >&2; sleep 1001 & sleep 1002"
        with self.assertRaises(TimeoutException) as late:
            self.sandbox.commands.run(line, timeout=1)
        self.assertEqual((late.exception.stdout, late.exception.stderr), ("so far ", "and\n"))
        with self.assertRaises(TimeoutException) as late:
            for piece in self.sandbox.commands.run("echo one; sleep 1004", True, timeout=1):
                self.assertEqual(piece.stdout, "one\n")
        self.assertEqual(late.exception.stdout, "one\n")
        handle = self.sandbox.commands.run(["sleep", "1003"], True)
        self.assertTrue(self.sandbox.commands.kill(handle.pid))
        with self.assertRaises(CommandExitException) as caught:
            handle.wait()
        self.assertEqual(caught.exception.exit_code, 137)
        listing = lambda: self.sandbox.commands.run("ps -A -o args").stdout
        for killed in ("sleep 1001", "sleep 1002", "sleep 1003", "sleep 1004"):
            eventually(f"{killed} ends", lambda: killed not in listing())

    def test_a_port_leads_into_the_sandbox(self):
        self.sandbox.files.write("/srv/hello", "from within")
        serving = self.sandbox.commands.run(
            "exec python3 -u -m http.server 8000 -d /srv 2>&1", True, timeout=None
        )
        said = iter(serving)
        line = ""
        while "Serving HTTP" not in line:
            line += next(said).stdout
        url = f"http://{self.sandbox.get_host(8000)}/hello"
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(url, timeout=60) as reply:
            self.assertEqual(reply.read(), b"from within")
        self.assertTrue(serving.kill())
        serving.disconnect()
        with self.assertRaisesRegex(NotFoundException, "8001"):
            self.sandbox.get_host(8001)


class Files(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.sandbox = create()
        cls.addClassCleanup(cls.sandbox.kill)

    def test_files_are_written_read_and_moved(self):
        files = self.sandbox.files
        written = files.write("/job/a/text", "grün\n", mode=0o600)
        self.assertEqual(files.get_info("/job/a/text"), written)
        self.assertEqual((written.type, written.size, written.mode), (FileType.FILE, 6, 0o600))
        self.assertEqual(files.read("/job/a/text"), "grün\n")
        every_byte = bytes(range(256)) * 4096
        files.write("/job/a/bytes", every_byte)
        self.assertEqual(files.read("/job/a/bytes", "bytes"), every_byte)
        self.sandbox.commands.run("ln -s text /job/a/link; mkfifo '/job/a/x\n1 2\ny'")
        self.assertEqual(files.read("/job/a/link"), "grün\n")
        kinds = {entry.name: entry.type for entry in files.list("/job", depth=2)}
        self.assertEqual(
            kinds,
            {
                "a": FileType.DIR,
                "text": FileType.FILE,
                "bytes": FileType.FILE,
                "link": FileType.SYMLINK,
                "x\n1 2\ny": FileType.OTHER,
            },
        )
        self.assertEqual(files.get_info("/job/a/link").type, FileType.SYMLINK)
        self.assertEqual(files.rename("/job/a/text", "/job/b").path, "/job/b")
        self.assertFalse(files.exists("/job/a/text"))
        self.assertTrue(files.make_dir("/job/c/d"))
        self.assertFalse(files.make_dir("/job/c/d"))
        files.remove("/job")
        self.assertFalse(files.exists("/job"))

    def test_what_is_not_there_or_too_much_is_told(self):
        files = self.sandbox.files
        for call in (files.read, files.get_info, files.remove, files.list):
            with self.assertRaises(NotFoundException):
                call("/no/such")
        with self.assertRaises(InvalidArgumentException):
            files.read("relative")
        with self.assertRaisesRegex(InvalidArgumentException, "no file"):
            files.read("/etc")
        self.sandbox.commands.run("head -c 5000000 /dev/zero > /tmp/much; ln -s loop /tmp/loop")
        with self.assertRaisesRegex(SandboxException, "more than"):
            files.read("/tmp/much", "bytes", max_bytes=4_999_999)
        self.assertEqual(len(files.read("/tmp/much", "bytes", max_bytes=5_000_000)), 5_000_000)
        with self.assertRaisesRegex(SandboxException, "symbolic links"):
            files.read("/tmp/loop")

    def test_trees_go_in_and_out(self):
        with tempfile.TemporaryDirectory() as host:
            tree = pathlib.Path(host, "tree")
            (tree / "below").mkdir(parents=True)
            (tree / "below" / "file").write_text("content")
            (tree / "script").write_text("#!/bin/sh\necho ran\n")
            (tree / "script").chmod(0o755)
            (tree / "link").symlink_to("below/file")
            self.sandbox.files.upload(tree, "/in/here/copy")
            self.assertEqual(self.sandbox.commands.run("/in/here/copy/script").stdout, "ran\n")
            self.assertEqual(self.sandbox.commands.run("cat /in/here/copy/link").stdout, "content")
            back = pathlib.Path(host, "back")
            self.sandbox.files.download("/in/here/copy", back)
            self.assertEqual((back / "link").read_text(), "content")
            self.assertTrue(os.access(back / "script", os.X_OK))
            with self.assertRaisesRegex(InvalidArgumentException, "exists"):
                self.sandbox.files.download("/in/here/copy", back)
            with self.assertRaisesRegex(SandboxException, "more than"):
                self.sandbox.files.download("/in", pathlib.Path(host, "x"), max_bytes=512)

    def test_a_download_does_not_lead_out(self):
        script = (
            "mkdir -p /bad{1,2,3,4}; ln -s /etc /bad1/l; ln -s ../../.. /bad2/l; mknod /bad3/n c 1 3;"
            "ln -s .. /bad4/l; echo content > /bad3/file; ln -s bad3/file /leads"
        )
        self.sandbox.commands.run(["bash", "-c", script])
        with tempfile.TemporaryDirectory() as host:
            for bad in ("/bad1", "/bad2", "/bad4"):
                with self.assertRaisesRegex(SandboxException, "refused"):
                    self.sandbox.files.download(bad, pathlib.Path(host, "out"))
            self.assertEqual(os.listdir(host), [])
            # The server leaves devices out.
            self.sandbox.files.download("/bad3", pathlib.Path(host, "out"))
            self.assertEqual(os.listdir(pathlib.Path(host, "out")), ["file"])
            # A link that is asked for is followed in the sandbox.
            self.sandbox.files.download("/leads", pathlib.Path(host, "led"))
            self.assertFalse(os.path.islink(pathlib.Path(host, "led")))
            self.assertEqual(pathlib.Path(host, "led").read_text(), "content\n")


if __name__ == "__main__":
    unittest.main()
