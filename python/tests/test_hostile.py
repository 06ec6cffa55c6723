"""What answers need not be a server that means well."""

import os
import socket
import tempfile
import threading
import unittest

from exocell import Sandbox, SandboxException


class Liar:
    """Answers every connection with the same bytes, and hangs up."""

    def __init__(self, answer):
        self.folder = tempfile.TemporaryDirectory()
        self.path = os.path.join(self.folder.name, "s")
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(self.path)
        self.listener.listen()
        self.answer = answer
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self):
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            with client:
                try:
                    client.recv(1 << 16)
                    for part in self.answer:
                        client.sendall(part)
                except OSError:
                    pass

    def __enter__(self):
        return f"unix://{self.path}"

    def __exit__(self, *_):
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.folder.cleanup()


def endless(part):
    while True:
        yield part


OK = b"HTTP/1.1 200 OK\r\n"


class Hostile(unittest.TestCase):
    def test_answers_that_are_none_are_refused(self):
        for answer, word in [
            ([], "broke"),
            ([b"220 mail\r\n"], "no HTTP"),
            ([b"HTTP/1.1 two hundred\r\n\r\n"], "no HTTP"),
            (endless(b"x" * 4096), "without end"),
            (iter([OK, *[b"a: b\r\n" * 2]]), "broke"),
            ((part for part in [OK, *(b"h%d: x\r\n" % n for n in range(1000))]), "headers"),
            ([OK, b"content-length: 10\r\n\r\n[]"], "broke"),
            ([OK, b"content-length: -1\r\n\r\n[]"], "length"),
            ([OK, b"transfer-encoding: chunked\r\n\r\nzz\r\n"], "length"),
            ([OK, b"transfer-encoding: chunked\r\n\r\n5\r\n[]"], "broke"),
            ([OK, b"content-length: 3\r\n\r\n[1,"], "cannot be read"),
            ([OK, b"\r\n", b'[{"Id": 1}]'], "cannot be read"),
            ([b"HTTP/1.1 500 No\r\ncontent-length: 2\r\n\r\n{}"], "{}"),
            ([b"HTTP/1.1 500 No\r\ncontent-length: 0\r\n\r\n"], "status 500"),
        ]:
            with self.subTest(word=word), Liar(answer) as host:
                with self.assertRaisesRegex(SandboxException, word):
                    Sandbox.list(host=host)

    def test_a_body_without_end_is_cut(self):
        def answer():
            yield OK + b"\r\n"
            yield from endless(b"x" * (1 << 20))

        with Liar(answer()) as host:
            with self.assertRaisesRegex(SandboxException, "more than"):
                Sandbox.list(host=host)
