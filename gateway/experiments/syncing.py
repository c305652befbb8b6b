"""Experiments of outrider.toml, brought into the store when a gateway starts."""

from collections.abc import Mapping
from hashlib import blake2b

from outrider.gateway.contract.errors.tree import ConflictError
from outrider.gateway.experiments.store import ExperimentStore
from outrider.gateway.settings.experiments import ExperimentSettings

_FINGERPRINT_BYTES = 16


def apply_settings(store: ExperimentStore, wanted: Mapping[str, ExperimentSettings]) -> list[str]:
    """Make, edit, start and stop experiments as the settings say; return the changed names.

    Settings that did not change leave their experiment as it is now: an arm or an experiment that
    was stopped meanwhile does not come back by a restart. Experiments no longer in the settings are
    stopped. Blocks. Raises ConflictError, which names the experiment, and DatabaseError.
    """
    known = store.load().experiments
    changed = []
    for name, record in known.items():
        if record.source == "file" and name not in wanted:
            store.stop(name, reason="it is in the settings no more")
            store.mark(name, fingerprint=None)
            changed.append(name)
    prints = {name: _fingerprint(settings) for name, settings in wanted.items()}
    new = {
        name: settings
        for name, settings in wanted.items()
        if name not in known or known[name].fingerprint != prints[name]
    }
    # Those that give slots and settings free go before those that need them.
    for name in sorted(new, key=lambda each: (new[each].state == "running", each)):
        try:
            _apply(store, name, new[name])
        except ConflictError as error:
            raise ConflictError(f"experiments.{name}: {error}", param=name) from None
        store.mark(name, fingerprint=prints[name])
        changed.append(name)
    return changed


def _apply(store: ExperimentStore, name: str, wanted: ExperimentSettings) -> None:
    if name not in store.load().experiments:
        store.create(name, wanted.spec(), share=wanted.share, source="file")
    store.update(name, spec=wanted.spec(), share=wanted.share, state=wanted.state)


def _fingerprint(settings: ExperimentSettings) -> str:
    text = settings.model_dump_json()
    return blake2b(text.encode(), digest_size=_FINGERPRINT_BYTES).hexdigest()
