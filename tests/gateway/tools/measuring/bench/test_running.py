import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from benchmarks.shared.mock_upstream import MockScript, MockUpstream, Toxic
from outrider.draft.training.tasks.families import PLAIN_FAMILIES
from outrider.gateway.tools.measuring.bench.client import TargetError, TargetSettings
from outrider.gateway.tools.measuring.bench.plan import BenchPlan, LoadSettings, PlanError
from outrider.gateway.tools.measuring.bench.results import BenchResult, Objectives
from outrider.gateway.tools.measuring.bench.runner import Session, run_bench
from outrider.gateway.tools.measuring.bench.search import SearchSettings
from outrider.gateway.tools.measuring.bench.workloads import WorkloadSettings

QUICK = MockScript(num_pieces=6, first_token_delay_s=0.005, gap_s=0.001)
LOAD = LoadSettings(rate_per_s=100.0, duration_s=None, num_requests=12)
# What the look at the target asks for has this length, and so is left alone by faults.
PROBE_TOKENS = 4


def plan_for(url: str, **more: Any) -> BenchPlan:
    plan = BenchPlan(
        target=TargetSettings(url=url, timeout_s=2.0, stall_s=1.0, connect_s=1.0),
        workload=WorkloadSettings(max_tokens=16),
        load=LOAD,
    )
    return replace(plan, **more)


def only_measured(script: MockScript) -> Callable[[Any], MockScript]:
    def choose(request: Any) -> MockScript:
        document: Mapping[str, Any] = request.document
        return QUICK if document.get("max_tokens") == PROBE_TOKENS else script

    return choose


def measured(script: Any, **more: Any) -> BenchResult:
    async def run() -> BenchResult:
        async with MockUpstream(script) as mock:
            target = more.pop("target", {})
            plan = plan_for(mock.url, **more)
            return await run_bench(replace(plan, target=replace(plan.target, **target)))

    return asyncio.run(run())


def test_an_open_loop_measures_the_targets_latencies() -> None:
    script = MockScript(num_pieces=6, first_token_delay_s=0.05, gap_s=0.01)
    result = measured(script, objectives=Objectives(ttft_ms=1500.0, inter_token_ms=500.0))
    summary = result.summary
    assert (summary.num_requests, summary.num_completed) == (12, 12)
    assert summary.ttft_ms is not None
    assert summary.tpot_ms is not None
    assert summary.ttft_ms.minimum >= 50.0
    assert summary.e2e_ms is not None
    assert summary.e2e_ms.minimum >= 100.0
    assert 2.0 <= summary.tpot_ms.p50.value <= 50.0
    assert summary.num_completion_tokens == 72
    assert summary.token_source == "usage"
    assert summary.attainment is not None
    assert summary.attainment.value == 1.0
    assert summary.schedule.lateness_ms is not None
    assert summary.schedule.lateness_ms.minimum >= 0.0
    assert all(len(row.gaps_ms) == 5 and row.request_id for row in result.rows)
    assert [row.index for row in result.rows] == list(range(12))
    assert result.meta.model == "mock-model"
    assert result.meta.settings["rate_per_s"] == 100.0
    assert {c.name for c in summary.categories} <= set(PLAIN_FAMILIES)


def test_a_closed_loop_keeps_its_users_busy() -> None:
    load = LoadSettings(concurrency=3, duration_s=None, num_requests=20)
    result = measured(QUICK, load=load)
    assert result.summary.num_completed == 20
    assert result.summary.schedule.most_in_flight == 3
    assert result.summary.offered_per_s is None
    assert not any("prefix cache" in note for note in result.meta.notes), "never asked twice"


def test_the_warm_up_is_sent_and_not_measured() -> None:
    result = measured(QUICK, load=replace(LOAD, warm_up_s=0.1))
    warm = [row for row in result.rows if row.is_warm_up]
    assert warm
    assert len(result.rows) == 22  # 12, and what 0.1 s at 100/s are
    assert result.summary.num_requests == 22 - len(warm)


def test_waiting_for_the_sender_is_part_of_the_latency() -> None:
    """One request at a time, 40 ms each, due every 10 ms: the later, the longer it waited."""
    script = MockScript(num_pieces=1, first_token_delay_s=0.04)
    workload = WorkloadSettings(max_tokens=16, arrivals="constant")
    load = replace(LOAD, max_in_flight=1, num_requests=6)
    result = measured(script, load=load, workload=workload)
    last = result.rows[-1]
    assert last.ttft_ms is not None
    assert last.sent_ttft_ms is not None
    assert last.ttft_ms >= 190.0 - 1.0  # 6 x 40 ms of answers, 50 ms after the first was due
    assert last.ttft_ms - last.sent_ttft_ms >= 100.0
    assert result.summary.schedule.num_held == 5
    assert result.summary.schedule.most_in_flight == 1
    assert any("waited because" in note for note in result.meta.notes)


@pytest.mark.parametrize(
    ("toxic", "kind"),
    [
        (Toxic(kind="status", status=429, retry_after_s=3.0), "rate_limited"),
        (Toxic(kind="status", status=503), "server_error"),
        (Toxic(kind="status", status=418), "refused"),
        (Toxic(kind="status", status=302), "garbage"),
        (Toxic(kind="stall", after_events=2), "stall"),
        (Toxic(kind="slow_headers", delay_s=30.0), "stall"),
        (Toxic(kind="garbage", after_events=2), "garbage"),
        (Toxic(kind="content_type"), "garbage"),
        (Toxic(kind="half_closed", after_events=2), "broken"),
        (Toxic(kind="reset", after_events=2), "broken"),
        (Toxic(kind="no_done", after_events=2), "broken"),
        (Toxic(kind="error_event", after_events=2), "server_error"),
    ],
)
def test_every_failure_has_a_name_and_none_hangs(toxic: Toxic, kind: str) -> None:
    script = only_measured(replace(QUICK, toxic=toxic))
    load = replace(LOAD, num_requests=4)
    result = measured(script, load=load, target={"stall_s": 0.15, "timeout_s": 1.0})
    assert result.summary.errors == {kind: 4}
    assert result.summary.num_completed == 0
    assert result.summary.ttft_ms is None
    assert all(row.message for row in result.rows)
    if kind == "rate_limited":
        assert "retry after 3" in result.rows[0].message


def test_a_slow_answer_is_out_of_time_and_an_endless_run_ends() -> None:
    slow = only_measured(MockScript(num_pieces=16, gap_s=0.1))
    load = replace(LOAD, num_requests=3)
    timed_out = measured(slow, load=load, target={"timeout_s": 0.3})
    assert timed_out.summary.errors == {"timeout": 3}
    cut_off = measured(slow, load=replace(load, drain_s=0.2, max_in_flight=2))
    assert cut_off.summary.errors == {"unfinished": 3}
    assert sum(row.sent_s is None for row in cut_off.rows) == 1


def test_an_answer_without_a_token_is_none() -> None:
    script = only_measured(MockScript(num_pieces=0))
    assert measured(script, load=replace(LOAD, num_requests=2)).summary.errors == {"empty": 2}


def test_without_usage_events_are_counted_and_that_is_said() -> None:
    result = measured(replace(QUICK, usage="never"))
    assert result.summary.token_source == "chunks"
    assert result.summary.num_completion_tokens == 72
    assert result.summary.num_prompt_tokens is None
    assert any("sends no usage" in note for note in result.meta.notes)


def test_whole_answers_have_no_first_token() -> None:
    result = measured(QUICK, target={"is_stream": False})
    assert result.summary.num_completed == 12
    assert result.summary.num_completion_tokens == 72
    assert result.summary.ttft_ms is None
    assert result.summary.e2e_ms is not None
    with pytest.raises(PlanError, match="first token"):
        measured(QUICK, target={"is_stream": False}, objectives=Objectives(ttft_ms=1.0))


def test_a_missing_server_is_reported() -> None:
    with pytest.raises(TargetError, match="no server answers at http"):
        asyncio.run(run_bench(plan_for("http://127.0.0.1:9")))
    for wrong in ("ftp://host", "http://", "http://host:port", "http://host:0"):
        with pytest.raises(TargetError, match="is not a URL"):
            asyncio.run(run_bench(plan_for(wrong)))


def test_a_target_that_answers_nothing_is_not_measured() -> None:
    failing = MockScript(toxic=Toxic(kind="status", status=500))
    with pytest.raises(TargetError, match="500"):
        measured(failing, target={"model": "m"})


def test_a_key_is_sent_and_never_kept() -> None:
    async def run(key: str | None) -> BenchResult:
        async with MockUpstream(QUICK, api_key="sk-secret") as mock:
            plan = plan_for(mock.url)
            return await run_bench(replace(plan, target=replace(plan.target, key=key)))

    result = asyncio.run(run("sk-secret"))
    assert result.summary.num_completed == 12
    assert b"sk-secret" not in msgspec.json.encode(result)
    assert "sk-secret" not in repr(TargetSettings(url="u", key="sk-secret"))
    with pytest.raises(TargetError) as caught:
        asyncio.run(run("sk-wrong"))
    assert "sk-wrong" not in str(caught.value)


def test_fields_reach_every_request() -> None:
    async def run() -> list[Mapping[str, Any]]:
        async with MockUpstream(QUICK) as mock:
            fields = {"outrider": {"max_draft_nodes": 3}, "temperature": 0.5}
            await run_bench(plan_for(mock.url, request_fields=fields))
            return [request.document for request in mock.requests]

    documents = asyncio.run(run())
    assert len(documents) == 13
    assert all(document["outrider"] == {"max_draft_nodes": 3} for document in documents)
    assert all(document["temperature"] == 0.5 for document in documents)


def test_connections_are_used_again() -> None:
    async def run() -> int:
        async with MockUpstream(QUICK) as mock:
            load = LoadSettings(concurrency=2, duration_s=None, num_requests=30)
            await run_bench(plan_for(mock.url, load=load))
            return mock.num_accepted

    assert asyncio.run(run()) <= 3


def test_a_ratio_of_tokens_to_words_is_measured() -> None:
    async def run() -> list[int | None]:
        async with MockUpstream(QUICK) as mock:
            plan = plan_for(mock.url, workload=WorkloadSettings(kind="synthetic"))
            async with Session(plan) as session:
                assert session.report.facts.ratio.is_measured
                assert session.report.facts.takes_ignore_eos
            result = await run_bench(plan)
            return [row.num_prompt_tokens for row in result.rows]

    # The mock counts words; the frame of its chat is one.
    assert asyncio.run(run()) == [128] * 12


def test_blocks_may_follow_one_another() -> None:
    async def run() -> list[tuple[int, str]]:
        async with (
            MockUpstream(QUICK) as mock,
            Session(plan_for(mock.url, arm="a")) as session,
        ):
            planned = session.requests(LOAD)
            first = await session.run(planned[:3], LOAD)
            begin_s = session.clock()
            second = await session.run(planned[6:], LOAD, first_index=6)
            assert min(row.scheduled_s for row in second.rows) <= begin_s + 0.1
            return sorted((row.index, row.arm) for row in [*first.rows, *second.rows])

    assert asyncio.run(run()) == [(i, "a") for i in (0, 1, 2, *range(6, 12))]


def test_a_search_finds_where_a_target_is_too_slow() -> None:
    """One answer at a time, 20 ms each: 50 requests/s are its end."""
    result = measured(
        MockScript(num_pieces=1, first_token_delay_s=0.02),
        load=LoadSettings(duration_s=0.5, max_in_flight=1),
        workload=WorkloadSettings(max_tokens=16, arrivals="constant"),
        objectives=Objectives(ttft_ms=200.0),
        search=SearchSettings(first_per_s=20.0, tolerance=0.5, max_steps=5),
    )
    search = result.search
    assert search is not None
    assert search.best_rate_per_s is not None
    assert search.best_rate_per_s <= 100.0
    assert search.is_bounded
    assert {step.is_enough for step in search.steps} == {True, False}
    best = next(s for s in search.steps if s.rate_per_s == search.best_rate_per_s)
    assert best.summary == result.summary


def test_cancelling_a_run_leaves_nothing_behind() -> None:
    async def run() -> float:
        async with MockUpstream(only_measured(MockScript(first_token_delay_s=30.0))) as mock:
            task = asyncio.create_task(run_bench(plan_for(mock.url)))
            while len(mock.requests) < 5:  # noqa: ASYNC110 - of the mock there is no such event
                await asyncio.sleep(0.01)
            began_s = time.perf_counter()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await mock.settled()
            return time.perf_counter() - began_s

    assert asyncio.run(run()) < 5.0


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"load": LoadSettings(rate_per_s=1.0, concurrency=1)}, "choose one"),
        ({"load": LoadSettings(rate_per_s=1.0, duration_s=None)}, "needs an end"),
        ({"load": LoadSettings()}, "needs a rate"),
        ({"search": SearchSettings()}, "needs objectives"),
    ],
)
def test_plans_that_make_no_sense_are_refused(more: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        plan_for("http://127.0.0.1:9", **more).check()
