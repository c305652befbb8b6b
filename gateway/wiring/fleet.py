"""The gateway's engines that run elsewhere, as the settings name them."""

from collections.abc import Mapping
from concurrent.futures import Future

from engine.request import Tier
from gateway.backends.fleet_keys import read_fleet_keys, require_safe
from gateway.backends.remote_client import RemoteEngineClient
from gateway.backends.watched_client import Patience
from gateway.settings.tree import Settings, SettingsError


def build_remote(
    settings: Settings, tokenizers: "Future[Mapping[Tier, str]] | None" = None
) -> RemoteEngineClient:
    """Build the client of `engine.replicas`. Raises SettingsError for an address or a key file."""
    options = settings.engine
    keys = None if options.replicas_key is None else read_fleet_keys(options.replicas_key)
    for endpoint in options.replicas:
        require_safe(endpoint, keys, insecure=options.replicas_insecure)
    if len(options.replicas) > 1:
        raise SettingsError(
            f"engine.replicas (--engines) = {options.replicas}: several engines behind one gateway "
            "are not possible yet; name one."
        )
    return RemoteEngineClient(
        options.replicas[0],
        keys,
        tokenizers=tokenizers,
        patience=Patience(
            stall_timeout_s=options.stall_timeout_s,
            unready_after_s=options.unready_after_s,
            resume_within_s=options.resume_within_s,
        ),
    )
