"""What a cell, an image or a task says is anybody's word: of files, of variables, of hosts.

No cell and no server is needed.
"""

import asyncio
import contextlib
import io
import json
import os
import pathlib
import tarfile
import tempfile
import unittest
from unittest import mock

from exocell import InvalidArgumentException, SandboxException, _cell
from exocell._hosts import opens_host
from exocell._program import env_file
from exocell._trees import link_of, put, unpack


def archive(*entries):
    """A tar stream of names with content, ``None`` for a directory, or where a link leads."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, content, *kind in entries:
            entry = tarfile.TarInfo(name)
            if kind:
                entry.type, entry.linkname = kind[0], content
                tar.addfile(entry)
            elif content is None:
                entry.type = tarfile.DIRTYPE
                tar.addfile(entry)
            else:
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
    packed.seek(0)
    return packed


def link(name, to):
    return (name, to, tarfile.SYMTYPE)


def hard(name, to):
    return (name, to, tarfile.LNKTYPE)


class Places(unittest.TestCase):
    def setUp(self):
        place = tempfile.TemporaryDirectory()
        self.addCleanup(place.cleanup)
        self.place = pathlib.Path(place.name)
        self.target = self.place / "target"

    def tree(self, path=None):
        path = path or self.place
        return {
            str(one.relative_to(path)): os.readlink(one) if one.is_symlink() else one.read_text()
            for one in path.rglob("*")
            if one.is_symlink() or one.is_file()
        }


class Unpacking(Places):
    def test_a_tree_comes_as_it_is(self):
        packed = archive(
            ("top", None),
            ("top/a/file", b"content"),
            link("top/a/up", "../b/./file"),
            link("top/a/whole", ".."),
            link("top/b", "a/../a"),
            hard("top/again", "top/a/file"),
        )
        unpack(packed, self.target)
        told = {"a/file": "content", "a/up": "../b/file", "a/whole": "..", "b": "a"}
        self.assertEqual(self.tree(self.target), told | {"again": "content"})

    def test_nothing_lies_or_leads_outside_of_the_entry(self):
        deep = "top/" + "d/" * 300 + "file"
        for entries in [
            [link("top/x", "..")],
            [link("top/x", "../other")],
            [link("top/a/x", "../..")],
            [link("top/x", "/etc")],
            [link("top/x", "a/../../y")],
            [link("top", "..")],
            [link("top", "other")],
            [link("top/x", "a"), ("top/a", None), ("top/x/file", b"")],
            [link("top/x", "a"), ("top/a", None), ("top/x", None)],
            [link("top/x", "a"), ("top/x", b"")],
            [link("top/x", "a"), ("top/a/file", b""), hard("top/y", "top/x/file")],
            [link("top/x", "a"), hard("top/y", "top/x")],
            [("top/file", b""), hard("other/file", "top/file")],
            [("top/file", b""), hard("top/y", "top/../top/file")],
            [("top/file", b""), ("other", b"")],
            [("top/../other", b"")],
            [("../other", b"")],
            [(deep, b"")],
        ]:
            with self.subTest(entries=str(entries)[:200]):
                with self.assertRaisesRegex(SandboxException, "refused|more than what"):
                    unpack(archive(("top", None), *entries), self.target)
                self.assertEqual(os.listdir(self.place), [])

    def test_links_too_long_to_be_followed_lead_nowhere(self):
        # By these an older tarfile loses count of where it is.
        long, entries = "d" * 247, []
        at = "top"
        for step in "abcdefghijklmnop":
            entries += [(f"{at}/{long}", None), link(f"{at}/{step}", long)]
            at += f"/{long}"
        chain = "/".join("abcdefghijklmnop")
        entries += [link(f"top/{chain}/" + "l" * 254, "../" * 16), link("top/out", f"{chain}/" + "l" * 254 + "/../..")]
        with contextlib.suppress(OSError):
            with self.assertRaises(SandboxException):
                unpack(archive(("top", None), *entries, ("top/out/file", b"")), self.target)
        self.assertEqual(os.listdir(self.place), [])

    def test_an_entry_that_is_a_link_is_known(self):
        self.assertEqual(link_of(archive(link("top", "../there"))), "../there")
        self.assertIsNone(link_of(archive(("top", None), link("top/x", "y"))))
        with self.assertRaisesRegex(SandboxException, "refused"):
            link_of(io.BytesIO(b"no archive"))


class Putting(Places):
    def came(self, *entries):
        came = self.place / "came"
        unpack(archive(("top", None), *entries), came)
        return came

    def test_what_is_there_is_kept_or_replaced(self):
        put(self.came(("top/a/one", b"1"), ("top/two", b"2")), self.target)
        again = self.place / "again"
        unpack(archive(("top", None), ("top/a/three", b"3"), ("top/two", b"new")), again)
        put(again, self.target)
        self.assertEqual(self.tree(self.target), {"a/one": "1", "a/three": "3", "two": "new"})
        unpack(archive(("file", b"now")), self.place / "file")
        with self.assertRaises(OSError):
            put(self.place / "file", self.target)
        put(self.place / "file", self.target / "two")
        self.assertEqual((self.target / "two").read_text(), "now")

    def test_links_in_the_target_are_replaced(self):
        (self.place / "outside").mkdir()
        (self.place / "outside/file").write_text("own")
        self.target.mkdir()
        (self.target / "x").symlink_to("../outside")
        (self.target / "y").symlink_to("../outside/file")
        (self.target / "z").symlink_to("nowhere")
        put(self.came(("top/x/file", b"evil"), ("top/y", b"evil"), ("top/z/a", b"")), self.target)
        self.assertEqual((self.place / "outside/file").read_text(), "own")
        self.assertEqual(self.tree(self.target), {"x/file": "evil", "y": "evil", "z/a": ""})
        other = self.place / "other"
        other.symlink_to("outside")
        unpack(archive(("top", None), ("top/file", b"evil")), self.place / "more")
        put(self.place / "more", other)
        self.assertEqual((self.place / "outside/file").read_text(), "own")
        self.assertFalse(other.is_symlink())


class Variables(unittest.TestCase):
    def lines(self, envs):
        with env_file(envs) as given:
            files = [one.partition("=")[2] for one in given if one.startswith("--env-file=")]
            return [pathlib.Path(one).read_text() for one in files], given[len(files) :]

    def test_a_file_has_one_line_of_each(self):
        told = self.lines({"A": "1", "B b": "x=y", "C": "two\nlines", "#D": "", "E": "\u00e9"})
        self.assertEqual(told, (["A=1\nB b=x=y\nE=\u00e9\n"], ["--env=C=two\nlines", "--env=#D="]))

    def test_what_is_no_name_is_refused(self):
        for key in ["", "A\nB", "HOST_SECRET\nX", "A\rB", "A=B", "A\0", "\x85A", "A\u2028B", "\x1b"]:
            with self.subTest(key=key), self.assertRaisesRegex(InvalidArgumentException, "name of"):
                self.lines({"GOOD": "1", key: "1"})
        with self.assertRaisesRegex(InvalidArgumentException, "zero byte"):
            self.lines({"A": "\0"})

    def test_what_an_image_names_wrongly_is_left_out(self):
        envs = ["PATH=/bin:/x=y", "HOST_SECRET\nX=1", "HOST_SECRET", "=1", "A\0=1", "B=\0", "C=a\nb"]

        async def told(*_):
            return json.dumps([{"config": {"Env": envs}}])

        with mock.patch.object(_cell, "command", told):
            found = asyncio.run(_cell._image_envs("evil"))
        self.assertEqual(found, {"PATH": "/bin:/x=y", "C": "a\nb"})


class Hosts(unittest.TestCase):
    def test_this_host_and_what_only_it_may_ask_are_known(self):
        for entry, word in [
            ("host.docker.internal", "loopback"),
            ("HOST.docker.Internal.", "loopback"),
            ("127.0.0.1", "loopback"),
            ("127.1.0.0/16", "loopback"),
            ("0.0.0.0", "loopback"),
            ("::1", "loopback"),
            ("::", "loopback"),
            ("::ffff:127.0.0.1", "stands for"),
            ("64:ff9b::7f00:1", "stands for"),
            ("169.254.169.254", "metadata"),
            ("fd00:ec2::254", "metadata"),
            ("168.63.129.16", "metadata"),
            ("169.254.0.0/16", "link"),
            ("fe80::1", "link"),
        ]:
            with self.subTest(entry=entry):
                self.assertIn(word, opens_host(entry) or "")

    def test_its_own_addresses_are_known(self):
        with mock.patch("exocell._hosts.socket.socket") as made:
            made.return_value.__exit__.return_value = False
            self.assertIn("of this host", opens_host("192.31.196.1") or "")
            made.return_value.__enter__.return_value.bind.assert_called_with(("192.31.196.1", 0))

    def test_others_are_not(self):
        for entry in [
            *("pypi.org", "*.example.org", "*.docker.internal", "192.0.2.1", "2001:db8::1"),
            # A rule for a wide range leaves what is special out.
            *("0.0.0.0/0", "::/0", "10.0.0.0/8", "126.0.0.0/7"),
        ]:
            with self.subTest(entry=entry):
                self.assertIsNone(opens_host(entry))


if __name__ == "__main__":
    unittest.main()
