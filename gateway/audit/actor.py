"""Who makes a change: set where a request or a command begins, read where the change is made."""

import getpass
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

GATEWAY: Final = "gateway"
"""Stands for changes that a gateway makes of its own accord."""

_CURRENT: Final[ContextVar[str]] = ContextVar("outrider_actor", default=GATEWAY)


@contextmanager
def acting(actor: str) -> Iterator[None]:
    """Have changes within, also in threads of `asyncio.to_thread`, be those of this actor."""
    token = _CURRENT.set(actor)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def current_actor() -> str:
    """Return who acts now."""
    return _CURRENT.get()


def system_user() -> str:
    """Return the operating system's user as an actor: `user/NAME@HOST`."""
    try:
        name = getpass.getuser()
    except (OSError, KeyError):  # a container's user may have no name
        name = str(os.getuid()) if hasattr(os, "getuid") else "unknown"
    return f"user/{name}@{socket.gethostname()}"
