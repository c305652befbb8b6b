"""The capacity planner: its arithmetic, its simulated engine, and what it says of bad input."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from outrider.engine.errors import UnsupportedModelError
from outrider.engine.model.decoder import DecoderModel
from outrider.engine.model.quantised.formats import SCHEMES, Rounding
from outrider.engine.model.read_config import read_model_config
from outrider.gateway.cli import app
from outrider.gateway.engines.backends.step_loop import no_progress
from outrider.gateway.settings.tree import bundled_pair, load_settings
from outrider.gateway.tools.measuring.bench.results import (
    BenchResult,
    Meta,
    Objectives,
    RequestRow,
    write_result,
)
from outrider.gateway.tools.measuring.bench.summary import summarize
from outrider.gateway.tools.measuring.plan.capacity import (
    Goal,
    Variant,
    kv_tokens,
    plan,
    users_that_fit,
)
from outrider.gateway.tools.measuring.plan.check import RunMismatchError, compare
from outrider.gateway.tools.measuring.plan.compose import ground
from outrider.gateway.tools.measuring.plan.curves import MeasuredCurve, RooflineCurve
from outrider.gateway.tools.measuring.plan.devices import DEVICES
from outrider.gateway.tools.measuring.plan.shapes import ModelSizes
from outrider.gateway.tools.measuring.plan.simulate import (
    GuessedStep,
    SimulatedRequest,
    Simulation,
    Speculation,
    System,
    TierModel,
)
from outrider.gateway.tools.measuring.plan.simulation_figures import figures
from outrider.gateway.tools.measuring.plan.workload import (
    LengthPairs,
    measured_lengths,
    usual_lengths,
)

STEP_S = 0.01
# Every pass takes 10 ms, however many rows it has.
FLAT = MeasuredCurve(num_rows=(1, 1000), seconds=(STEP_S, STEP_S))
TIER = TierModel(curve=FLAT, num_kv_tokens=1000)


def alike(num_prompt: int, num_answer: int) -> LengthPairs:
    return measured_lengths(f"{num_prompt} and {num_answer} tokens", [(num_prompt, num_answer)])


def run(
    system: System, asks: list[SimulatedRequest], num_users: int | None = None
) -> list[tuple[float, float]]:
    served = Simulation(system).run(asks, num_users=num_users)
    return [(round(one.ttft_s, 6), round(one.end_s - one.arrived_s, 6)) for one in served]


# ---- sizes -------------------------------------------------------------------------------------


@pytest.mark.slow_cases
@pytest.mark.parametrize("tier", ["small", "large"])
def test_a_models_sizes_are_those_of_the_loaded_model(tier: str) -> None:
    folder = bundled_pair() / tier
    model = DecoderModel.load(folder, dtype="float32")
    shape = ModelSizes.of(read_model_config(folder), dtype="float32")
    # The shape leaves out biases and the norms of queries and keys.
    assert shape.num_parameters == pytest.approx(model.num_parameters, rel=2e-3)
    assert shape.weight_bytes == 4 * shape.num_parameters
    config = model.config
    by_hand = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    assert shape.kv_bytes_per_token == 4 * by_hand
    halved = ModelSizes.of(read_model_config(folder), dtype="bfloat16")
    assert 2 * halved.kv_bytes_per_token == shape.kv_bytes_per_token
    fp8 = ModelSizes.of(read_model_config(folder), dtype="bfloat16", kv_dtype="fp8")
    scales = 2 * config.num_layers * config.num_kv_heads * 4
    assert fp8.kv_bytes_per_token == by_hand + scales
    for scheme in SCHEMES:
        rounded = DecoderModel.load(str(folder), rounding=Rounding(scheme=scheme))
        of_scheme = ModelSizes.of(read_model_config(folder), scheme=scheme)
        assert of_scheme.weight_bytes == pytest.approx(rounded.weight_bytes, rel=0.02)
        assert of_scheme.kv_bytes_per_token == halved.kv_bytes_per_token


SHAPE = ModelSizes(
    name="m", num_parameters=500, weight_bytes=1000, kv_bytes_per_token=10,
    attention_flops_per_key=4, max_context=64,
)  # fmt: skip


def test_memory_left_by_the_weights_is_kv_cache() -> None:
    assert kv_tokens(3000, [SHAPE, SHAPE]) == [50, 50]
    assert kv_tokens(3000, [SHAPE, SHAPE], small_kv_ratio=0.5) == [67, 33]
    assert kv_tokens(3000, [SHAPE], reserve_bytes=500) == [150]
    with pytest.raises(ValueError, match="larger device"):
        kv_tokens(900, [SHAPE])


def test_each_device_has_its_part() -> None:
    """The first holds the small model beside it; together they have the large one once."""
    flags = {"models.large": str(bundled_pair() / "large"), "engine.dtype": "float32"}
    flags["models.small"] = str(bundled_pair() / "small")
    on_one, on_two = (
        ground(
            "l4",
            load_settings(environ={}, flags=flags | {"engine.tensor_parallel": count}),
            acceptance=0.7,
            on_progress=no_progress,
        )
        for count in (1, 2)
    )
    (alone,), (first, second) = on_one.memory, on_two.memory
    small, large = on_one.shapes
    assert on_two.shapes == on_one.shapes
    assert alone.weight_bytes == large.weight_bytes + small.weight_bytes
    assert second.weight_bytes == pytest.approx(large.weight_bytes / 2, rel=0.01)
    assert first.weight_bytes == second.weight_bytes + small.weight_bytes
    assert second.pass_bytes < first.pass_bytes
    assert second.free_bytes > first.free_bytes > 0
    assert on_two.tiers["large"].num_kv_tokens > 1.4 * on_one.tiers["large"].num_kv_tokens
    settings = load_settings(environ={}, flags=flags | {"engine.tensor_parallel": 3})
    with pytest.raises(UnsupportedModelError, match="divide all of it: 1, 2, 4"):
        ground("l4", settings, acceptance=0.7, on_progress=no_progress)


def test_windows_leave_room_for_more_tokens() -> None:
    windowed = replace(SHAPE, windowed_kv_bytes=SHAPE.kv_bytes_per_token // 2, window=100)
    memory = SHAPE.weight_bytes + 20_000 * SHAPE.kv_bytes_per_token
    assert kv_tokens(memory, [SHAPE]) == [20_000]
    (found,) = kv_tokens(memory, [windowed], max_sequences=8)
    kept = 40_000 - found  # tokens of the windowed half, which takes as much as the other
    assert 8 * 100 < kept < 8 * 300 + 2048
    assert kv_tokens(memory, [windowed], max_sequences=1000) == [20_000]


def test_users_hold_their_prompt_and_half_their_answer() -> None:
    lengths = alike(80, 40)
    assert lengths.mean_held == 100
    assert users_that_fit(1000, lengths) == 10
    assert users_that_fit(1000, lengths, window=50) == 20
    # Longer answers are there for longer, so that they weigh more.
    mixed = measured_lengths("two", [(0, 10), (0, 30)])
    assert mixed.mean_held == pytest.approx((6 * 10 + 16 * 30) / 40)


def test_lengths_are_cut_to_the_context() -> None:
    cut = measured_lengths("x", [(100, 50), (30, 50)]).within(64)
    assert cut.prompts.tolist() == [63, 30]
    assert cut.answers.tolist() == [1, 34]


def test_usual_lengths_have_their_means() -> None:
    lengths = usual_lengths(300, 120, np.random.default_rng(0), count=20_000)
    assert lengths.mean_prompt == pytest.approx(300, rel=0.03)
    assert lengths.mean_answer == pytest.approx(120, rel=0.03)


# ---- step times --------------------------------------------------------------------------------


def test_a_roofline_is_the_longer_of_reading_and_computing() -> None:
    curve = RooflineCurve(weight_s=1.0, row_s=0.1, key_s=0.001, launch_s=0.5)
    assert curve(0, 100) == 0.0
    assert curve(1, 0) == pytest.approx(1.5)
    assert curve(10, 0) == pytest.approx(1.5)
    assert curve(20, 0) == pytest.approx(2.5)
    assert curve(20, 10) == pytest.approx(2.7)


def test_a_measured_curve_goes_through_its_points() -> None:
    curve = MeasuredCurve(
        num_rows=(1, 4, 8), seconds=(1.0, 1.0, 3.0), context=100.0, row_context_s=0.01
    )
    assert [curve(rows, 100.0) for rows in (1, 2, 4, 6, 8, 10)] == [1, 1, 1, 2, 3, 4]
    assert curve(4, 110.0) == pytest.approx(1.4)
    assert curve(1, 0.0) == 0.5  # never less than half of the smallest


def test_data_sheets_are_in_their_units() -> None:
    h100 = DEVICES["h100"].curve(SHAPE)
    assert h100.weight_s == pytest.approx(1000 / (3.35e12 * 0.75))


# ---- the simulated engine ----------------------------------------------------------------------


def test_one_request_alone() -> None:
    # The prompt's pass gives the first token, each further pass one more.
    assert run(System(large=TIER), [SimulatedRequest(num_prompt=5, num_answer=4)], 1) == [
        (0.01, 0.04)
    ]


def test_prompts_are_cut_to_the_row_budget() -> None:
    system = System(large=TIER, max_rows=4)
    assert run(system, [SimulatedRequest(num_prompt=10, num_answer=1)], 1) == [(0.03, 0.03)]


def test_decoding_continues_beside_a_prompt() -> None:
    asks = [
        SimulatedRequest(num_prompt=1, num_answer=10, at_s=0.0),
        SimulatedRequest(num_prompt=1, num_answer=2, at_s=0.02),
    ]
    assert run(System(large=TIER), asks) == [(0.01, 0.02), (0.01, 0.1)]


def test_places_and_kv_are_waited_for() -> None:
    asks = [SimulatedRequest(num_prompt=1, num_answer=5, at_s=0.0)] * 2
    one_place = System(large=TIER, max_sequences=1)
    assert run(one_place, asks) == [(0.01, 0.05), (0.06, 0.1)]
    tight = System(large=TierModel(curve=FLAT, num_kv_tokens=11))
    assert run(tight, asks) == [(0.01, 0.05), (0.06, 0.1)]
    # With a window, both fit.
    both = System(large=TierModel(curve=FLAT, num_kv_tokens=11), window=5)
    assert run(both, asks) == [(0.01, 0.05)] * 2


def test_users_ask_again_when_they_are_answered() -> None:
    asks = [SimulatedRequest(num_prompt=1, num_answer=3)] * 4
    served = Simulation(System(large=TIER)).run(asks, num_users=2)
    assert [round(one.end_s, 6) for one in served] == [0.03, 0.03, 0.06, 0.06]


def test_guessing_pays_where_the_small_pass_is_cheap() -> None:
    cheap = TierModel(
        curve=MeasuredCurve(num_rows=(1, 1000), seconds=(1e-5, 1e-5)), num_kv_tokens=1000
    )
    plain, guessing = (
        System(large=TIER, small=cheap, speculation=speculation)
        for speculation in (None, Speculation(acceptance=0.8))
    )
    asks = [SimulatedRequest(num_prompt=1, num_answer=100)]
    (slow,), (fast,) = (Simulation(system).run(asks, num_users=1) for system in (plain, guessing))
    # Nearly 1 / (1 - 0.8) tokens a step.
    assert 4.0 < slow.tpot_s / fast.tpot_s < 5.0
    dear = System(large=TIER, small=TIER, speculation=Speculation(acceptance=0.3))
    assert Simulation(dear).run(asks, num_users=1)[0].tpot_s == pytest.approx(slow.tpot_s)


def test_measured_steps_are_believed() -> None:
    steps = tuple(
        GuessedStep(num_decoding=n, seconds=s, emitted=e, num_small_passes=2.0)
        for n, s, e in ((1, 0.02, 4.0), (3, 0.04, 2.0))
    )
    guessing = Speculation(acceptance=0.0, measured=steps)
    plain_s = {3: 0.01, 6: 0.03}.__getitem__
    between, beyond = guessing.step_of(2, plain_s), guessing.step_of(6, plain_s)
    assert (between.seconds, between.emitted) == (pytest.approx(0.03), 3.0)
    assert (beyond.seconds, beyond.emitted) == (pytest.approx(0.12), 2.0)
    system = System(large=TIER, small=TIER, speculation=guessing)
    (alone,) = Simulation(system).run([SimulatedRequest(num_prompt=1, num_answer=9)], num_users=1)
    # The prompt's pass gives one token, then two steps of four.
    assert alone.end_s == pytest.approx(0.01 + 2 * 0.02)


def test_emitted_tokens_are_the_geometric_sum() -> None:
    assert Speculation(acceptance=0.5).emitted(2) == pytest.approx(1 + 0.5 + 0.25)


def test_the_small_tier_is_not_held_up_more_than_by_its_steps() -> None:
    quick = TierModel(
        curve=MeasuredCurve(num_rows=(1, 1000), seconds=(0.001, 0.001)), num_kv_tokens=1000
    )
    served = Simulation(System(large=TIER, small=quick)).run(
        [SimulatedRequest(num_prompt=1, num_answer=5, tier="small")], num_users=1
    )
    assert served[0].tpot_s == pytest.approx(0.001)


@given(
    lengths=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 30)), min_size=1, max_size=20),
    num_users=st.integers(1, 8),
    max_rows=st.integers(1, 64),
)
def test_every_simulated_request_is_answered(
    lengths: list[tuple[int, int]], num_users: int, max_rows: int
) -> None:
    asks = [SimulatedRequest(num_prompt=p, num_answer=a) for p, a in lengths]
    simulation = Simulation(System(large=TIER, max_rows=max_rows))
    served = simulation.run(asks, num_users=num_users)
    assert sorted((one.num_prompt, one.num_answer) for one in served) == sorted(lengths)
    assert all(0 < one.ttft_s <= one.end_s - one.arrived_s + 1e-9 for one in served)
    assert all(queue.num_kv == 0 and not queue.running for queue in simulation._queues.values())


@pytest.mark.parametrize(
    ("ask", "match"),
    [
        (SimulatedRequest(num_prompt=990, num_answer=11), "does not fit"),
        (SimulatedRequest(num_prompt=1, num_answer=1, tier="small"), "not planned"),
    ],
)
def test_requests_that_can_never_be_served_are_refused(ask: SimulatedRequest, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Simulation(System(large=TIER)).run([ask], num_users=1)


# ---- plans -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_highest_rate_lies_where_the_queue_begins_to_grow() -> None:
    # 10 tokens at 10 ms, two at a time: 20 requests a second at most.
    system = System(large=TIER, max_sequences=2)
    variant = Variant(name="two places", system=system)
    found = plan(variant, alike(1, 10), Goal(ttft_s=0.5), usd_per_hour=3.6, concurrencies=(1, 2, 4))
    rates = [round(line.figures.requests_per_s, 1) for line in found.lines]
    assert rates == [10.0, 20.0, 20.0]
    assert found.best_rate_per_s is not None
    assert 14 < found.best_rate_per_s < 20.5
    # 0.001 USD a second, 100 tokens a second.
    assert found.lines[0].usd_per_million == pytest.approx(10.0)
    hopeless = plan(variant, alike(1, 10), Goal(ttft_s=0.001), concurrencies=(1,))
    assert (hopeless.best_rate_per_s, hopeless.best) == (None, None)


def test_figures_leave_out_the_beginning() -> None:
    asks = [SimulatedRequest(num_prompt=1, num_answer=5)] * 10
    found = figures(Simulation(System(large=TIER)).run(asks, num_users=1), ttft_s=0.02)
    assert found.requests_per_s == pytest.approx(20.0)
    assert found.tpot_p50_s == pytest.approx(0.01)
    assert found.attainment == 1.0


def result(rows: list[RequestRow]) -> BenchResult:
    objectives = Objectives()
    meta = Meta(
        url="http://x", model="large", started_at="", ended_at="", loop="closed", workload={},
        settings={"concurrency": 1}, request_fields={}, versions={}, machine="m",
    )  # fmt: skip
    return BenchResult(
        meta=meta,
        objectives=objectives,
        summary=summarize(rows, objectives, loop="closed"),
        rows=rows,
    )


ROWS = [
    RequestRow(
        index=i, scheduled_s=i * 0.05, sent_s=i * 0.05, first_s=i * 0.05 + 0.02,
        last_s=i * 0.05 + 0.05, ended_s=i * 0.05 + 0.05, num_prompt_tokens=4,
        num_completion_tokens=4, tier="large",
    )
    for i in range(10)
]  # fmt: skip


def test_a_plan_beside_a_measured_run() -> None:
    compared = {one.name: one for one in compare(System(large=TIER), result(ROWS))}
    assert compared["TTFT p50"].predicted == pytest.approx(10.0)
    assert compared["TTFT p50"].error == pytest.approx(-0.5)
    assert compared["TPOT p50"].error == pytest.approx(0.0)
    with pytest.raises(RunMismatchError, match="no successful request"):
        compare(System(large=TIER), result([RequestRow(index=0, scheduled_s=0, ended_s=1)]))


def said(*arguments: str) -> tuple[int, str]:
    outcome = CliRunner().invoke(app, ["plan", *arguments])
    return outcome.exit_code, outcome.output


@pytest.mark.slow
def test_the_command_by_a_data_sheet(tmp_path: Path) -> None:
    measured = tmp_path / "run.json"
    write_result(result(ROWS), measured)
    file, page = tmp_path / "plan.json", tmp_path / "new" / "plan.html"
    code, text = said(
        "--device", "h100", "--usd-per-hour", "2.5", "--window", "256", "--check", str(measured),
        "--json", str(file), "--html", str(page),
    )  # fmt: skip
    assert code == 0, text
    for words in ("large model alone", "with speculation", "small model answers 50%", "assumed"):
        assert words in " ".join(text.split())
    document = json.loads(file.read_text())
    assert document["variants"][0]["name"] == "large model alone"
    assert document["window"] == 256
    assert {one["name"] for one in document["compared"]} == {"TTFT p50", "TPOT p50", "tokens"}
    html = page.read_text(encoding="utf-8")
    assert html.count("<svg") == 2
    for words in ("Capacity of", "large model alone", "beside the measured run", "assumed"):
        assert words in html
    assert "[bold]" not in html


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--device", "abacus"), "h100"),
        (("--slo", "ttft=1"), "ttft_ms"),
        (("--slo", "ttft_ms=soon"), "positive number"),
        (("--trace", "nowhere.csv"), "cannot be read"),
        (("--check", "nowhere.json"), "nowhere.json"),
        (("--device", "h100", "--set", "engine"), "section.name=value"),
    ],
)
def test_what_is_wrong_is_said(arguments: tuple[str, ...], words: str) -> None:
    code, text = said(*arguments)
    assert code == 2, text
    assert words in " ".join(text.split())


def test_a_missing_model_is_refused_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(
        sys.modules, "outrider.gateway.tools.measuring.plan.compose", None
    )  # its import would fail
    code, text = said("--device", "h100", "--large", "./nowhere")
    assert code == 2, text
    assert "models.large = './nowhere': no such folder" in " ".join(text.split())


@pytest.mark.slow
def test_a_narrow_terminal_cuts_no_price(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    code, text = said("--device", "h100", "--usd-per-hour", "2.5", "--answer-tokens", "20")
    assert code == 0, text
    assert "USD/M tokens" in text
    assert "…" not in text
