import math
from pathlib import Path

import pytest

from benchmarks.shared.slo_trace import (
    Arrival,
    Objectives,
    Outcome,
    TraceClass,
    attainment,
    classed,
    find_trace,
    prompt_tokens,
    rate_at,
    read_trace,
    scaled,
    thinned,
)

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
WANTED = Objectives(ttft_s=1.0, inter_token_s=0.1, batch_end_s=10.0)


def write(folder: Path, lines: str) -> Path:
    path = folder / "trace.csv"
    path.write_text(lines, encoding="utf-8")
    return path


def many(count: int = 1000) -> list[Arrival]:
    return [
        Arrival(at_s=0.5 * number, num_prompt=100 + number, num_answer=1 + number % 50)
        for number in range(count)
    ]


def outcome(
    ttft_s: float | None, end_s: float | None, num_tokens: int, name: TraceClass = "short-chat"
) -> Outcome:
    return Outcome(trace_class=name, ttft_s=ttft_s, end_s=end_s, num_tokens=num_tokens)


def test_a_trace_is_read_in_order_of_time_from_zero(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        HEADER
        + "2023-11-16 18:15:50.9951690,396,109\n2023-11-16 18:15:46.6805900,374,44\n"
        + "2023-11-16 18:26:00.0000000,5,5\n",
    )
    first, second = read_trace(path, first_s=600)
    assert (first.at_s, first.num_prompt, first.num_answer) == (0.0, 374, 44)
    assert second.at_s == pytest.approx(4.314579)


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ("when,what\n1,2\n", "must name TIMESTAMP"),
        (HEADER, "no request"),
        (HEADER + "yesterday,1,1\n", "trace.csv:2"),
        (HEADER + "2023-11-16 18:15:46,-3,1\n", "trace.csv:2"),
        (HEADER + "2023-11-16 18:15:46,3\n", "trace.csv:2"),
    ],
)
def test_an_invalid_trace_is_reported(tmp_path: Path, lines: str, told: str) -> None:
    with pytest.raises(SystemExit, match=told):
        read_trace(write(tmp_path, lines), first_s=600)


def test_an_absent_trace_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("OUTRIDER_DATA", raising=False)
    with pytest.raises(SystemExit, match="OUTRIDER_DATA is not set"):
        find_trace(Path("traces/nowhere.csv"))
    monkeypatch.setenv("OUTRIDER_DATA", str(tmp_path))
    path = write(tmp_path, HEADER)
    assert find_trace(Path("trace.csv")) == path


def test_scaling_keeps_the_shape() -> None:
    arrivals = many()
    small = scaled(arrivals, context=256, rate=8.0)
    assert max(one.num_prompt + one.num_answer for one in small) <= 256
    assert min(one.num_answer for one in small) == 1
    assert len(small) / small[-1].at_s == pytest.approx(8.0)
    assert small[500].at_s / small[-1].at_s == pytest.approx(500 / 999)
    assert scaled(arrivals, context=10**6, rate=1.0)[7].num_prompt == 107


def test_classes_and_thinning_are_fixed_by_the_seed() -> None:
    arrivals = classed(many(), batch_share=0.3, seed=0)
    assert arrivals == classed(many(), batch_share=0.3, seed=0)
    assert sum(one.trace_class == "batch" for one in arrivals) == pytest.approx(300, abs=50)
    few = thinned(arrivals, share=0.1, seed=0)
    assert few == thinned(arrivals, share=0.1, seed=0)
    assert len(few) == pytest.approx(100, abs=35)
    assert set(few) <= set(arrivals)


def test_prompts_have_their_lengths_and_differ() -> None:
    corpus = list(range(1000))
    prompts = list(prompt_tokens(many(40), corpus))
    assert [len(prompt) for prompt in prompts] == [100 + number for number in range(40)]
    assert len(set(prompts)) == 40
    (long,) = prompt_tokens([Arrival(at_s=0.0, num_prompt=2500, num_answer=1)], corpus)
    assert len(long) == 2500


def test_objectives_are_met_all_together_or_not_at_all() -> None:
    assert outcome(1.0, 2.0, 11).meets(WANTED)
    assert not outcome(1.1, 1.5, 11).meets(WANTED)
    assert not outcome(0.5, 2.0, 11).meets(WANTED)
    assert outcome(0.5, 0.5, 1).meets(WANTED)
    assert not outcome(None, None, 0).meets(WANTED)
    assert outcome(9.0, 10.0, 2, "batch").meets(WANTED)
    assert not outcome(0.1, 10.1, 200, "batch").meets(WANTED)
    assert attainment([outcome(1.0, 1.5, 6), outcome(None, None, 0)], WANTED) == 0.5
    assert math.isnan(attainment([], WANTED))


def test_the_rate_at_a_target_lies_between_the_points() -> None:
    points = [(1.0, 1.0), (2.0, 0.95), (3.0, 0.85), (4.0, 0.2)]
    assert rate_at(points, 0.9) == pytest.approx(2.5)
    assert rate_at(points, 0.1) == 4.0
    assert rate_at(points[2:], 0.9) is None
    assert rate_at([(1.0, 0.9), (2.0, 0.5)], 0.9) == pytest.approx(1.0)
