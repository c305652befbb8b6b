import io
from pathlib import Path

import msgspec
import numpy as np
import pytest
from rich.console import Console

from outrider.gateway.tools.measuring.bench.compare import (
    Difference,
    RunComparison,
    compare_results,
    different_conditions,
    write_comparison,
)
from outrider.gateway.tools.measuring.bench.printing import print_comparison
from outrider.gateway.tools.measuring.bench.results import Objectives, ResultError
from outrider.gateway.tools.measuring.bench.statistics import (
    block_indexes,
    mean_of,
    quantile_of,
    side_of,
)
from tests.gateway.tools.measuring.bench.made_results import made_result, made_rows


def _named(comparison: RunComparison, name: str) -> Difference:
    (found,) = [entry for entry in comparison.differences if entry.name == name]
    return found


def test_a_slower_run_is_seen_with_the_truth_in_the_intervals() -> None:
    comparison = compare_results(
        made_result(made_rows(400)), made_result(made_rows(400, seed=1, slower=1.5))
    )
    for name in ("TTFT mean", "TTFT p50", "TPOT p50", "E2E p95", "ITL p50", "ITL p99"):
        entry = _named(comparison, name)
        assert entry.verdict == "worse", name
        assert entry.ratio is not None
        assert entry.ratio.low is not None
        assert entry.ratio.high is not None
        assert entry.ratio.low < 1.5 < entry.ratio.high, name
        assert entry.difference.value == pytest.approx(entry.second - entry.first, rel=1e-4)
    assert _named(comparison, "attainment").verdict == "worse"
    assert _named(comparison, "goodput").difference.value < 0
    assert comparison.num_pairs == 0
    assert comparison.share_faster is None


@pytest.mark.slow
def test_intervals_hold_the_truth_about_as_often_as_promised() -> None:
    """95 % of them, somewhat less with so few requests."""
    truth_ms = 80.0 * float(np.exp(0.3**2 / 2))  # the mean of made_rows' log-normal
    result = made_result(made_rows(80))
    num_held = 0
    for seed in range(100):
        side = side_of(result, made_rows(80, seed=seed, num_tokens=2))
        drawn = mean_of("ttft")(side, block_indexes(80, 1000, np.random.default_rng(seed)))
        low, high = np.percentile(drawn, (2.5, 97.5))
        num_held += bool(low <= truth_ms <= high)
    assert 85 <= num_held <= 99


@pytest.mark.slow
def test_pairing_cancels_out_differences_between_requests() -> None:
    rows = made_rows(200)
    slower = [
        msgspec.structs.replace(
            row,
            first_s=row.first_s + 0.002,
            last_s=row.last_s + 0.002,
            ended_s=row.ended_s + 0.002,
        )
        for row in rows
        if row.first_s is not None and row.last_s is not None
    ]
    first, second = made_result(rows, arm="off"), made_result(slower, arm="on")
    paired = compare_results(first, second)
    apart = compare_results(first, second, is_paired=False)
    assert paired.num_pairs == 200
    assert (paired.first_label, paired.second_label) == ("off", "on")
    # 2 ms are far less than what requests differ by: only pairs show them.
    assert _named(apart, "TTFT mean").verdict == "no difference seen"
    entry = _named(paired, "TTFT mean")
    assert entry.verdict == "worse"
    assert entry.difference.low == pytest.approx(2.0, abs=1e-3)
    assert entry.difference.high == pytest.approx(2.0, abs=1e-3)
    assert paired.share_faster is not None
    assert paired.share_faster.value == 0.0


def test_pairs_are_by_request_whatever_the_order() -> None:
    rows = made_rows(30)
    moved = [
        msgspec.structs.replace(
            row,
            scheduled_s=row.scheduled_s + (1000.0 if row.index % 2 else 0.0),
            first_s=None
            if row.first_s is None
            else row.first_s + (1000.0 if row.index % 2 else 0.0),
            last_s=None if row.last_s is None else row.last_s + (1000.0 if row.index % 2 else 0.0),
            ended_s=row.ended_s + (1000.0 if row.index % 2 else 0.0),
        )
        for row in rows
    ]
    comparison = compare_results(
        made_result(rows, arm="a"), made_result(moved[1:], arm="b"), is_paired=True
    )
    assert comparison.num_pairs == 29
    # Paired with another one, a request would differ from it, and draws with them.
    difference = _named(comparison, "TTFT mean").difference
    assert difference.value == pytest.approx(0.0, abs=1e-6)
    assert difference.low == pytest.approx(0.0, abs=1e-6)
    assert difference.high == pytest.approx(0.0, abs=1e-6)


def test_unlike_conditions_are_named() -> None:
    first = made_result(made_rows(20), settings={"rate_per_s": 5.0, "salt": "x"}, machine="one")
    second = made_result(
        made_rows(20),
        settings={"rate_per_s": 10.0, "salt": "y"},
        machine="one",
        request_fields={"outrider": {"max_draft_nodes": 0}},
    )
    found = {one.name: one for one in different_conditions(first, second)}
    assert set(found) == {"settings.rate_per_s", "request_fields.outrider.max_draft_nodes"}
    assert not found["settings.rate_per_s"].is_subject
    assert found["request_fields.outrider.max_draft_nodes"].is_subject
    assert found["request_fields.outrider.max_draft_nodes"].first == "not said"
    notes = " ".join(compare_results(first, second).notes)
    assert "settings.rate_per_s" in notes
    assert "max_draft_nodes" not in notes


def test_other_objectives_are_not_compared() -> None:
    first = made_result(made_rows(20))
    second = made_result(made_rows(20), objectives=Objectives(ttft_ms=1.0))
    comparison = compare_results(first, second)
    assert "attainment" not in {entry.name for entry in comparison.differences}
    assert "objectives differ" in " ".join(comparison.notes)


def test_shares_without_variation_still_have_an_interval() -> None:
    first, second = made_result(made_rows(50)), made_result(made_rows(50, seed=3))
    entry = _named(compare_results(first, second), "failed")
    assert (entry.first, entry.second) == (0.0, 0.0)
    # Newcombe (1998), method 10, for 0 of 50 against 0 of 50: Wilson's upper bound is 0.0714.
    assert entry.difference.low == pytest.approx(-0.0714, abs=1e-3)
    assert entry.difference.high == pytest.approx(0.0714, abs=1e-3)


def test_too_few_requests_have_no_intervals() -> None:
    comparison = compare_results(made_result(made_rows(5)), made_result(made_rows(5, seed=1)))
    assert _named(comparison, "TTFT mean").verdict == "too few"
    assert _named(comparison, "TTFT mean").difference.low is None


def test_failures_have_no_latency() -> None:
    comparison = compare_results(
        made_result(made_rows(40)), made_result(made_rows(40, num_failed=40))
    )
    assert not {"TTFT mean", "E2E p50", "ITL p50"} & {one.name for one in comparison.differences}
    assert _named(comparison, "failed").verdict == "worse"
    assert _named(comparison, "attainment").second == 0.0


def test_a_closed_loops_rate_follows_its_latency() -> None:
    def closed(seed: int, slower: float) -> RunComparison:
        # One at a time: each is sent when the one before has ended.
        first, second = (
            made_result(
                made_rows(60, seed=seed + number, slower=factor, rate_per_s=3.0 / factor),
                loop="closed",
            )
            for number, factor in enumerate((1.0, slower))
        )
        return compare_results(first, second)

    entry = _named(closed(0, 2.0), "tokens per second")
    assert entry.verdict == "worse"
    assert entry.ratio is not None
    assert entry.ratio.value == pytest.approx(0.5, rel=0.05)


def test_nothing_measured_cannot_be_compared() -> None:
    whole = made_result(made_rows(5))
    warm_up = [msgspec.structs.replace(row, is_warm_up=True) for row in whole.rows]
    empty = msgspec.structs.replace(whole, rows=warm_up)
    with pytest.raises(ResultError, match="no measured requests"):
        compare_results(whole, empty)
    strangers = made_result(
        [msgspec.structs.replace(row, index=row.index + 99) for row in whole.rows]
    )
    with pytest.raises(ResultError, match="no request in common"):
        compare_results(whole, strangers, is_paired=True)


def test_blocks_are_neighbours() -> None:
    drawn = block_indexes(27, 50, np.random.default_rng(0))
    assert drawn.shape == (50, 27)
    blocks = drawn.reshape(50, 9, 3)
    assert (np.diff(blocks, axis=2) % 27 == 1).all()
    assert set(drawn.ravel().tolist()) == set(range(27))


def test_resampled_quantiles_are_numpys() -> None:
    rows = made_rows(31, num_failed=4)
    side = side_of(made_result(rows), rows)
    draws = block_indexes(31, 20, np.random.default_rng(1))
    for share in (0.5, 0.95):
        expected = np.nanquantile(side.latencies["ttft"][draws], share, axis=1)
        assert np.allclose(quantile_of("ttft", share)(side, draws), expected)


def test_it_is_shown_and_written(tmp_path: Path) -> None:
    comparison = compare_results(
        made_result(made_rows(40), machine="[bold]one"), made_result(made_rows(40, slower=2.0))
    )
    console = Console(file=io.StringIO(), width=180)
    print_comparison(console, comparison)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "TTFT p50" in text
    assert "worse" in text
    assert "[bold]one" in text
    path = tmp_path / "new" / "comparison.json"
    write_comparison(comparison, path)
    assert msgspec.json.decode(path.read_bytes(), type=RunComparison) == comparison
    with pytest.raises(ResultError, match="cannot be written"):
        write_comparison(comparison, path / "under-a-file.json")
