"""Whether the news of a prefix cache can be read by other machines."""

from collections.abc import Iterator

from outrider.gateway.settings.loopback import is_loopback
from outrider.gateway.settings.sections import EngineSettings
from outrider.gateway.settings.tiers import Complaint


def kv_event_complaints(engine: EngineSettings) -> Iterator[Complaint]:
    """Yield addresses on which every machine could read prompts."""
    if engine.replicas_key is not None or engine.replicas_insecure:
        return
    for name in ("kv_events", "kv_events_replay"):
        address: str | None = getattr(engine, name)
        if address is not None and not _is_near(address):
            yield Complaint(
                ("engine", name),
                address,
                "can be reached from other machines, which could read prompts. Take an address of "
                "this one (tcp://127.0.0.1:5557), write keys with `outrider engine keygen "
                "fleet.key` and name the file (--key at an engine, engine.replicas_key), or say "
                "--insecure",
            )


def _is_near(address: str) -> bool:
    scheme, _, rest = address.partition("://")
    return scheme in ("ipc", "inproc") or is_loopback(rest.rpartition(":")[0].strip("[]"))
