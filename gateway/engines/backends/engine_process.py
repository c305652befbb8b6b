"""The engine's own process, which its client starts by this module's name.

Standard input carries one line, the `WorkerSpec`, and then stays open for as long as the gateway
lives; another byte says that the engine is to stop. A process in reserve, which was given an
importer, imports first and waits for that line. A thread that reads it notices the gateway's end,
whichever way it ends, and ends this process too; unlike PR_SET_PDEATHSIG that works on every
platform and does not depend on which of the gateway's threads started us. Standard output carries
reports in the other direction (`wire.Report`), and the gateway sees it close the moment this
process dies. All else passes over the socket, where any gateway connects (`EngineListener`).
"""

import contextlib
import importlib
import logging
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import cast

import msgspec

from outrider.gateway.engines.backends.connected_gateway import UNBOUNDED
from outrider.gateway.engines.backends.engine_listener import EngineListener
from outrider.gateway.engines.backends.fleet_keys import read_fleet_keys
from outrider.gateway.engines.backends.step_loop import (
    EXIT_REPORTED,
    LoadingCallback,
    StepEngine,
    serve_loaded,
)
from outrider.gateway.engines.backends.wire import (
    LoadFailed,
    Loading,
    Ready,
    Report,
    WorkerSpec,
    encode_report,
    pack_error,
)
from outrider.gateway.telemetry.logs import configure_logging

logger = logging.getLogger(__name__)


def main() -> int:
    """Serve until the gateway that started us ends us, or dies. Returns the exit status."""
    # A Ctrl-C in the terminal and a service manager's SIGTERM reach the whole group, but the
    # gateway wants to drain first: it decides when we stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    report = _take_standard_output()
    if len(sys.argv) > 1:
        _find(sys.argv[1])()
    line = sys.stdin.buffer.readline()
    if not line:  # it waited in reserve, and its gateway has ended
        return 0
    spec = msgspec.json.decode(line, type=WorkerSpec)
    listener = _listen(spec)  # at once: gateways need not try again while models load
    threading.Thread(target=_follow_gateway, args=(spec.scratch_dir, listener), daemon=True).start()
    configure_logging(spec.log_level, spec.log_format, process="engine")
    try:
        return _serve(spec, listener, report)
    finally:
        listener.close()


def _listen(spec: WorkerSpec) -> EngineListener:
    """Take the line's address."""
    keys = None if spec.key_file is None else read_fleet_keys(Path(spec.key_file))
    return EngineListener(spec.endpoint, keys, UNBOUNDED)


def _serve(spec: WorkerSpec, listener: EngineListener, report: Callable[[Report], None]) -> int:
    """Build the engine, then step it. Returns the exit status."""
    try:
        builder = cast(Callable[[str, LoadingCallback], StepEngine], _find(spec.builder))
        engine = builder(spec.arguments, lambda stage, fraction: report(Loading(stage, fraction)))
        listener.open(engine.info(), {})  # its gateways read the same settings
    except Exception as error:
        logger.debug("engine failed to load", exc_info=True)
        report(LoadFailed(pack_error(error)))
        return EXIT_REPORTED
    report(Ready(listener.endpoint))
    return serve_loaded(engine, listener)


def _find(reference: str) -> Callable[..., object]:
    """The function that `module:name` means."""
    module_name, _, name = reference.partition(":")
    return cast(Callable[..., object], getattr(importlib.import_module(module_name), name))


def _take_standard_output() -> Callable[[Report], None]:
    """Return what writes reports to the pipe, in a descriptor that no child inherits.

    What is printed goes to standard error.
    """
    pipe = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def report(message: Report) -> None:
        with contextlib.suppress(BrokenPipeError):  # the gateway has died, and so shall we
            os.write(pipe, encode_report(message))

    return report


def _follow_gateway(scratch_dir: str, listener: EngineListener) -> None:
    """Stop when told to; at the end of standard input the parent is gone: clean up, and end."""
    while os.read(sys.stdin.fileno(), 4096):
        listener.drain(0.0)
    shutil.rmtree(scratch_dir, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    exit_status = main()
    sys.stderr.flush()
    # Taking torch and Triton apart takes time, and their bindings complain about each other.
    os._exit(exit_status)
