"""The experiments of the live page, with their reports."""

from typing import Any, Final

from outrider.gateway.contract.errors.tree import NotFoundError
from outrider.gateway.experiments.experiments import Experiments

_MAX_SHOWN: Final = 16
_MAX_DRAFTS: Final = 3
_MAX_STOPPED: Final = 3


async def experiment_documents(experiments: Experiments) -> list[dict[str, Any]]:
    """Return the reports of running experiments, youngest first, of the last three drafts and of
    the last three stopped.

    Raises StorageError.
    """
    records = experiments.registry.experiments.values()
    running = [record for record in records if record.state == "running"]
    drafts = [record for record in records if record.state == "draft"]
    stopped = [record for record in records if record.state == "stopped"]
    running.sort(key=lambda record: -(record.started_at or 0.0))
    drafts.sort(key=lambda record: -record.created_at)
    stopped.sort(key=lambda record: -(record.stopped_at or 0.0))
    found = []
    for record in (*running[:_MAX_SHOWN], *drafts[:_MAX_DRAFTS], *stopped[:_MAX_STOPPED]):
        try:
            found.append((await experiments.report(record.name)).document())
        except NotFoundError:  # deleted meanwhile
            continue
    return found
