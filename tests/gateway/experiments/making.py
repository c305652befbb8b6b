"""Experiments in few words."""

from typing import Any

from outrider.gateway.experiments.assigner import Subject
from outrider.gateway.experiments.lifecycle import created, started
from outrider.gateway.experiments.records import ExperimentRecord
from outrider.gateway.settings.experiments import ExperimentSpec

SECRET = b"a secret of these tests"


def spec(arms: dict[str, Any] | None = None, **fields: Any) -> ExperimentSpec:
    """Two speculation budgets, unless told otherwise."""
    arms = arms or {"control": {}, "deep": {"set": {"max_draft_nodes": 32}}}
    return ExperimentSpec.model_validate({"arms": arms} | fields)


def record(
    name: str = "drafts", *, share: float = 1.0, runs: bool = True, **fields: Any
) -> ExperimentRecord:
    """An experiment, running alone."""
    made = created(name, spec(**fields), share=share, now_s=1.0)
    return started(made, [], 2.0) if runs else made


def user(name: object, **fields: Any) -> Subject:
    """A request of a user."""
    return Subject(**({"key_id": "key", "user": f"user {name}", "request_id": "r"} | fields))
