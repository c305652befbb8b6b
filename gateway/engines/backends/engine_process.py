"""The engine's own process, which its client starts by this module's name.

Standard input carries one line, the `WorkerSpec`, and then stays open for as long as the gateway
lives. A process in reserve, which was given an importer, imports first and waits for that line. A
thread that reads it notices the gateway's end, whichever way it ends, and ends this process too;
unlike PR_SET_PDEATHSIG that works on every platform and does not depend on which of the gateway's
threads started us. Standard output is the same in the other direction: nothing is written to it,
but the gateway sees it close the moment this process dies.
"""

import importlib
import logging
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from typing import cast

import msgspec
import zmq

from outrider.gateway.engines.backends.connected_gateway import ListenerBounds
from outrider.gateway.engines.backends.engine_listener import EngineListener
from outrider.gateway.engines.backends.shared_channel import SharedChannel
from outrider.gateway.engines.backends.step_loop import (
    EXIT_REPORTED,
    LoadingCallback,
    StepEngine,
    serve_loaded,
)
from outrider.gateway.engines.backends.wire import (
    Command,
    LoadFailed,
    Loading,
    Ready,
    Reply,
    WorkerSpec,
    decode_command,
    encode,
    pack_error,
)
from outrider.gateway.telemetry.logs import configure_logging

log = logging.getLogger(__name__)

_LINGER_MS = 2_000  # time for the last message to leave before the process ends


def main() -> int:
    """Serve one gateway until it says `Stop` or dies. Returns the exit status."""
    # A Ctrl-C in the terminal and a service manager's SIGTERM reach the whole group, but the
    # gateway wants to drain first: it decides when we stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if len(sys.argv) > 1:
        _find(sys.argv[1])()
    line = sys.stdin.buffer.readline()
    if not line:  # it waited in reserve, and its gateway has ended
        return 0
    spec = msgspec.json.decode(line, type=WorkerSpec)
    _keep_standard_output_to_ourselves()
    threading.Thread(target=_die_with_gateway, args=(spec.scratch_dir,), daemon=True).start()
    configure_logging(spec.log_level, spec.log_format, process="engine")
    context = zmq.Context()
    channel = _SocketChannel(context, spec)
    listener = None
    try:
        if spec.listen is not None:  # at once: gateways need not try again while models load
            listener = EngineListener(
                spec.listen, None, ListenerBounds(max_requests=spec.max_requests)
            )
            channel.wakes(listener)
        return _serve(spec, channel, listener)
    finally:
        if listener is not None:
            listener.close()
        channel.close()
        context.term()


def _serve(spec: WorkerSpec, channel: "_SocketChannel", listener: EngineListener | None) -> int:
    """Build the engine, then step it. Returns the exit status."""

    def on_progress(stage: str, fraction: float) -> None:
        channel.send(Loading(stage, fraction))

    try:
        builder = cast(Callable[[str, LoadingCallback], StepEngine], _find(spec.builder))
        engine = builder(spec.arguments, on_progress)
        if listener is not None:
            listener.open(engine.info(), {})  # its gateways read the same settings
        channel.send(Ready(engine.info()))
    except Exception as error:
        log.debug("engine failed to load", exc_info=True)
        channel.send(LoadFailed(pack_error(error)))
        return EXIT_REPORTED
    return serve_loaded(engine, channel if listener is None else SharedChannel(channel, listener))


class _SocketChannel:
    """`Channel` over ZeroMQ: sleeps in the socket while idle."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], spec: WorkerSpec) -> None:
        self._socket = context.socket(zmq.DEALER)
        self._socket.linger = _LINGER_MS
        # No bound: what can be in flight is bounded by the requests that the engine admits, and a
        # blocked send would stall every stream because of one.
        self._socket.sndhwm = self._socket.rcvhwm = 0
        if spec.server_key is not None and spec.client_key is not None:
            self._socket.curve_serverkey = spec.server_key.encode()
            public, secret = spec.client_key
            self._socket.curve_publickey = public.encode()
            self._socket.curve_secretkey = secret.encode()
        self._socket.connect(spec.endpoint)

    def wakes(self, listener: EngineListener) -> None:
        """Have a listener's wait end for what comes here."""
        listener.wake_for(self._socket)

    def receive(self, *, wait: bool) -> list[Command]:
        received = [decode_command(self._socket.recv())] if wait else []
        while True:
            try:
                received.append(decode_command(self._socket.recv(zmq.NOBLOCK)))
            except zmq.Again:
                return received

    def send(self, reply: Reply, /) -> None:
        self._socket.send(encode(reply))

    def close(self) -> None:
        self._socket.close()


def _find(reference: str) -> Callable[..., object]:
    """The function that `module:name` means."""
    module_name, _, name = reference.partition(":")
    return cast(Callable[..., object], getattr(importlib.import_module(module_name), name))


def _keep_standard_output_to_ourselves() -> None:
    """Hold the pipe open in a descriptor no child inherits; what is printed goes to stderr."""
    os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())


def _die_with_gateway(scratch_dir: str) -> None:
    """Wait for the end of standard input: the parent is gone, so this process cleans up."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    shutil.rmtree(scratch_dir, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    exit_status = main()
    sys.stderr.flush()
    # Taking torch and Triton apart takes time, and their bindings complain about each other.
    os._exit(exit_status)
