"""A server of h11's at the socket of the first argument."""

import socketserver
import sys

import h11


class Handler(socketserver.BaseRequestHandler):
    def handle(self):
        connection = h11.Connection(h11.SERVER)
        try:
            while self.serve(connection):
                connection.start_next_cycle()
        except (h11.ProtocolError, OSError):
            pass

    def next(self, connection):
        while True:
            event = connection.next_event()
            if event is not h11.NEED_DATA:
                return event
            connection.receive_data(self.request.recv(65536))

    def serve(self, connection):
        request = self.next(connection)
        if not isinstance(request, h11.Request):
            return False
        while not isinstance(self.next(connection), h11.EndOfMessage):
            pass
        host = dict(request.headers).get(b"host", b"none")
        body = b"[[" + host + b"]]\n"
        head = h11.Response(status_code=200, headers=[("Content-Length", str(len(body)))])
        for event in (head, h11.Data(data=body), h11.EndOfMessage()):
            self.request.sendall(connection.send(event))
        return connection.our_state is h11.DONE and connection.their_state is h11.DONE


class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    request_queue_size = 64


Server(sys.argv[1], Handler).serve_forever()
