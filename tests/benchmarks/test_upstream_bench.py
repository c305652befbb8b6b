import asyncio
import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
import uvloop

from benchmarks.chaos.bench_upstream_faults import (
    CASES,
    Options,
    Plan,
    figures,
    make_plan,
    run_window,
)
from benchmarks.chaos.upstream_faults import FAULTS, Judged, Verdict, judge, tally
from benchmarks.gateway import bench_upstream
from benchmarks.shared.mock_upstream import (
    MockScript,
    MockUpstream,
    Toxic,
    answer_text,
    mock_in_thread,
)
from benchmarks.shared.toxics import ToxicKind
from benchmarks.shared.upstream_load import (
    Clients,
    Exchange,
    arrivals,
    closed_loop,
    http_request,
    open_loop,
    transit,
)
from benchmarks.shared.upstream_servers import bucket_quantile
from benchmarks.shared.windows import Window, whole_figures

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Name trees."}]}
STREAMED = CHAT | {"stream": True}
SCRIPT = MockScript(num_pieces=12)
TEXT = answer_text(SCRIPT, CHAT)


def asked(script: MockScript, document: dict[str, Any], *, timeout_s: float = 5.0) -> Exchange:
    """Return what a mock with that script answers to the load's own client."""

    async def body() -> Exchange:
        async with MockUpstream(script) as mock:
            clients = Clients(mock.port)
            try:
                return await clients.ask(http_request(document), timeout_s=timeout_s)
            finally:
                clients.close()

    return uvloop.run(body())


def verdict_of(script: MockScript, document: dict[str, Any], *, timeout_s: float = 5.0) -> Verdict:
    exchange = asked(script, document, timeout_s=timeout_s)
    return judge(exchange, [TEXT], limit_s=5.0).verdict


# ---- the client -------------------------------------------------------------------------------


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_one_connection_serves_request_after_request(run: Callable[..., None]) -> None:
    async def body() -> None:
        async with MockUpstream(SCRIPT) as mock:
            clients = Clients(mock.port)
            for document in (CHAT, STREAMED, CHAT):
                exchange = await clients.ask(http_request(document))
                assert exchange.status == 200
                assert exchange.failure == ""
                assert exchange.sent_ns < exchange.headers_ns <= exchange.ended_ns
            assert mock.num_accepted == 1
            clients.close()

    run(body())


def test_events_get_the_moment_of_their_last_byte() -> None:
    exchange = Exchange(parts=[(1, b"data: a\n"), (2, b"\ndata: b\n\nda"), (3, b"ta: c\n\n")])
    assert list(exchange.events()) == [(2, b"data: a"), (2, b"data: b"), (3, b"data: c")]


@pytest.mark.uvloop
async def test_requests_of_an_open_loop_do_not_wait_for_answers() -> None:
    script = MockScript(first_token_delay_s=0.2)
    async with MockUpstream(script) as mock:
        clients = Clients(mock.port)
        exchanges = await open_loop(clients, http_request(CHAT), [0.0, 0.01, 0.02])
        clients.close()
        assert max(e.sent_ns for e in exchanges) < min(e.ended_ns for e in exchanges)
        assert [e.sent_ns for e in exchanges] == sorted(e.sent_ns for e in exchanges)
        assert mock.num_requests == 3


@pytest.mark.uvloop
async def test_each_client_of_a_closed_loop_has_one_request_under_way() -> None:
    async with MockUpstream(MockScript(first_token_delay_s=0.005)) as mock:
        clients = Clients(mock.port)
        seconds, exchanges = await closed_loop(
            clients, http_request(CHAT), num_clients=3, seconds=0.1
        )
        assert mock.num_connections <= 3
        clients.close()
        assert seconds >= 0.1
        assert len(exchanges) == mock.num_requests > 3


def test_arrivals_are_a_poisson_process_and_the_seed_decides() -> None:
    moments = arrivals(100.0, 50.0, seed=3)
    assert moments == arrivals(100.0, 50.0, seed=3) != arrivals(100.0, 50.0, seed=4)
    assert moments == sorted(moments)
    assert moments[-1] < 50.0
    assert len(moments) == pytest.approx(5000, rel=0.05)
    gaps = [b - a for a, b in itertools.pairwise(moments)]
    # Of an exponential distribution the standard deviation is the mean.
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert deviation == pytest.approx(mean, rel=0.1)


def test_transit_leaves_the_servers_own_delays_out() -> None:
    slow = MockScript(num_pieces=3, is_stamped=True, first_token_delay_s=0.2, gap_s=0.1)
    seen = transit(asked(slow, STREAMED))
    assert seen["failure"] == ""
    assert len(seen["back"]) == 3
    # Microseconds: ways on loopback, not the 0.2 s and 0.1 s between them.
    assert 0 < seen["there"] < 100_000
    assert seen["first"] == pytest.approx(seen["there"] + seen["back"][0], abs=2)
    assert seen["last"] == pytest.approx(seen["there"] + seen["back"][2], abs=2)


@pytest.mark.parametrize("kind", ["reset", "status"])
def test_transit_of_a_failure_says_which(kind: ToxicKind) -> None:
    seen = transit(asked(MockScript(is_stamped=True, toxic=Toxic(kind=kind)), STREAMED))
    assert seen == {"failure": "reset" if kind == "reset" else "status 500"}


# ---- figures ----------------------------------------------------------------------------------


def exchange(there: int, back: list[int]) -> dict[str, Any]:
    first, last = there + back[0], there + back[-1]
    return {"failure": "", "there": there, "first": first, "last": last, "back": back}


def test_added_time_is_paired_and_leaves_failures_out() -> None:
    direct = bench_upstream.streams_of(
        [exchange(100, [50, 50]), exchange(200, [50, 50]), exchange(100, [50, 50])], busy_s=0.3
    )
    through = bench_upstream.streams_of(
        [exchange(1100, [150, 250]), {"failure": "reset"}, exchange(2100, [150, 250])], busy_s=0.6
    )
    found = bench_upstream.stream_figures([direct], [through])
    assert (found["num_requests"], found["num_failed"], found["failures"]) == (3, 1, ["reset"])
    assert found["added_first_token_s"].minimum == pytest.approx(1100e-6)
    assert found["added_first_token_s"].maximum == pytest.approx(2100e-6)
    assert found["added_last_token_s"].median == pytest.approx(1700e-6)
    assert found["added_chunk_p99_s"] == pytest.approx(200e-6)
    assert found["busy_s"] == pytest.approx(0.2)


def result(*, added_us: int, rate: float) -> tuple[dict[str, Any], dict[str, Any]]:
    direct = bench_upstream.streams_of([exchange(100, [50, 50])], busy_s=0.1)
    through = bench_upstream.streams_of([exchange(100 + added_us, [60, 60])], busy_s=0.1)
    whole = Window(seconds=1.0, latencies_s=[0.1] * int(rate), num_failed=0, busy_s=1.0)
    return (
        bench_upstream.stream_figures([direct], [through]),
        whole_figures([whole]),
    )


def test_goals_are_judged_by_their_bounds() -> None:
    (streams, wholes), (slow, few) = result(added_us=900, rate=700), result(added_us=5000, rate=130)
    results: dict[str, Any] = {
        "streams": {"outrider": streams, "litellm": slow},
        "wholes": {"outrider": wholes, "litellm": few},
        "rival": {"50/s": {"outrider": streams, "litellm": slow}},
    }
    rows = {goal.words: goal.is_met for goal in bench_upstream.goals(results)}
    assert all(rows.values()), rows
    worse = results | {"streams": {"outrider": slow}, "wholes": {"outrider": few, "litellm": few}}
    rows = {goal.words: goal.is_met for goal in bench_upstream.goals(worse)}
    assert [words for words, is_met in rows.items() if is_met] == [
        "added per chunk, p99 ms",
        "added p99 over LiteLLM's, 50/s",
    ]


def test_a_quantile_of_buckets_counts_only_what_came_in_between() -> None:
    before = {0.001: 100.0, 0.01: 100.0, float("inf"): 100.0}
    after = {0.001: 150.0, 0.01: 199.0, float("inf"): 200.0}
    assert bucket_quantile(before, after, 0.5) == 0.001
    assert bucket_quantile(before, after, 0.99) == 0.01
    assert bucket_quantile(before, after, 1.0) == float("inf")
    with pytest.raises(ValueError, match="nothing"):
        bucket_quantile(after, after, 0.5)


# ---- faults -----------------------------------------------------------------------------------


@pytest.mark.parametrize("document", [CHAT, STREAMED], ids=["whole", "streamed"])
def test_a_right_answer_is_answered_and_anothers_is_not(document: dict[str, Any]) -> None:
    assert verdict_of(SCRIPT, document) == "answered"
    assert verdict_of(MockScript(pieces=("Something", " else")), document) == "wrong_text"
    shorter = MockScript(num_pieces=11)
    assert verdict_of(shorter, document) == "wrong_text"
    assert verdict_of(MockScript(num_pieces=13), document) == "wrong_text"


STREAM_VERDICTS: dict[ToxicKind, Verdict] = {
    "reset": "broken",
    "status": "refused",
    "stall": "hung",
    "garbage": "broken",
    "half_closed": "broken",
    "no_done": "broken",
    "content_type": "broken",
    "long_line": "broken",
    "error_event": "refused",
}


@pytest.mark.parametrize("kind", STREAM_VERDICTS)
def test_a_client_without_a_gateway_sees_the_fault(kind: ToxicKind) -> None:
    toxic = Toxic(kind=kind, after_events=3, size_bytes=100_000)
    script = MockScript(num_pieces=12, toxic=toxic)
    timeout_s = 0.1 if kind == "stall" else 5.0
    assert verdict_of(script, STREAMED, timeout_s=timeout_s) == STREAM_VERDICTS[kind]


def test_repeated_text_is_seen_even_where_the_stream_then_fails() -> None:
    pieces = ("Oak", " elm", " elm")
    script = MockScript(pieces=pieces, toxic=Toxic(kind="error_event", after_events=3))
    exchange = asked(script, STREAMED)
    assert judge(exchange, ["Oak elm fir"], limit_s=5.0).verdict == "wrong_text"


def test_an_answer_behind_its_deadline_is_late() -> None:
    exchange = asked(MockScript(num_pieces=12, first_token_delay_s=0.05), STREAMED)
    assert judge(exchange, [TEXT], limit_s=0.01).verdict == "late"
    assert judge(exchange, [TEXT], limit_s=5.0).verdict == "answered"


@pytest.mark.parametrize("case", CASES)
def test_a_plan_asks_something_else_each_time(case: str) -> None:
    options = Options(rate=20.0, seconds=2.0, seed=1, tokens=8, deadline_s=2.0)
    plan = make_plan(options, case)
    assert len({json.dumps(document["messages"]) for document in plan.documents}) > 10
    assert {document["stream"] for document in plan.documents} == {True, False}
    assert all(document["outrider"]["deadline_ms"] == 2000.0 for document in plan.documents)


def test_a_window_against_the_mock_itself() -> None:
    options = Options(rate=100.0, seconds=0.2, seed=1, tokens=8, deadline_s=2.0)
    plan = make_plan(options, "replica")
    script = MockScript(num_pieces=8)
    with mock_in_thread(script) as mock:

        def window() -> list[Judged]:
            return run_window(
                mock.mock.port, plan, lambda document: {answer_text(script, document)}
            )

        healthy = window()
        next(fault for fault in FAULTS if fault.name == "500").strike(mock, script)
        struck = window()
    found = figures(plan, healthy, struck)
    assert found["healthy"]["answered"] == len(plan.documents) > 5
    assert found["struck"]["refused"] == len(plan.documents)
    assert found["added_first_text_median_s"] is None
    assert found["is_good"]


def test_one_bad_answer_spoils_a_window() -> None:
    def judged(verdict: Verdict) -> Judged:
        return Judged(verdict=verdict, text="", first_text_s=0.1, total_s=0.2, status=200)

    plan = Plan(documents=[STREAMED, STREAMED], moments_s=[0.0, 0.1], deadline_s=1.0)
    good = [judged("answered"), judged("refused")]
    assert figures(plan, good, good)["is_good"]
    bad: tuple[Verdict, ...] = ("hung", "late", "broken", "wrong_text")
    for verdict in bad:
        assert not figures(plan, good, [judged("answered"), judged(verdict)])["is_good"]
        assert tally([judged(verdict)])[verdict] == 1


def test_every_fault_strikes() -> None:
    with mock_in_thread(SCRIPT) as mock:
        for fault in FAULTS:
            fault.strike(mock, SCRIPT)
            assert mock.mock.is_listening != (fault.toxic is None)
            mock.listen()
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
