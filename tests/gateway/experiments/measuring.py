"""Outcomes, arms' totals and requests for tests of what is measured."""

import json
from typing import Any

from outrider.gateway.contract.answers.outcomes import ArmRef, RequestOutcome
from outrider.gateway.experiments.measures import ArmMeasures
from outrider.gateway.experiments.totals import METRIC_NAMES, SKETCH_NAMES, ArmTotals

NOON = 1_790_000_000.0


def outcome(number: int = 0, **changes: Any) -> RequestOutcome:
    """An answer like others, in arm "on" of "budget", version 1."""
    facts: dict[str, Any] = {
        "request_id": f"row-{number}",
        "client_request_id": f"req-{number}",
        "answer_id": f"chatcmpl-{number}",
        "key_id": "key00001",
        "endpoint": "chat",
        "ended_at": NOON + number,
        "ttft_s": 0.1,
        "inter_token_s": 0.01,
        "duration_s": 0.5,
        "num_completion_tokens": 40,
        "cost_nanos": 2_000_000,
        "slo_ttft_s": 0.2,
        "arms": (ArmRef(experiment="budget", version=1, arm="on", unit_bucket=number % 64),),
    }
    return RequestOutcome(**facts | changes)


def counted(*outcomes: RequestOutcome) -> dict[str, ArmTotals]:
    """Totals by arm, of one experiment's version."""
    measures = ArmMeasures()
    for each in outcomes:
        measures.observe(each)
    return {key[2]: totals for key, totals in measures.take().items()}


def assert_same(one: ArmTotals, two: ArmTotals) -> None:
    """Both have counted the same."""
    assert (one.experiment, one.version, one.arm) == (two.experiment, two.version, two.arm)
    assert (one.first_at, one.last_at) == (two.first_at, two.last_at)
    for name in METRIC_NAMES:
        first, second = one.metrics[name], two.metrics[name]
        assert first.counts.tolist() == second.counts.tolist(), name
        assert abs(first.sums - second.sums).max() <= 1e-9 * max(1.0, abs(first.sums).max()), name
        assert abs(first.squares - second.squares).max() <= 1e-9, name
    for sketch in SKETCH_NAMES:
        assert one.sketches[sketch].bins == two.sketches[sketch].bins, sketch
        assert one.sketches[sketch].num_zeros == two.sketches[sketch].num_zeros


def posted(document: Any) -> bytes:
    """A request's body."""
    return document if isinstance(document, bytes) else json.dumps(document).encode()
