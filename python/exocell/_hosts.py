"""Entries of an allow list that lead to this host, or to what only it may ask.

A rule of a cell for a wide range leaves these out, and a name that leads to one is denied;
an entry that names them opens them. The table follows that of the cells' network
(``vmm/network/src/address.rs``).
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket

_Network = ipaddress.IPv4Network | ipaddress.IPv6Network

#: The name by which a cell reaches the host's loopback.
_HOST = "host.docker.internal"
#: IPV6_MTU of Linux (ipv6(7)).
_MTU = 24
#: The length of a packet has 16 bits.
_LINK_BYTES_MAX = 65_535
#: What a rule that lies within opens.
_SPECIAL: list[tuple[str, list[str]]] = [
    (
        "where a cloud answers its machines (metadata)",
        [
            *("169.254.169.254", "169.254.170.2", "169.254.170.23", "100.100.100.200"),
            *("192.0.0.192", "168.63.129.16", "fd00:ec2::/32", "fd20:ce::254"),
            *("fd00:c1::a9fe:a9fe", "fd00:42::42", "fd00:a9fe:a9fe::1", "fd00:100::100:200"),
        ],
    ),
    ("the loopback of this host", ["127.0.0.0/8", "0.0.0.0/8", "::1", "::"]),
    ("addresses of this host's link", ["169.254.0.0/16", "fe80::/10", "fec0::/10"]),
    (
        "an address that stands for one of IPv4",
        ["::/96", "::ffff:0:0/96", "64:ff9b::/96", "64:ff9b:1::/48", "2001::/32", "2002::/16"],
    ),
]
_BLOCKS = [(why, ipaddress.ip_network(block)) for why, blocks in _SPECIAL for block in blocks]


def opens_host(entry: str) -> str | None:
    """What of this host an entry opens, in words; None for any other.

    It is a name, a pattern, an address or a range, as Harbor's allow lists have them.
    """
    name = entry.strip().lower().removesuffix(".")
    if name == _HOST:
        return "the loopback of this host"
    try:
        # With a zone it is an address of a link.
        network = ipaddress.ip_network(name.partition("%")[0].strip("[]"), strict=False)
    except ValueError:
        return None
    for why, block in _BLOCKS:
        if _is_within(network, block):
            return why
    is_one = network.prefixlen == network.max_prefixlen
    return "an address of this host" if is_one and _is_own(network) else None


def _is_within(network: _Network, block: _Network) -> bool:
    if isinstance(network, ipaddress.IPv4Network):
        return isinstance(block, ipaddress.IPv4Network) and network.subnet_of(block)
    return isinstance(block, ipaddress.IPv6Network) and network.subnet_of(block)


def _is_own(network: _Network) -> bool:
    """Whether it is this host's: only its own can be bound.

    There are others in IPv6, to which any router of a network answers (RFC 4291, 2.6.1):
    the way to them is the host's to itself, whose packets are longer than any link's.
    """
    family = socket.AF_INET if network.version == 4 else socket.AF_INET6
    address = str(network.network_address)
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as own:
        own.bind((address, 0))
        return True
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as own:
        own.connect((address, 9))
        return network.version == 6 and own.getsockopt(socket.IPPROTO_IPV6, _MTU) > _LINK_BYTES_MAX
    return False
