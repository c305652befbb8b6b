"""The experiments of the live page: running ones, then drafts, then stopped ones."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from outrider.gateway.experiments.experiments import Experiments
from outrider.gateway.http.dashboard.experiments import experiment_documents


def test_an_experiment_that_has_not_begun_is_listed() -> None:
    states = [("old", "stopped", 1.0), ("idea", "draft", 2.0), ("now", "running", 3.0)]
    records = {
        name: SimpleNamespace(
            name=name, state=state, created_at=at_s, started_at=at_s, stopped_at=at_s
        )
        for name, state, at_s in states
    }

    async def report(name: str) -> Any:
        return SimpleNamespace(document=lambda: {"experiment": name})

    made = SimpleNamespace(registry=SimpleNamespace(experiments=records), report=report)
    found = asyncio.run(experiment_documents(cast(Experiments, made)))
    assert [one["experiment"] for one in found] == ["now", "idea", "old"]
