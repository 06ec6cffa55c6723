"""The same for asyncio; what differs is tried here."""

import asyncio
import inspect
import os
import pathlib
import tempfile
import time
import unittest

import exocell
from exocell import AsyncSandbox, CommandExitException, NotFoundException, TimeoutException
from exocell._streams import _LoopStream

IMAGE = os.environ["EXOCELL_IMAGE"]


class Async(unittest.IsolatedAsyncioTestCase):
    async def test_sandboxes_work_side_by_side(self):
        async def one(number):
            async with await AsyncSandbox.create(IMAGE, envs={"N": str(number)}) as sandbox:
                await sandbox.files.write("/tmp/n", f"file {number}")
                ran = await sandbox.commands.run("cat /tmp/n; echo; echo $N")
                return ran.stdout

        told = await asyncio.gather(*(one(number) for number in range(3)))
        self.assertEqual(told, [f"file {number}\n{number}\n" for number in range(3)])

    async def test_commands_files_and_life(self):
        async with await AsyncSandbox.create(IMAGE, metadata={"a": "b"}) as sandbox:
            told = []

            async def hear(text):
                await asyncio.sleep(0)
                told.append(text)

            result = await sandbox.commands.run("seq 5", on_stdout=hear)
            self.assertEqual("".join(told), result.stdout)
            handle = await sandbox.commands.run("cat", True, stdin=True)
            await handle.send_stdin(b"in")
            await handle.close_stdin()
            self.assertEqual([piece.stdout async for piece in handle], ["in"])
            with self.assertRaises(CommandExitException):
                await sandbox.commands.run("exit 9")
            with self.assertRaises(TimeoutException):
                await sandbox.commands.run("sleep 1000", timeout=0.5)
            waiting = asyncio.create_task(sandbox.commands.run("sleep 1000", timeout=None))
            while not await sandbox.commands.list():
                await asyncio.sleep(0.01)
            waiting.cancel()
            with self.assertRaises(asyncio.CancelledError):
                await waiting
            with tempfile.TemporaryDirectory() as host:
                await sandbox.files.upload(__file__, "/copy.py")
                await sandbox.files.download("/copy.py", pathlib.Path(host, "back"))
                self.assertEqual(
                    pathlib.Path(host, "back").read_bytes(), pathlib.Path(__file__).read_bytes()
                )
            self.assertEqual([i.metadata for i in await AsyncSandbox.list({"a": "b"})], [{"a": "b"}])
            await sandbox.pause()
            same = await AsyncSandbox.connect(sandbox.sandbox_id)
            self.assertTrue(await same.is_running())
        with self.assertRaises(NotFoundException):
            await sandbox.get_info()


class Cancelled(unittest.IsolatedAsyncioTestCase):
    async def test_a_read_that_ends_at_that_moment_is_cancelled_all_the_same(self):
        reader = asyncio.StreamReader()
        reading = asyncio.create_task(_LoopStream(reader, None, time.monotonic() + 60).read())
        for _ in range(3):
            await asyncio.sleep(0)
        reader.feed_data(b"came")
        reading.cancel()
        with self.assertRaises(asyncio.CancelledError):
            await reading


class Same(unittest.TestCase):
    def test_both_kinds_of_sandboxes_have_the_same_calls(self):
        for name in ("Sandbox", "Commands", "Files", "CommandHandle"):
            blocking, looping = getattr(exocell, name), getattr(exocell, f"Async{name}")
            ours, theirs = self.calls(blocking), self.calls(looping)
            self.assertEqual(ours, theirs, name)

    def calls(self, kind):
        names = [name for name in dir(kind) if not name.startswith("_")]
        functions = {name: getattr(kind, name) for name in names}
        return {
            name: (self.parameters(function), self.words(function))
            for name, function in functions.items()
            if callable(function) or isinstance(function, property)
        }

    def parameters(self, function):
        """Names, kinds, defaults and types."""
        if isinstance(function, property):
            return str(function.fget.__annotations__)
        told = inspect.signature(function)
        kept = [p for p in told.parameters.values() if p.name != "_streams"]
        return [*map(str, kept), str(told.return_annotation).replace("Async", "")]

    def words(self, function):
        return (inspect.getdoc(function) or "").replace("Async", "")
