"""The client of an engine's own process, and one of an engine that another process has started."""

from outrider.gateway.engines.backends.client import LOADING_REASON
from outrider.gateway.engines.backends.process_client import ProcessEngineClient
from outrider.gateway.engines.backends.remote_client import RemoteEngineClient
from outrider.gateway.engines.backends.spawning import EngineProcess
from outrider.gateway.engines.backends.step_loop import LoadingCallback, no_progress
from outrider.gateway.engines.backends.supervised_client import ReconnectPolicy
from outrider.gateway.settings.tree import Settings
from outrider.gateway.wiring.start import engine_recipe


def process_client(
    settings: Settings,
    on_progress: LoadingCallback = no_progress,
    first: EngineProcess | None = None,
) -> ProcessEngineClient:
    """Build the client that starts the engine's process, and starts it again when it dies.

    `first`: the process, where it was started before (`start_engine`).
    """
    return ProcessEngineClient(
        engine_recipe(settings),
        first=first,
        on_progress=on_progress,
        policy=reconnect_policy_of(settings),
    )


class SharedEngineClient(RemoteEngineClient):
    """A worker's client of the engine that the gateway's parent process starts and restarts."""

    @property
    def not_ready_reason(self) -> str:
        """Message for clients while the engine is not ready; where it listens is not for them."""
        return LOADING_REASON


def shared_client(settings: Settings, endpoint: str) -> SharedEngineClient:
    """Build a worker's client of the engine that the gateway's parent process has started."""
    return SharedEngineClient(endpoint, policy=reconnect_policy_of(settings))


def reconnect_policy_of(settings: Settings) -> ReconnectPolicy:
    """Return how long an engine is waited for."""
    options = settings.engine
    return ReconnectPolicy(
        stall_timeout_s=options.stall_timeout_s,
        unready_after_s=options.unready_after_s,
        resume_within_s=options.resume_within_s,
        max_waiting=options.max_waiting,
    )
