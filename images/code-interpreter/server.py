"""Runs code for E2B's code interpreter: Jupyter's kernels behind HTTP, at port 49999.

    POST   /execute                code, context_id or language, env_vars: lines of JSON
    GET    /contexts               what there is
    POST   /contexts               one more: language, cwd
    DELETE /contexts/ID            ends one
    POST   /contexts/ID/restart    begins it anew
    GET    /health

A context is a kernel of its own. One piece of code runs in it at a time. Who hangs up interrupts
what he has begun. Read `Context.execute` first.
"""

import json
import os
import queue
import select
import socket
import threading
import time
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from jupyter_client import KernelManager

PORT = 49999
# Contexts at once, and bytes of one request.
CONTEXTS_MAX = 64
BODY_BYTES_MAX = 16 << 20
# How long a kernel may take to start, in seconds, and how often a client is looked for.
START_MAX = 60
LOOK = 0.2
HOME = os.environ.get("HOME", "/")
# What is put before a piece of code so that Python's kernel runs another language.
MAGICS = {"python": "", "bash": "%%bash\n"}
# What a result is called in Jupyter, and in the protocol.
KINDS = {
    "text/plain": "text",
    "text/html": "html",
    "text/markdown": "markdown",
    "image/svg+xml": "svg",
    "image/png": "png",
    "image/jpeg": "jpeg",
    "application/pdf": "pdf",
    "text/latex": "latex",
    "application/json": "json",
    "application/javascript": "javascript",
    "e2b/data": "data",
    "e2b/chart": "chart",
}


class Refused(Exception):
    def __init__(self, status, words):
        super().__init__(words)
        self.status = status


class Context:
    """A kernel, and what is said to it."""

    def __init__(self, language, cwd):
        if language not in MAGICS:
            raise Refused(400, f"the language {language!r} is not there: say {', '.join(MAGICS)}")
        if not os.path.isdir(cwd):
            raise Refused(400, f"the directory {cwd!r} is not there")
        self.id, self.language, self.cwd = str(uuid.uuid4()), language, cwd
        self.turn, self.is_ending = threading.Lock(), False
        self.manager = KernelManager(kernel_name="python3")
        self.start()

    def start(self):
        self.manager.start_kernel(cwd=self.cwd)
        self.client = self.manager.client()
        self.client.start_channels()
        try:
            self.client.wait_for_ready(timeout=START_MAX)
        except RuntimeError as error:
            self.client.stop_channels()
            self.manager.shutdown_kernel(now=True)
            raise Refused(500, f"a kernel did not start: {error}") from error

    def end(self):
        """Ends the kernel; who runs code in it hears of that, and goes."""
        self.is_ending = True
        self.manager.shutdown_kernel(now=True)
        with self.turn:
            self.client.stop_channels()

    def restart(self):
        self.end()
        with self.turn:
            self.manager = KernelManager(kernel_name="python3")
            self.start()
            self.is_ending = False

    def shown(self):
        return {"id": self.id, "language": self.language, "cwd": self.cwd}

    def quietly(self, code):
        """Runs code of the server's own."""
        self.client.execute(code, silent=True, store_history=False, reply=True, timeout=START_MAX)

    def execute(self, code, variables, tell, is_gone):
        """Runs `code`, and tells what it says line by line."""
        with self.turn:
            if self.is_ending:
                raise Refused(404, f"context {self.id} has ended")
            if variables:
                self.quietly(
                    "import os as _os\n_kept = dict(_os.environ)\n"
                    f"_os.environ.update({variables!r})"
                )
            try:
                self.follow(self.client.execute(code), tell, is_gone)
            finally:
                if variables:
                    self.quietly("_os.environ.clear(); _os.environ.update(_kept); del _os, _kept")

    def follow(self, own, tell, is_gone):
        has_interrupted = False
        while True:
            try:
                message = self.client.get_iopub_msg(timeout=LOOK)
            except queue.Empty:
                if not self.manager.is_alive():
                    tell(type="error", name="KernelDied", value="the kernel has ended", traceback="")
                    if not self.is_ending:
                        self.client.stop_channels()
                        self.start()
                    return
                if not has_interrupted and is_gone():
                    self.manager.interrupt_kernel()
                    has_interrupted = True
                continue
            if message["parent_header"].get("msg_id") != own:
                continue
            content, kind = message["content"], message["msg_type"]
            now = time.time_ns()
            if kind == "stream":
                tell(type=content["name"], text=content["text"], timestamp=now)
            elif kind in ("execute_result", "display_data"):
                tell(type="result", is_main_result=kind == "execute_result", **named(content["data"]))
            elif kind == "error":
                tell(
                    type="error", name=content["ename"], value=content["evalue"],
                    traceback="\n".join(content["traceback"]),
                )
            elif kind == "execute_input":
                tell(type="number_of_executions", execution_count=content["execution_count"])
            elif kind == "status" and content["execution_state"] == "idle":
                return


def named(data):
    """A result by the protocol's names; what it has no name for is extra."""
    found, extra = {}, {}
    for kind, value in data.items():
        (found if kind in KINDS else extra)[KINDS.get(kind, kind)] = value
    text = found.get("text")
    if text and text[0] == text[-1] and text[0] in "'\"" and len(text) > 1:
        found["text"] = text[1:-1]
    if extra:
        found["extra"] = extra
    return found


class Contexts:
    """All of them. Of each language the first one is who names no context."""

    def __init__(self):
        self.all, self.usual, self.lock = {}, {}, threading.Lock()

    def add(self, language, cwd):
        with self.lock:
            if len(self.all) >= CONTEXTS_MAX:
                raise Refused(429, f"there are {CONTEXTS_MAX} contexts; remove one")
        context = Context(language, cwd)
        with self.lock:
            self.all[context.id] = context
        return context

    def find(self, name):
        with self.lock:
            if name not in self.all:
                raise Refused(404, f"context {name} was not found")
            return self.all[name]

    def of(self, language):
        with self.lock:
            own = self.usual.get(language)
            if own in self.all:
                return self.all[own]
        context = self.add(language, HOME)
        with self.lock:
            self.usual[language] = context.id
        return context

    def remove(self, name):
        context = self.find(name)
        with self.lock:
            self.all.pop(name, None)
        context.end()


CONTEXTS = Contexts()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def body(self):
        length = int(self.headers.get("Content-Length") or 0)
        if not 0 <= length <= BODY_BYTES_MAX:
            raise Refused(413, f"the body is longer than {BODY_BYTES_MAX} bytes")
        read = json.loads(self.rfile.read(length) or b"{}")
        if not isinstance(read, dict):
            raise Refused(400, "the body is no object")
        return read

    def reply(self, status, value=None):
        text = b"" if value is None else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def answer(self, work):
        try:
            work([part for part in self.path.split("?")[0].split("/") if part])
        except Refused as refusal:
            self.reply(refusal.status, {"message": str(refusal)})
        except (ValueError, KeyError, TypeError) as error:
            self.reply(400, {"message": f"the request cannot be read: {error}"})
        except OSError:
            self.close_connection = True

    def do_GET(self):
        self.answer(self.get)

    def do_POST(self):
        self.answer(self.post)

    def do_DELETE(self):
        self.answer(self.delete)

    def get(self, path):
        if path == ["health"]:
            self.reply(200, "OK")
        elif path == ["contexts"]:
            self.reply(200, [context.shown() for context in list(CONTEXTS.all.values())])
        else:
            raise Refused(404, "not found")

    def post(self, path):
        if path == ["execute"]:
            self.execute(self.body())
        elif path == ["contexts"]:
            wanted = self.body()
            made = CONTEXTS.add(wanted.get("language") or "python", wanted.get("cwd") or HOME)
            self.reply(200, made.shown())
        elif len(path) == 3 and path[0] == "contexts" and path[2] == "restart":
            CONTEXTS.find(path[1]).restart()
            self.reply(200)
        else:
            raise Refused(404, "not found")

    def delete(self, path):
        if len(path) != 2 or path[0] != "contexts":
            raise Refused(404, "not found")
        CONTEXTS.remove(path[1])
        self.reply(204)

    def execute(self, wanted):
        code, variables = wanted["code"], wanted.get("env_vars") or {}
        if not isinstance(code, str) or not isinstance(variables, dict):
            raise Refused(400, "code is a text, and env_vars an object")
        if wanted.get("context_id"):
            context = CONTEXTS.find(wanted["context_id"])
        else:
            language = wanted.get("language") or "python"
            if language not in MAGICS:
                raise Refused(400, f"the language {language!r} is not there: say {', '.join(MAGICS)}")
            context = CONTEXTS.of(language)
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        broken = []

        def tell(**said):
            line = json.dumps(said).encode() + b"\n"
            try:
                self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
            except OSError as error:
                broken.append(error)

        def is_gone():
            if broken:
                return True
            ready, _, _ = select.select([self.connection], [], [], 0)
            return bool(ready) and not self.connection.recv(1, socket.MSG_PEEK)

        strings = {str(name): str(value) for name, value in variables.items()}
        context.execute(MAGICS[context.language] + code, strings, tell, is_gone)
        tell(type="end_of_execution")
        self.wfile.write(b"0\r\n\r\n")


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


if __name__ == "__main__":
    CONTEXTS.of("python")
    Server(("0.0.0.0", PORT), Handler).serve_forever()
