"""Virtual fleets: all requests are answered, caches are hit as they can be, failures lose none."""

import json
from pathlib import Path

import pytest

from benchmarks.simulate import simulate_fleet
from benchmarks.simulate.fleet_trace import offered, synthetic
from benchmarks.simulate.simulate_fleet import apart, day, run, scaled_fleet

TRACE = synthetic(240, seed=1)


def test_hits_are_those_of_perfect_knowledge_and_more_than_round_robins() -> None:
    calls = offered(TRACE, rate=4.0)
    found = {
        policy: run(calls, policy=policy, num_replicas=4, num_blocks=2000)
        for policy in simulate_fleet.POLICIES
    }
    assert all(one["num_unanswered"] == 0 for one in found.values())
    assert found["cache aware"]["hit_rate"] > 0.93 * found["oracle"]["hit_rate"]
    assert found["cache aware"]["hit_rate"] > 1.3 * found["round robin"]["hit_rate"]
    assert found["cache aware"]["index_pairs"] > 0


def test_failures_lose_no_request() -> None:
    calls = offered(TRACE[:120], rate=6.0)
    found = run(calls, policy="cache aware", num_replicas=3, num_blocks=500, fails=True)
    assert found["num_begun_anew"] > 0
    assert found["num_unanswered"] == 0


@pytest.mark.slow
def test_prompts_computed_apart_keep_answers_from_waiting() -> None:
    found = apart(
        {"texts": lambda rate: offered(TRACE, rate=rate)},
        [0.5],
        num_blocks=2000,
        advance=lambda label: None,
    )["texts, 0.5/s"]
    assert found["both"]["apart_share"] == 0.0
    fast = found["1 apart, 200 Gbit/s"]
    assert fast["apart_share"] > 0.1
    assert fast["gap_p99_s"] < 0.6 * found["both"]["gap_p99_s"]
    assert found["1 apart, 10 Gbit/s"]["apart_share"] <= fast["apart_share"]


@pytest.mark.slow
def test_a_fleet_that_is_scaled_costs_less() -> None:
    calls = day(TRACE, rate=1.0)
    assert [call.at_s for call in calls] == sorted(call.at_s for call in calls)
    found = scaled_fleet(calls, num_blocks=2000, advance=lambda label: None)
    assert found["scaled"]["num_unanswered"] == 0
    assert found["scaled"]["replica_s_per_good"] < 0.7 * found["fixed"]["replica_s_per_good"]


@pytest.mark.slow
def test_the_script_writes_its_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUTRIDER_DATA", raising=False)
    arguments = ["--trace", "none.jsonl", "--requests", "120", "--rates", "1", "2"]
    arguments += ["--sizes", "1", "4", "--requests-of-four", "60", "--results", str(tmp_path)]
    simulate_fleet.main(arguments)
    written = json.loads((tmp_path / "simulate_fleet-mooncake.json").read_text(encoding="utf-8"))
    assert set(written["results"]["sizes"]) == {"1", "4"}
    assert (tmp_path / "simulate_fleet-mooncake.png").stat().st_size > 1000
