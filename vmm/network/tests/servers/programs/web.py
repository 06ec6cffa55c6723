"""Python's http.server at the socket of the first argument. It reads no bodies, as handlers
do that people write in a hurry."""

import http.server
import socket
import socketserver
import sys


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __getattr__(self, name):
        if name.startswith("do_") and name.isidentifier():
            return self.answer
        raise AttributeError(name)

    def answer(self):
        body = f"[[{self.headers.get('Host')}]]\n".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def address_string(self):
        return "?"

    def log_message(self, *_):
        pass


class Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    address_family = socket.AF_UNIX
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, *_):
        pass


Server(sys.argv[1], Handler).serve_forever()
