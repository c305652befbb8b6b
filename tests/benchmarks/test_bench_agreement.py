"""guidellm and aiperf against our server: what they write is read as they mean it."""

import argparse
import json
import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers.agreement_tools import (
    AIPERF,
    GUIDELLM,
    OURS,
    Job,
    Measured,
    aiperf_arguments,
    guidellm_arguments,
    our_arguments,
    read_aiperf,
    read_guidellm,
    read_ours,
    write_prompts,
)
from benchmarks.peers.bench_agreement import check, compared, figures, main, tools
from outrider.gateway.tools.measuring.bench.results import write_result
from tests.gateway.tools.measuring.bench.made_results import made_result, made_rows

_ENVIRONMENTS = {
    name: os.environ.get(f"OUTRIDER_{name.upper()}_ENV") for name in (GUIDELLM, AIPERF)
}


def _job(folder: Path) -> Job:
    return Job(
        url="http://127.0.0.1:8000",
        model="large",
        prompts=write_prompts(["one", "two"], folder),
        num_requests=7,
        concurrency=3,
        max_tokens=9,
        tokenizer=folder,
    )


def test_every_tool_is_asked_for_the_same(tmp_path: Path) -> None:
    job = _job(tmp_path)
    asked = {
        OURS: our_arguments(job, tmp_path),
        GUIDELLM: guidellm_arguments(job, tmp_path, "/v1/responses"),
        AIPERF: aiperf_arguments(job, tmp_path),
    }
    for tool, arguments in asked.items():
        text = " ".join(arguments)
        assert "http://127.0.0.1:8000" in text
        assert str(job.prompts[tool]) in text
        for number in (7, 3, 9):
            assert str(number) in text
        assert "temperature" in text
    read = [json.loads(line) for line in job.prompts[AIPERF].read_text().splitlines()]
    assert read == [{"text": "one"}, {"text": "two"}]


def test_ours_is_counted_from_sending(tmp_path: Path) -> None:
    rows = made_rows(6, num_failed=2)
    write_result(made_result(rows), tmp_path / "run.json")
    seen = read_ours(tmp_path)
    assert seen.num_failed == 2
    assert seen.ttft_ms == pytest.approx([row.sent_ttft_ms for row in rows[2:]])
    assert seen.e2e_ms == pytest.approx([row.sent_e2e_ms for row in rows[2:]])


def test_guidellms_seconds_become_milliseconds(tmp_path: Path) -> None:
    good = {
        "time_to_first_token_ms": 37.9,
        "inter_token_latency_ms": 2.02,
        "request_latency": 0.087,
    }
    one_token = good | {"inter_token_latency_ms": None}
    requests = {"successful": [good, one_token], "errored": [{}], "incomplete": None}
    document = {"benchmarks": [{"requests": requests}]}
    (tmp_path / "run.json").write_text(json.dumps(document), encoding="utf-8")
    seen = read_guidellm(tmp_path)
    assert seen == Measured(ttft_ms=[37.9, 37.9], tpot_ms=[2.02], e2e_ms=[87.0, 87.0], num_failed=1)


def test_aiperfs_warm_up_is_left_out(tmp_path: Path) -> None:
    def record(phase: str, ttft: float, error: Any = None) -> str:
        metrics = {
            "time_to_first_token": {"value": ttft, "unit": "ms"},
            "request_latency": {"value": 255.0, "unit": "ms"},
            "inter_token_latency": {"value": 8.4, "unit": "ms"},
        }
        metadata = {"benchmark_phase": phase}
        return json.dumps({"metadata": metadata, "metrics": metrics, "error": error})

    lines = [record("warmup", 1.0), record("profiling", 61.8), record("profiling", 5.0, "503")]
    (tmp_path / "artifacts").mkdir()
    path = tmp_path / "artifacts" / "profile_export.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    seen = read_aiperf(tmp_path)
    assert (seen.ttft_ms, seen.tpot_ms, seen.e2e_ms) == ([61.8], [8.4], [255.0])
    assert seen.num_failed == 1


def test_agreement_is_judged_by_noise() -> None:
    ours = [10.0, 10.4, 9.8, 10.1]
    assert compared(ours, [10.1, 10.2, 9.9, 10.2])["agrees"]
    double = compared(ours, [20.0, 20.8, 19.6, 20.2])
    assert not double["agrees"]
    assert double["ratio"] == pytest.approx(2.0)
    assert double["low"] == pytest.approx(double["high"]) == pytest.approx(2.0)
    with pytest.raises(ValueError, match="one round"):
        compared([1.0], [1.0])


def test_figures_are_of_each_other_tool() -> None:
    run = Measured(ttft_ms=[1.0, 2.0, 9.0], tpot_ms=[1.0], e2e_ms=[3.0], num_failed=0)
    found = figures({OURS: [run, run], AIPERF: [run, run]})
    assert list(found) == [AIPERF]
    assert found[AIPERF]["ttft_ms"]["ours"] == 2.0
    assert found[AIPERF]["ttft_ms"]["agrees"]
    failed = Measured(ttft_ms=[1.0], tpot_ms=[], e2e_ms=[1.0], num_failed=3)
    with pytest.raises(SystemExit, match="3 requests failed"):
        check({OURS: [run], AIPERF: [failed]})


def test_without_a_tool_it_says_what_to_do(tmp_path: Path) -> None:
    arguments = argparse.Namespace(guidellm=None, aiperf=None, guidellm_format="/v1/responses")
    with pytest.raises(SystemExit, match="--guidellm or --aiperf"):
        tools(arguments)
    arguments.aiperf = tmp_path
    with pytest.raises(SystemExit, match="there is no"):
        tools(arguments)


@pytest.mark.long
@pytest.mark.parametrize("tool", [GUIDELLM, AIPERF])
def test_the_tool_agrees_about_our_server(tool: str, tmp_path: Path) -> None:
    """Within a fifth: three rounds on a machine that does other things as well."""
    environment = _ENVIRONMENTS[tool]
    if environment is None:
        pytest.skip(f"OUTRIDER_{tool.upper()}_ENV names no virtual environment with {tool}")
    main(
        [f"--{tool}", environment, "--repeats", "3", "--requests", "40", "--results", str(tmp_path)]
    )
    document = json.loads((tmp_path / "bench_agreement-pair.json").read_text(encoding="utf-8"))
    for name, entry in document["results"]["tools"][tool].items():
        assert entry["agrees"] or 0.8 < entry["ratio"] < 1.25, name
