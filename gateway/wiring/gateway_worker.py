"""A worker's process: `python -m outrider.gateway.wiring.gateway_worker`, which its parent starts.

Standard input carries its task, and then stays open for as long as the parent lives: a thread that
reads it ends this process with the parent, whichever way that ends.
"""

import asyncio
import os
import signal
import socket
import sys
import threading
from contextlib import suppress

import uvloop

from outrider.engine.errors import EngineError
from outrider.engine.events import EngineInfo
from outrider.gateway.settings.tree import Settings, SettingsError
from outrider.gateway.telemetry.logs import configure_logging
from outrider.gateway.wiring.start import keep_torch_out
from outrider.gateway.workers.connections import Receiver
from outrider.gateway.workers.process import WorkerTask, read_task
from outrider.gateway.workers.siblings import Siblings

_FAILED = 3
"""Exit status of a worker that has told its parent why it cannot start."""


def main() -> int:
    """Answer requests until the parent says otherwise, or ends. Returns the exit status."""
    # A Ctrl-C in the terminal and a service manager's SIGTERM reach the whole group; the parent
    # decides when the workers stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    line_end, connections_end = (socket.socket(fileno=int(each)) for each in sys.argv[1:3])
    task = read_task(sys.stdin.buffer)
    threading.Thread(target=_die_with_parent, name="parent", daemon=True).start()
    settings: Settings = task.settings
    process = f"worker-{task.number}"
    configure_logging(settings.log_level, settings.telemetry.log_format, process=process)
    keep_torch_out()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(task, line_end, connections_end))


async def _serve(task: WorkerTask, line_end: socket.socket, connections_end: socket.socket) -> int:
    from outrider.gateway.wiring.serving import GatewayRun, WorkerPlace

    settings: Settings = task.settings
    siblings = Siblings(task.number, settings.server.workers, line_end)

    def on_ready(info: EngineInfo, routing: str) -> None:
        siblings.notify_parent("ready", (info, routing))

    place = WorkerPlace(
        siblings=siblings, connections=Receiver(connections_end), engine=task.engine
    )
    run = GatewayRun(share_of(settings), place, on_ready=on_ready)

    async def drain(_: object) -> None:
        run.begin_draining()

    async def end(_: object) -> None:
        run.begin_draining()
        run.stop()

    siblings.on("drain", drain)
    siblings.on("end", end)
    listening = asyncio.create_task(siblings.run())
    try:
        await run.run()
    except (SettingsError, EngineError) as error:
        await siblings.report_failure((isinstance(error, SettingsError), str(error)))
        return _FAILED
    except asyncio.CancelledError:  # stopped while it loaded
        return 0
    finally:
        listening.cancel()
        with suppress(asyncio.CancelledError):
            await listening
    return 0


def share_of(settings: Settings) -> Settings:
    """Return one worker's part of what bounds the whole gateway.

    A body that is allowed must fit into a worker's part, so these are no smaller than that.
    """
    num_workers, http = settings.server.workers, settings.http
    smallest = settings.limits.max_body_bytes
    shares = {
        "max_connections": -(-http.max_connections // num_workers),
        "max_bytes_in_flight": max(smallest, http.max_bytes_in_flight // num_workers),
        "max_bytes_in_flight_per_key": max(
            smallest, http.max_bytes_in_flight_per_key // num_workers
        ),
        "idempotency_max_bytes": http.idempotency_max_bytes // num_workers,
    }
    cache, mirror = settings.cache, settings.mirror
    return settings.model_copy(
        update={
            "http": http.model_copy(update=shares),
            "cache": cache.model_copy(update={"max_bytes": max(1, cache.max_bytes // num_workers)}),
            "mirror": mirror.model_copy(
                update={"max_in_flight": -(-mirror.max_in_flight // num_workers)}
            ),
        }
    )


def _die_with_parent() -> None:
    """Wait for the end of standard input: the parent is gone."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(1)


if __name__ == "__main__":
    exit_status = main()
    sys.stderr.flush()
    sys.stdout.flush()
    os._exit(exit_status)
