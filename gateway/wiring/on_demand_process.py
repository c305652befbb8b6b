"""The process of a model on demand, which the gateway starts by this module's name.

Standard input carries one line with settings and key, and then stays open for as long as the
gateway wants the model: at its end the process ends, and the engine's process with it. Standard
output carries one report (`Report`) in the other direction.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import msgspec
import uvloop
from pydantic import SecretStr

from outrider.gateway.http.server.listening import listen, url_of
from outrider.gateway.settings.keys import KeySettings
from outrider.gateway.settings.tree import Settings
from outrider.gateway.telemetry.logs import configure_logging
from outrider.gateway.upstream.on_demand.process import Report
from outrider.gateway.wiring.start import keep_torch_out, start_engine

_END_S: Final = 8.0
"""Time to end in good order; what the engine's process is told then ends it too."""


def main() -> int:
    """Serve until the gateway ends us, or dies. Returns the exit status."""
    # A Ctrl-C in the terminal reaches the whole group; the gateway decides when we end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    report = _take_standard_output()
    line = sys.stdin.buffer.readline()
    if not line:
        return 0
    told = json.loads(line)
    settings = Settings.model_validate_json(told["settings"])
    configure_logging(settings.log_level, settings.telemetry.log_format, process="model")
    try:
        _serve(_with_key(settings, told["key"]), report)
    except Exception as error:  # noqa: BLE001 - reported to the gateway
        report(Report(failure=str(error) or type(error).__name__))
        return 1
    return 0


def _serve(settings: Settings, report: Callable[[Report], None]) -> None:
    """Load the model, report its address, and serve it."""
    stops: list[Callable[[], object]] = []
    threading.Thread(target=_follow_gateway, args=(stops,), daemon=True).start()
    keep_torch_out()
    with (
        listen("127.0.0.1", 0) as listener,
        start_engine(settings) or contextlib.nullcontext() as engine_process,
    ):
        from outrider.gateway.wiring.serving import GatewayRun  # while the engine loads

        url = f"{url_of(listener)}/v1"
        run = GatewayRun(
            settings,
            listener,
            on_ready=lambda *_: report(Report(url=url)),
            engine_process=engine_process,
        )
        loop = uvloop.new_event_loop()
        stops.append(partial(loop.call_soon_threadsafe, run.stop))
        with (
            asyncio.Runner(loop_factory=lambda: loop) as runner,
            contextlib.suppress(asyncio.CancelledError),  # ended while it loaded
        ):
            runner.run(run.run())


def _with_key(settings: Settings, key: str) -> Settings:
    keys = KeySettings(mode="required", api_key=SecretStr(key))
    return settings.model_copy(update={"keys": keys})


def _take_standard_output() -> Callable[[Report], None]:
    """Return what writes reports to the pipe; what is printed goes to standard error."""
    pipe = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def report(message: Report) -> None:
        os.write(pipe, msgspec.json.encode(message) + b"\n")

    return report


def _follow_gateway(stops: Sequence[Callable[[], object]]) -> None:
    """End the process when standard input ends: at once while it loads, else in good order."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    for stop in stops:
        with contextlib.suppress(RuntimeError):  # the loop has just ended by itself
            stop()
        time.sleep(_END_S)
    os._exit(0)


if __name__ == "__main__":
    exit_status = main()
    sys.stderr.flush()
    os._exit(exit_status)
