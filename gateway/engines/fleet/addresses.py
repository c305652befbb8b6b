"""Resolves an entry of `engine.replicas`: an address, a name's addresses, or a page's list."""

import asyncio
import json
import re
import socket
import urllib.request
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from outrider.gateway.engines.fleet.demand import Needs
from outrider.verifier.params import TIERS, Tier

DNS: Final = "dns://"
"""In front of NAME:PORT: all addresses of the name."""

LISTS: Final = ("http://", "https://")
"""A page that lists addresses as {"replicas": [...]}, as `outrider fleet` has one."""

_LIST_TIMEOUT_S: Final = 5.0
_MOST_LIST_BYTES: Final = 2**20
_MOST_KINDS: Final = 64
_MOST_ADDRESSES: Final = 1024  # each has connections and a lane of the index of blocks
_ADDRESS: Final = re.compile(r"tcp://[\w.:\[\]-]{1,255}:\d{1,5}", re.ASCII)


@dataclass(frozen=True, slots=True)
class FoundReplicas:
    """What an entry means now. `startable`: the tiers of engines that start when asked for."""

    addresses: frozenset[str]
    startable: frozenset[Needs] = frozenset()


WantedTiers = Sequence[Sequence[Tier]]
"""The tiers of each engine that requests wait for."""

Resolve = Callable[[str, WantedTiers], Awaitable[FoundReplicas]]
"""Looks an entry up, and tells it what is wanted. Raises OSError where it cannot be looked up."""


def is_looked_up(entry: str) -> bool:
    """True for an entry that means any number of addresses, now these and later those."""
    return entry.startswith((DNS, *LISTS))


async def resolve(entry: str, wanted: WantedTiers = ()) -> FoundReplicas:
    """Look a name up, or read a page, as `Resolve` says; more than 1,024 addresses are an error."""
    if entry.startswith(LISTS):
        found = await asyncio.to_thread(_read_page, entry, wanted)
    else:
        found = await _look_up(entry)
    if len(found.addresses) > _MOST_ADDRESSES:
        raise OSError(f"{len(found.addresses)} addresses; at most {_MOST_ADDRESSES} are taken")
    return found


async def _look_up(entry: str) -> FoundReplicas:
    host, _, port = entry.removeprefix(DNS).rpartition(":")
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return FoundReplicas(
        frozenset(
            f"tcp://[{address[0]}]:{port}"
            if family == socket.AF_INET6
            else f"tcp://{address[0]}:{port}"
            for family, _, _, _, address in found
        )
    )


def _read_page(url: str, wanted: WantedTiers) -> FoundReplicas:
    """Read a list of addresses. Raises OSError where it is not one.

    What is wanted is posted; the answer is the same list.
    """
    request = urllib.request.Request(url)
    if wanted:
        request.data = json.dumps({"wanted": wanted}).encode()
        request.add_header("content-type", "application/json")
    with urllib.request.urlopen(request, timeout=_LIST_TIMEOUT_S) as response:
        body = response.read(_MOST_LIST_BYTES + 1)
    try:
        return _parsed(json.loads(body[:_MOST_LIST_BYTES]))
    except (ValueError, KeyError, TypeError, RecursionError):
        raise OSError("it is no list of addresses") from None


def _parsed(page: dict[str, Any]) -> FoundReplicas:
    """Return what a page lists. Raises ValueError, KeyError or TypeError where it is none."""
    addresses, startable = page["replicas"], page.get("startable", [])
    tiers = {tier for kind in startable for tier in kind}
    if not all(map(_ADDRESS.fullmatch, addresses)) or len(startable) > _MOST_KINDS:
        raise ValueError("not an address")
    if not tiers <= set(TIERS):
        raise ValueError("not a tier")
    return FoundReplicas(frozenset(addresses), frozenset(map(frozenset, startable)))
