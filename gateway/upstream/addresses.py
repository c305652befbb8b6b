"""Addresses that an upstream server may have, and sockets that enforce them."""

import errno
import ipaddress
import os
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from aiohttp import AddrInfoType

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

# Addresses of IPv4 hosts, written in IPv6 for a translator on the way (RFC 6052), or as it was
# done before (RFC 4291, 2.5.5.1).
_CARRIES_IPV4: Final = (ipaddress.IPv6Network("64:ff9b::/96"), ipaddress.IPv6Network("::/96"))
# Local by their RFCs (3879, 8215), which not every version of `ipaddress` lists.
_LOCAL: Final = (ipaddress.IPv6Network("fec0::/10"), ipaddress.IPv6Network("64:ff9b:1::/48"))
# Some routers drop a connection that is idle for a minute while the server thinks; these keep it
# alive, and detect when the other side is gone.
_KEEP_ALIVE_S: Final = 30


class PrivateAddressError(OSError):
    """A server's address is not one of the public internet."""

    def __init__(self) -> None:
        # The same message for every address: the connector merges the errors of all of them.
        super().__init__(errno.EACCES, "the address is private")


def is_private(address: str | IPAddress) -> bool:
    """Return whether an address is of this machine, of a local network, or not a public host.

    IPv4 addresses inside IPv6 ones (mapped, 6to4, Teredo, NAT64) are checked too. Raises ValueError
    for a text that is no IP address.
    """
    ip = ipaddress.ip_address(address) if isinstance(address, str) else address
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None:
            return is_private(ip.ipv4_mapped)
        inner = _embedded(ip)
        if (inner is not None and is_private(inner)) or any(ip in network for network in _LOCAL):
            return True
    return not ip.is_global or ip.is_multicast


def _embedded(ip: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    if ip.sixtofour is not None:
        return ip.sixtofour
    if ip.teredo is not None:
        return ip.teredo[1]
    if any(ip in network for network in _CARRIES_IPV4):
        return ipaddress.IPv4Address(int(ip) & 0xFFFF_FFFF)
    return None


def check_url(url: str, *, allow_private: bool) -> None:
    """Refuse a URL whose host is a private address as it is written.

    Raises ValueError. Names are not looked up here: their addresses are checked with each
    connection, as they may change.
    """
    if allow_private:
        return
    host = (urlsplit(url).hostname or "").rstrip(".")
    is_local_name = host == "localhost" or host.endswith(".localhost")
    ip = None if is_local_name else _literal(host)
    if is_local_name or (ip is not None and is_private(ip)):
        raise ValueError(
            f"{url!r} is an address of this machine or of a private network, and"
            " allow_private_upstreams is false; name a public host, or set it to true"
        )


def _literal(host: str) -> IPAddress | None:
    """Return the address that a host is, also in the old forms: 127.1, 0x7f000001."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        pass
    try:
        return ipaddress.IPv4Address(socket.inet_aton(host))
    except OSError:
        return None


def socket_maker(*, allow_private: bool) -> "Callable[[AddrInfoType], socket.socket]":
    """Return the function that makes a connector's sockets.

    It sees the address that is about to be connected to. So neither a name that changes its address
    nor an unusual spelling of one passes. It raises PrivateAddressError.
    """

    def make(info: "AddrInfoType") -> socket.socket:
        family, kind, protocol, _, address = info
        if not allow_private and _is_private_peer(address):
            raise PrivateAddressError
        made = socket.socket(family, kind, protocol)
        _keep_alive(made)
        return made

    return make


def _is_private_peer(address: tuple[Any, ...]) -> bool:
    try:
        return is_private(str(address[0]))
    except ValueError:  # not an address at all, so not trusted
        return True


def _keep_alive(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # Linux and macOS name the same thing differently.
    option = getattr(socket, "TCP_KEEPIDLE", None) or getattr(socket, "TCP_KEEPALIVE", None)
    if option is not None and os.name == "posix":
        sock.setsockopt(socket.IPPROTO_TCP, option, _KEEP_ALIVE_S)
