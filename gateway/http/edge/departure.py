"""Telling a request's work that its client has left."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

EXTENSION: Final = "outrider.departure"
"""The name in the ASGI scope's extensions under which a connection offers its `Departure`."""

OnLeft = Callable[[], None]


class Departure:
    """The departure of one request's client; calls back from the event loop when it happens.

    ASGI tells it by `receive` alone, on which a task has to wait: that costs each request some
    hundredths of a millisecond.
    """

    __slots__ = ("_has_happened", "_on_left", "_read_on")

    def __init__(self, read_on: Callable[[], None]) -> None:
        """`read_on`: has the connection read, which notices the end only then."""
        self._read_on = read_on
        self._has_happened = False
        self._on_left: OnLeft | None = None

    def notify(self, on_left: OnLeft) -> Callable[[], object]:
        """Have `on_left` called once; return the function that cancels it."""
        self._read_on()
        if self._has_happened:
            return asyncio.get_running_loop().call_soon(on_left).cancel
        self._on_left = on_left
        return self._forget

    def happen(self) -> None:
        """Tell that the client has left."""
        self._has_happened = True
        if (on_left := self._on_left) is not None:
            self._on_left = None
            on_left()

    def _forget(self) -> None:
        self._on_left = None


def on_departure(scope: Scope, receive: Receive, on_left: OnLeft) -> Callable[[], object]:
    """Call `on_left` once when the client leaves; return the function that cancels it.

    The request's body must be read already. Without our own connection below, a task waits.
    """
    offered: Departure | None = scope.get("extensions", {}).get(EXTENSION)
    if offered is not None:
        return offered.notify(on_left)
    return asyncio.create_task(_wait(receive, on_left)).cancel


async def _wait(receive: Receive, on_left: OnLeft) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    on_left()


async def until_departure(scope: Scope, receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work`; cancel it as soon as the client leaves. The request's body must be read already.

    Raises ClientDisconnect when the client left first. `work` runs in this task: a task of its own,
    and waiting for it, would cost each request some hundredths of a millisecond.
    """
    worker = asyncio.current_task()
    assert worker is not None, "it is awaited in a task"
    num_cancels = worker.cancelling()
    has_left = False

    def leave() -> None:
        nonlocal has_left
        has_left = True
        worker.cancel()

    stop_waiting = on_departure(scope, receive, leave)
    try:
        await work
    except (Exception, asyncio.CancelledError):
        if not has_left:
            raise
    finally:
        stop_waiting()
    if has_left:
        if worker.uncancel() > num_cancels:
            raise asyncio.CancelledError  # the request was cancelled as well
        raise ClientDisconnect
