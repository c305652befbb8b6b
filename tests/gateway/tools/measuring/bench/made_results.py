"""Results of runs that never were: rows by a seed, summed up as real ones are."""

from typing import Any

import numpy as np

from outrider.gateway.tools.measuring.bench.results import (
    BenchResult,
    LoopKind,
    Meta,
    Objectives,
    RequestRow,
    SearchReport,
    SearchStep,
)
from outrider.gateway.tools.measuring.bench.summary import summarize

OBJECTIVES = Objectives(ttft_ms=120.0, inter_token_ms=12.0)


def made_rows(
    num: int,
    *,
    seed: int = 0,
    slower: float = 1.0,
    num_failed: int = 0,
    num_tokens: int = 20,
    rate_per_s: float = 10.0,
) -> list[RequestRow]:
    """Requests at a constant rate; `slower`: a factor on all of their times."""
    rng = np.random.default_rng(seed)
    rows = []
    for index in range(num):
        due_s = index / rate_per_s
        ttft_s = float(rng.lognormal(np.log(0.08), 0.3)) * slower
        gaps_s = rng.lognormal(np.log(0.01), 0.2, size=num_tokens - 1) * slower
        first_s = due_s + ttft_s
        last_s = first_s + float(gaps_s.sum())
        if index < num_failed:
            rows.append(
                RequestRow(
                    index=index,
                    scheduled_s=due_s,
                    sent_s=due_s,
                    ended_s=due_s + 0.01,
                    error="server_error",
                    status=500,
                    message="<b>overloaded</b>",
                    category="qa",
                )
            )
            continue
        rows.append(
            RequestRow(
                index=index,
                scheduled_s=due_s,
                sent_s=due_s + 0.0005,
                first_s=first_s,
                last_s=last_s,
                ended_s=last_s + 0.001,
                gaps_ms=[1e3 * float(gap) for gap in gaps_s],
                category=("qa", "code <script>")[index % 2],
                status=200,
                num_prompt_tokens=30,
                num_completion_tokens=num_tokens,
                num_drafted_tokens=30,
                num_accepted_tokens=12,
                mean_emitted_tokens=2.5,
            )
        )
    return rows


def made_result(
    rows: list[RequestRow],
    *,
    arm: str = "",
    loop: LoopKind = "open",
    objectives: Objectives = OBJECTIVES,
    search: SearchReport | None = None,
    **meta: Any,
) -> BenchResult:
    """A run of these rows; `meta`: fields of its conditions."""
    conditions: dict[str, Any] = {
        "url": "http://127.0.0.1:8000",
        "model": "large",
        "started_at": "2026-01-01T00:00:00Z",
        "ended_at": "2026-01-01T00:01:00Z",
        "workload": {"kind": "prompts", "name": "built-in"},
        "settings": {"rate_per_s": 10.0, "seed": 0},
        "request_fields": {},
        "versions": {"outrider": "1"},
        "machine": "a machine",
    }
    return BenchResult(
        meta=Meta(loop=loop, arm=arm, **(conditions | meta)),
        objectives=objectives,
        summary=summarize(rows, objectives, loop=loop),
        rows=rows,
        search=search,
    )


def made_search() -> SearchReport:
    """Four rates, of which two are enough."""
    steps = [
        SearchStep(
            rate_per_s=rate,
            is_enough=slower < 1.2,
            summary=summarize(
                made_rows(60, slower=slower, rate_per_s=rate), OBJECTIVES, loop="open"
            ),
        )
        for rate, slower in ((5.0, 0.5), (10.0, 0.8), (20.0, 2.0), (15.0, 1.4))
    ]
    return SearchReport(target_attainment=0.9, best_rate_per_s=10.0, is_bounded=True, steps=steps)
