import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.shared.driving import make_requests
from benchmarks.speculation import bench_load
from benchmarks.speculation.load import ClosedLoop, Window
from benchmarks.speculation.load_plot import draw
from outrider.engine.request import EngineRequest
from tests.benchmarks.benches import make_bench, make_prompts
from tests.engines import assert_idle

PROMPTS = make_prompts(8)


def clock() -> Iterator[float]:
    """A second a look."""
    return itertools.count(0.0, 1.0)


class Requests:
    """Makes requests and remembers their senders."""

    def __init__(self, *, max_tokens: int = 12) -> None:
        self.sent: list[tuple[int, int]] = []
        self._max_tokens = max_tokens

    def __call__(self, client: int, number: int) -> EngineRequest:
        self.sent.append((client, number))
        (request,) = make_requests(
            [PROMPTS[client % 8]], tier="large", max_tokens=self._max_tokens, speculate=False
        )
        return request


def make_loop(requests: Requests) -> tuple[ClosedLoop, bench_load.Bench]:
    bench = make_bench()
    return ClosedLoop(bench, requests, clock=clock().__next__), bench


def test_each_client_sends_one_request_after_the_other() -> None:
    requests = Requests()
    loop, bench = make_loop(requests)
    loop.resize(3)
    loop.settle()
    window = loop.run(60.0)
    sent = {client: [n for c, n in requests.sent if c == client] for client in range(3)}
    for numbers in sent.values():
        assert numbers == list(range(len(numbers)))
        assert len(numbers) > 1
    assert window.num_tokens > 3 * 12
    assert bench.engine.stats().tiers["large"].num_running <= 3
    loop.stop()
    assert_idle(bench.engine)


def test_clients_join_and_leave_while_others_are_served() -> None:
    requests = Requests(max_tokens=40)
    loop, bench = make_loop(requests)
    loop.resize(1)
    loop.settle()
    loop.resize(5)
    rush = loop.settle()
    assert rush.num_tokens >= 5  # each of them, and the first client meanwhile
    assert bench.engine.stats().tiers["large"].num_running == 5
    loop.resize(1)
    assert bench.engine.stats().tiers["large"].num_running == 1
    window = loop.run(30.0)
    assert {client for client, _ in requests.sent[5:]} <= {0}
    assert window.num_tokens <= 31  # one client's, a token a step at most
    loop.stop()
    assert_idle(bench.engine)


def test_pace_and_gaps_are_those_within_the_window() -> None:
    loop, _ = make_loop(Requests(max_tokens=30))
    loop.resize(2)
    loop.settle()
    window = loop.run(40.0)
    # The clock ticks twice a step: once for the events, once for the window's end.
    assert set(window.gap_s) == {2.0}
    assert len(window.token_s) >= 2
    assert all(pace == pytest.approx(2.0) for pace in window.token_s)
    assert window.tokens_per_s == pytest.approx(1.0, rel=0.2)
    loop.stop()


def test_a_short_stay_has_no_pace() -> None:
    loop, _ = make_loop(Requests(max_tokens=30))
    loop.resize(1)
    loop.settle()
    assert loop.run(6.0).token_s == []
    loop.stop()


def window(pace: float, *, num_tokens: int = 20) -> Window:
    return Window(
        wall_s=pace * num_tokens, num_tokens=num_tokens, token_s=[pace, 2 * pace], gap_s=[3 * pace]
    )


@pytest.mark.slow
def test_ratios_say_how_much_faster_speculation_is() -> None:
    on, off = [window(0.5), window(0.5)], [window(1.0), window(1.0)]
    ratios = bench_load.comparison(on, off)
    for part in ("tokens_per_s", "token_p50", "token_p99"):
        ratio = ratios[part]
        assert ratio is not None
        assert ratio.estimate == pytest.approx(2.0), part
    assert ratios["gap_p99"] is not None
    assert ratios["gap_p99"].estimate == pytest.approx(0.5)


def test_points_are_powers_of_two_up_to_the_largest() -> None:
    assert bench_load.client_numbers(64) == [1, 2, 4, 8, 16, 32, 64]
    assert bench_load.client_numbers(6) == [1, 2, 4, 6]
    assert bench_load.client_numbers(2) == [1, 2]


@pytest.mark.slow
def test_the_plot_is_drawn_also_where_figures_are_missing(tmp_path: Path) -> None:
    empty = Window(wall_s=1.0, num_tokens=3)
    rounds = {
        f"{name} {side}": [
            {phase: empty if phase == "rush" else window(pace) for phase in phases}
            for _ in range(2)
        ]
        for name, phases in (("2", ("2",)), ("step", bench_load.PHASES))
        for side, pace in (("on", 0.5), ("off", 1.0))
    }
    step = bench_load.by_phase(rounds, "step")
    assert step["rush"]["ratio"]["token_p50"] is None
    points = {"1": step["before"], **bench_load.by_phase(rounds, "2"), "4": step["full"]}
    path = tmp_path / "load.png"
    draw({"points": points, "step": step}, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert bench_load.recovery(rounds)["on"].estimate == pytest.approx(1.0)
