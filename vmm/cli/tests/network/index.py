"""A Python package index of one package at the address of the first argument,
for whoever knows the password `the real one`; over TLS where the second argument
is a file with certificate and key. Says `ready` once it serves."""

import base64
import hashlib
import http.server
import io
import ssl
import sys
import zipfile

WHEEL = "/hello-1.0-py3-none-any.whl"
PASS = base64.b64encode(b"user:the real one").decode()


def wheel():
    files = {
        "hello.py": "print('hello from the index')\n",
        "hello-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: hello\nVersion: 1.0\n",
        "hello-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "hello-1.0.dist-info/RECORD": "",
    }
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return packed.getvalue()


PACKED = wheel()
DIGEST = hashlib.sha256(PACKED).hexdigest()
PAGES = {
    "/simple/hello/": f'<a href="{WHEEL}#sha256={DIGEST}">hello</a>'.encode(),
    WHEEL: PACKED,
}


class Index(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        page = PAGES.get(self.path)
        status = 200 if page else 404
        if self.headers["Authorization"] != f"Basic {PASS}":
            status, page = 401, None
        page = page or b""
        self.send_response(status)
        self.send_header("Content-Type", "text/html" if "simple" in self.path else "application/zip")
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    def log_message(self, *_):
        pass


host, port = sys.argv[1].split(":")
server = http.server.ThreadingHTTPServer((host, int(port)), Index)
if len(sys.argv) > 2:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(sys.argv[2])
    server.socket = context.wrap_socket(server.socket, server_side=True)
print("ready", flush=True)
server.serve_forever()
