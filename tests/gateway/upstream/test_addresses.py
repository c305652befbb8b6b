"""No way to write a private address gets past the check."""

import socket
from typing import Any

import pytest
from aiohttp import AddrInfoType
from hypothesis import given
from hypothesis import strategies as st

from outrider.gateway.upstream.addresses import (
    PrivateAddressError,
    check_url,
    is_private,
    socket_maker,
)

PRIVATE = [
    "127.0.0.1",
    "127.255.255.254",
    "10.1.2.3",
    "172.16.0.1",
    "192.168.1.1",
    "169.254.169.254",  # where clouds keep the keys of a machine
    "100.64.0.1",  # shared among the customers of a provider
    "0.0.0.0",
    "192.0.2.1",
    "224.0.0.1",
    "239.255.255.250",
    "255.255.255.255",
    "::",
    "::1",
    "fe80::1",
    "fe80::1%eth0",
    "fc00::1",
    "fd12:3456::1",
    "fec0::1",
    "ff02::1",
    "ff0e::1",
    "::ffff:127.0.0.1",
    "::ffff:10.0.0.1",
    "::127.0.0.1",
    "64:ff9b::7f00:1",
    "64:ff9b:1::1",
    "2002:7f00:1::",
    "2001:0:4136:e378:8000:63bf:3fff:fdd2",
]
PUBLIC = [
    "8.8.8.8",
    "1.1.1.1",
    "172.32.0.1",
    "2606:4700:4700::1111",
    "::ffff:8.8.8.8",
    "64:ff9b::808:808",
    "2002:808:808::",
]


@pytest.mark.parametrize("address", PRIVATE)
def test_private(address: str) -> None:
    assert is_private(address)


@pytest.mark.parametrize("address", PUBLIC)
def test_public(address: str) -> None:
    assert not is_private(address)


@given(st.ip_addresses(v=4))
def test_an_address_in_another_dress_is_judged_alike(address: Any) -> None:
    for prefix in ("::ffff:", "64:ff9b::"):
        assert is_private(f"{prefix}{address}") == is_private(address)


def test_a_name_is_no_address() -> None:
    with pytest.raises(ValueError, match="localhost"):
        is_private("localhost")


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "localhost",
        "LOCALHOST.",
        "api.localhost",
        "127.1",
        "0x7f000001",
        "2130706433",
        "0177.0.0.1",
        "192.168.0.1:8000",
        "[::1]:8000",
        "[::ffff:127.0.0.1]",
        "169.254.169.254",
    ],
)
def test_a_private_url_is_refused(host: str) -> None:
    url = f"http://{host}/v1"
    with pytest.raises(ValueError, match="allow_private_upstreams is false") as refused:
        check_url(url, allow_private=False)
    assert url in str(refused.value)
    check_url(url, allow_private=True)


@pytest.mark.parametrize("host", ["api.example.com", "8.8.8.8", "[2606:4700::1111]:443", "cloud"])
def test_other_urls_are_taken(host: str) -> None:
    check_url(f"https://{host}/v1", allow_private=False)


def info(address: str, family: int = socket.AF_INET) -> AddrInfoType:
    return (family, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (address, 80))


@pytest.mark.parametrize("address", ["127.0.0.1", "10.0.0.1", "not an address"])
def test_no_socket_for_a_private_address(address: str) -> None:
    with pytest.raises(PrivateAddressError, match="private"):
        socket_maker(allow_private=False)(info(address))


@pytest.mark.parametrize(("address", "allow"), [("127.0.0.1", True), ("8.8.8.8", False)])
def test_a_socket_that_notices_when_the_other_side_is_gone(address: str, allow: bool) -> None:
    with socket_maker(allow_private=allow)(info(address)) as made:
        assert made.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
