"""The lab's own parts; all of it runs in `make bench-lab`."""

import json
from pathlib import Path

import numpy as np

from benchmarks.gateway.bench_lab import experiment_section, of_users, summary_figures, write_trace
from outrider.gateway.experiments.statistics.plan import SamplePlan
from outrider.gateway.experiments.statistics.report import analyse
from outrider.gateway.tools.measuring.bench.traces import load_trace
from outrider.gateway.tools.measuring.bench.workloads import PlannedRequest
from tests.gateway.tools.measuring.bench.made_results import made_result, made_rows


def test_its_trace_is_one(tmp_path: Path) -> None:
    write_trace(tmp_path / "a.csv", num_requests=300, seed=4)
    write_trace(tmp_path / "b.csv", num_requests=300, seed=4)
    assert (tmp_path / "a.csv").read_bytes() == (tmp_path / "b.csv").read_bytes()
    rows = load_trace(tmp_path / "a.csv", skips_bad=False).rows
    assert len(rows) == 300
    times = np.array([row.at_s for row in rows])
    gaps = np.diff(times)
    assert (gaps >= 0).all()
    assert gaps.std() / gaps.mean() > 1.4  # bursts: a Poisson process has 1
    assert 600 < np.median([row.num_prompt_tokens for row in rows]) < 1600


def test_requests_get_users() -> None:
    body = json.dumps({"model": "large", "messages": []}).encode()
    asked = of_users([PlannedRequest(at_s=0.0, body=body)] * 50, 5, np.random.default_rng(0))
    users = {json.loads(one.body)["user"] for one in asked}
    assert users == {f"user-{n}" for n in range(5)}
    assert json.loads(asked[0].body)["model"] == "large"


def test_an_experiment_without_data_has_a_section() -> None:
    plan = SamplePlan(name="draft-budget", version=1, control="a", weights={"a": 1.0, "b": 1.0})
    section = experiment_section(analyse(plan, {}))
    assert "draft-budget" in section.title
    assert "No request has come yet." in section.html
    assert '<div class="table">' in section.html


def test_the_kept_figures_are_those_of_the_summary() -> None:
    result = made_result(made_rows(40))
    found = summary_figures(result)
    assert result.summary.ttft_ms is not None
    assert found["ttft_ms"]["p95"] == result.summary.ttft_ms.p95.value
    assert found["num_requests"] == 40
    assert result.summary.attainment is not None
    assert found["attainment"] == result.summary.attainment.value
