"""Python's ssl at the socket of the first argument, with certificates of the folder of the
second: the granted one's, if that is asked for, else the other's."""

import socketserver
import ssl
import sys


def context(which):
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.load_cert_chain(f"{sys.argv[2]}/{which}.pem")
    return made


GRANTED, OTHER = context("granted"), context("other")


def choose(connection, name, _):
    if name == "granted.test":
        connection.context = GRANTED


OTHER.sni_callback = choose


class Handler(socketserver.BaseRequestHandler):
    def handle(self):
        try:
            stream = OTHER.wrap_socket(self.request, server_side=True)
            stream.recv(4096)
            stream.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        except (ssl.SSLError, OSError):
            pass


class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    request_queue_size = 64


Server(sys.argv[1], Handler).serve_forever()
