"""A gateway that ends by SIGKILL at a named moment of the life of one request.

    python -m tests.laws.mortal_gateway

Imports the gateway once. Each line of standard input is JSON with `flags` and `moment`: a new
process is forked,
which serves with these settings. It prints `at URL` when it listens, and this process prints
`ended STATUS` when it has ended (a negative number: by that signal).
"""

import inspect
import json
import os
import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import aiohttp  # noqa: F401 - as the next line
import alembic.command  # noqa: F401 - what each gateway imports while it starts is there already

import outrider.gateway.upstream.transport
import outrider.gateway.wiring.routing
import outrider.gateway.wiring.tenancy  # noqa: F401 - as above
from outrider.gateway.http.server.listening import listen, url_of
from outrider.gateway.settings.tree import load_settings
from outrider.gateway.tenancy.ledger.journal import Journal
from outrider.gateway.tenancy.ledger.row import LedgerRow
from outrider.gateway.tenancy.ledger.storing import RowStore
from outrider.gateway.tenancy.ledger.writer import JournaledLedger
from outrider.gateway.tenancy.metering.meter import RequestMeter
from outrider.gateway.tenancy.metering.reserved_usage import ReservedUsage
from outrider.gateway.wiring.serving import GatewayRun
from outrider.gateway.wiring.start import keep_torch_out, start_engine
from outrider.gateway.wiring.until_signalled import serve_until_signalled

VICTIM: Final = "victim"
"""The x-request-id of the request that the moments are moments of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A call, and the side of it on which the process ends, if `is_victims` says so."""

    owner: type
    method: str
    is_before: bool
    is_victims: Callable[..., bool]


def _of_meter(meter: RequestMeter, *_: object) -> bool:
    return meter.client_request_id == VICTIM


def _of_rows(_: object, rows: Iterable[LedgerRow], **__: object) -> bool:
    return any(row.client_request_id == VICTIM for row in rows)


def _of_row(_: object, row: LedgerRow) -> bool:
    return row.client_request_id == VICTIM


def _always(*_: object) -> bool:
    return True


def _moment(
    owner: type, method: str, is_victims: Callable[..., bool], *, is_before: bool = False
) -> Moment:
    return Moment(owner=owner, method=method, is_before=is_before, is_victims=is_victims)


MOMENTS: Final[Mapping[str, Moment]] = {
    "counted": _moment(RequestMeter, "enter", _of_meter),
    "admitted": _moment(RequestMeter, "admit", _of_meter),
    "settling": _moment(ReservedUsage, "charge", _of_rows, is_before=True),
    "settled": _moment(ReservedUsage, "charge", _of_rows),
    "remembered": _moment(JournaledLedger, "add", _of_row),
    "journaled": _moment(Journal, "append", _of_rows),
    "stored": _moment(RowStore, "store", _of_rows),
    "closing": _moment(JournaledLedger, "close", _always, is_before=True),
}


def die_at(moment: Moment) -> None:
    """Have this process end at the moment, from now on."""
    called = getattr(moment.owner, moment.method)

    def end_if(is_before: bool, *args: Any, **named: Any) -> None:
        if is_before == moment.is_before and moment.is_victims(*args, **named):
            os.kill(os.getpid(), signal.SIGKILL)

    def mortal(*args: Any, **named: Any) -> Any:
        end_if(True, *args, **named)
        result = called(*args, **named)
        end_if(False, *args, **named)
        return result

    async def mortal_async(*args: Any, **named: Any) -> Any:
        end_if(True, *args, **named)
        result = await called(*args, **named)
        end_if(False, *args, **named)
        return result

    is_async = inspect.iscoroutinefunction(called)
    setattr(moment.owner, moment.method, mortal_async if is_async else mortal)


def serve(flags: Mapping[str, Any], moment: str | None) -> None:
    """Serve until a signal or the moment comes."""
    settings = load_settings(flags=flags, environ={}, config_file=None)
    keep_torch_out()
    if moment is not None:
        die_at(MOMENTS[moment])
    listener = listen("127.0.0.1", 0)
    print(f"at {url_of(listener)}", flush=True)  # noqa: T201 - the answer to a line of input
    serve_until_signalled(GatewayRun(settings, listener, engine_process=start_engine(settings)))


def main() -> None:
    """Start one gateway for each line of input, one after the other."""
    for line in sys.stdin:
        start = json.loads(line)
        child = os.fork()
        if child == 0:
            os.close(0)
            serve(start["flags"], start["moment"])
            os._exit(0)
        print(f"is {child}", flush=True)  # noqa: T201 - as above
        _, status = os.waitpid(child, 0)
        print(f"ended {os.waitstatus_to_exitcode(status)}", flush=True)  # noqa: T201 - as above


if __name__ == "__main__":
    main()
