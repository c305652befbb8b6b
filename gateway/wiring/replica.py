"""Running an engine that gateways share: its socket, its models, and the end of both."""

import logging
import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

from outrider.engine.events import EngineInfo
from outrider.gateway.engines.backends.connected_gateway import ListenerBounds
from outrider.gateway.engines.backends.engine_listener import EngineListener
from outrider.gateway.engines.backends.fleet_keys import FleetKeys
from outrider.gateway.engines.backends.peer_lines import PeerLines
from outrider.gateway.engines.backends.step_loop import LoadingCallback, serve_loaded
from outrider.gateway.settings.tree import Settings, SettingsError
from outrider.gateway.wiring.chat_tokenizers import load_chat_tokenizer
from outrider.gateway.wiring.checkpoints import named_models
from outrider.gateway.wiring.start import check_models, openmp_environment

if TYPE_CHECKING:
    from outrider.engine.core import Engine

logger = logging.getLogger(__name__)


def listen_for_gateways(
    settings: Settings, endpoint: str, keys: FleetKeys | None
) -> EngineListener:
    """Take the address. Raises SettingsError where it is taken, or a model cannot be there."""
    if not settings.models.is_any:
        raise SettingsError("an engine needs a model: name one with --large or --small.")
    check_models(settings)
    options = settings.engine
    bounds = ListenerBounds(max_requests=options.max_sequences + options.max_waiting)
    return EngineListener(endpoint, keys, bounds)


def run_replica(
    settings: Settings,
    listener: EngineListener,
    peers: PeerLines,
    *,
    on_progress: LoadingCallback,
    on_ready: Callable[[EngineInfo], None],
) -> int:
    """Load the models and serve gateways until a signal, then drain. Returns the exit status.

    A second signal does not wait for answers. `peers`: lines to other engines. Raises EngineError
    when the models do not load.
    """
    os.environ.update(openmp_environment(settings))  # before torch is imported
    engine = _load(settings, peers, on_progress)
    tokenizers = {
        tier: load_chat_tokenizer(settings, tier, path).fingerprint
        for tier, path in named_models(settings).items()
    }
    has_begun = False

    def stop(number: int, _: FrameType | None) -> None:
        nonlocal has_begun
        if has_begun:
            raise SystemExit(128 + number)
        has_begun = True
        listener.drain(settings.server.drain_timeout_s)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    info = engine.info()
    listener.open(info, tokenizers)
    on_ready(info)
    return serve_loaded(engine, listener)


def _load(settings: Settings, peers: PeerLines, on_progress: LoadingCallback) -> "Engine":
    from outrider.gateway.wiring.build import build_engine
    from outrider.gateway.wiring.engine import saved_times

    saved = saved_times(settings)
    return build_engine(settings, on_progress, saved, starts_compilers=True, peers=peers)
