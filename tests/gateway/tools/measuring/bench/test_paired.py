import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from outrider.gateway.tools.measuring.bench.arrivals import LengthDistribution
from outrider.gateway.tools.measuring.bench.client import TargetError, TargetSettings
from outrider.gateway.tools.measuring.bench.compare import RunComparison
from outrider.gateway.tools.measuring.bench.paired import block_size, check_pair, moved, run_paired
from outrider.gateway.tools.measuring.bench.plan import BenchPlan, LoadSettings, PlanError
from outrider.gateway.tools.measuring.bench.results import BenchResult, Objectives
from outrider.gateway.tools.measuring.bench.search import SearchSettings
from outrider.gateway.tools.measuring.bench.workloads import WorkloadSettings
from tests.gateway.tools.measuring.bench.made_results import made_rows

_NUM_TOKENS = 4


@dataclass(slots=True)
class _Target:
    """A server whose first token takes `seconds[side]`; notes senders in order."""

    seconds: dict[str, float]
    asked: list[tuple[str, str]] = field(default_factory=list)
    seeds: list[tuple[str, str, int | None]] = field(default_factory=list)
    b_fails_from: int | None = None
    takes_seeds: bool = True

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "one", "object": "model"}]})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body: dict[str, Any] = await request.json()
        side = str(body.get("side", "none"))
        text = body["messages"][-1]["content"]
        self.asked.append((side, text))
        self.seeds.append((side, text, body.get("seed")))
        if "seed" in body and not self.takes_seeds:
            return web.json_response({"error": {"message": "unknown field seed"}}, status=422)
        num_of_b = [one for one, _ in self.asked].count("b")
        if side == "b" and self.b_fails_from is not None and num_of_b > self.b_fails_from:
            return web.json_response({"error": {"message": "broken"}}, status=500)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await asyncio.sleep(self.seconds.get(side, 0.0))
        for number in range(_NUM_TOKENS):
            choice = {"index": 0, "delta": {"content": f"{number} "}, "finish_reason": None}
            await self._send(response, {"choices": [choice]})
        ending = {"index": 0, "delta": {}, "finish_reason": "length"}
        usage = {"prompt_tokens": 9, "completion_tokens": _NUM_TOKENS, "total_tokens": 13}
        await self._send(response, {"choices": [ending]})
        await self._send(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _send(self, response: web.StreamResponse, part: dict[str, Any]) -> None:
        event = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "one"} | part
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


@asynccontextmanager
async def _served(target: _Target) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_get("/v1/models", target.models)
    app.router.add_post("/v1/chat/completions", target.chat)
    runner = web.AppRunner(app, shutdown_timeout=1.0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


def _plan(url: str = "http://127.0.0.1:1", **changes: Any) -> BenchPlan:
    plan = BenchPlan(
        target=TargetSettings(url=url, timeout_s=10.0, stall_s=10.0),
        workload=WorkloadSettings(kind="prompts", max_tokens=_NUM_TOKENS),
        load=LoadSettings(concurrency=2, num_requests=32, duration_s=None),
        objectives=Objectives(ttft_ms=1000.0),
        arm="a",
        request_fields={"side": "a"},
    )
    return replace(plan, **changes)


def _other(plan: BenchPlan) -> BenchPlan:
    return replace(plan, arm="b", request_fields={**plan.request_fields, "side": "b"})


def _run(target: _Target, **changes: Any) -> tuple[BenchResult, BenchResult, RunComparison]:
    async def run() -> tuple[BenchResult, BenchResult, RunComparison]:
        async with _served(target) as url:
            plan = _plan(url, **changes)
            return await run_paired(plan, _other(plan))

    return asyncio.run(run())


def _turns(sides: list[str]) -> list[tuple[str, int]]:
    turns: list[tuple[str, int]] = []
    for side in sides:
        if turns and turns[-1][0] == side:
            turns[-1] = (side, turns[-1][1] + 1)
        else:
            turns.append((side, 1))
    return turns


def test_sides_take_turns_and_the_slower_one_is_found() -> None:
    target = _Target(seconds={"a": 0.002, "b": 0.02})
    first, second, comparison = _run(target)
    assert comparison.num_pairs == 32
    (entry,) = [one for one in comparison.differences if one.name == "TTFT p50"]
    assert entry.verdict == "worse"
    assert 10.0 < entry.difference.value < 60.0
    assert comparison.share_faster is not None
    assert comparison.share_faster.value < 0.1
    # The look at the target, a warm-up of each, then four blocks: A B, B A, A B, B A.
    sides = [side for side, _ in target.asked]
    measured = _turns(sides[-64:])
    assert measured == [("a", 8), ("b", 16), ("a", 16), ("b", 16), ("a", 8)]
    assert sides.count("a") == sides.count("b") > 32
    # Pairs are of one kind, and no question is asked twice: its answer would be remembered.
    assert [row.category for row in first.rows] == [row.category for row in second.rows]
    texts = [text for _, text in target.asked[-64:]]
    assert len(set(texts)) > 60, "kinds with few texts may meet again"
    assert [row.index for row in first.rows] == [row.index for row in second.rows] == [*range(32)]
    assert {row.arm for row in first.rows} == {"a"}


def test_the_others_turns_are_not_in_a_sides_time() -> None:
    target = _Target(seconds={"a": 0.0, "b": 0.03})
    first, second, _ = _run(target)
    # B takes 32 requests of 30 ms, two at a time: half a second that A's clock must not show.
    assert second.summary.duration_s > 0.45
    assert first.summary.duration_s < 0.4
    assert first.summary.completed_per_s > 2 * second.summary.completed_per_s


def test_made_texts_differ_so_that_no_cache_answers_the_second() -> None:
    target = _Target(seconds={})
    workload = WorkloadSettings(
        kind="synthetic",
        prompt_lengths=LengthDistribution(low=30, high=30),
        answer_lengths=LengthDistribution(low=_NUM_TOKENS, high=_NUM_TOKENS),
    )
    load = LoadSettings(rate_per_s=400.0, num_requests=16, duration_s=None)
    first, second, comparison = _run(target, workload=workload, load=load, salt="s")
    assert comparison.num_pairs == 16
    texts = [text for _, text in target.asked[-32:]]
    assert len(set(texts)) == 32
    planned = [[row.planned_prompt_tokens for row in one.rows] for one in (first, second)]
    assert planned[0] == planned[1]


def _seeds_by_side(target: _Target) -> dict[str, list[tuple[str, int | None]]]:
    """Text and seed of the measured requests; those of a side in an order of their own."""
    measured = target.seeds[-64:]
    return {
        side: sorted((text, seed or 0) for its, text, seed in measured if its == side)
        for side in ("a", "b")
    }


def _prompts_of(folder: Path) -> WorkloadSettings:
    file = folder / "prompts.txt"
    file.write_text("\n".join(f"Question {number}?" for number in range(8)), encoding="utf-8")
    return WorkloadSettings(kind="prompts", path=file, max_tokens=_NUM_TOKENS)


def test_a_prompt_of_a_file_has_the_same_seed_on_both_sides(tmp_path: Path) -> None:
    target = _Target(seconds={})
    _run(target, workload=_prompts_of(tmp_path))
    by_side = _seeds_by_side(target)
    assert by_side["a"] == by_side["b"]
    # Each request is a draw of its own, also where its prompt was asked before.
    assert len({seed for _, seed in by_side["a"]}) == 32


@pytest.mark.parametrize("own", [{"seed": 7}, {"seed": None}, {"temperature": 0}])
def test_what_the_request_says_about_its_noise_holds(tmp_path: Path, own: dict[str, Any]) -> None:
    target = _Target(seconds={})
    _run(target, workload=_prompts_of(tmp_path), request_fields={"side": "a", **own})
    assert {seed for _, _, seed in target.seeds} == {own.get("seed")}


def test_a_target_that_takes_no_seeds_is_measured_without(tmp_path: Path) -> None:
    target = _Target(seconds={}, takes_seeds=False)
    first, _, _ = _run(target, workload=_prompts_of(tmp_path))
    assert {seed for _, _, seed in target.seeds[-64:]} == {None}
    assert first.summary.num_failed == 0
    assert any("does not take seeds" in note for note in first.meta.notes)


@pytest.mark.slow
def test_a_duration_ends_a_closed_loop_after_whole_pairs() -> None:
    target = _Target(seconds={"a": 0.004, "b": 0.004})
    load = LoadSettings(concurrency=2, duration_s=0.15)
    first, second, comparison = _run(target, load=load)
    assert len(first.rows) == len(second.rows) == comparison.num_pairs
    assert comparison.num_pairs % 8 == 0
    assert min(first.summary.duration_s, second.summary.duration_s) > 0.1


@pytest.mark.slow
def test_a_side_that_fails_is_in_the_figures() -> None:
    load = LoadSettings(concurrency=8, num_requests=32, duration_s=None)
    # What B is asked before the measured block: the look at it, and the warm-up.
    healthy = _Target(seconds={})
    _run(healthy, load=load)
    num_before = [side for side, _ in healthy.asked].count("b") - 32
    _, second, comparison = _run(_Target(seconds={}, b_fails_from=num_before + 16), load=load)
    (failed,) = [one for one in comparison.differences if one.name == "failed"]
    assert (failed.first, failed.second) == (0.0, 0.5)
    assert failed.verdict == "worse"
    assert second.summary.errors == {"server_error": 16}


def test_a_side_that_never_answers_is_an_error() -> None:
    with pytest.raises(TargetError, match="500"):
        _run(_Target(seconds={}, b_fails_from=0))


def test_unpaired_runs_are_refused() -> None:
    plan = _plan()
    other = _other(plan)
    check_pair(plan, other)
    for wrong, words in (
        (replace(other, arm="a"), "different names"),
        (replace(other, seed=1), "same load, workload and seed"),
        (replace(other, objectives=Objectives()), "same objectives"),
        (replace(other, search=SearchSettings()), "one rate for both"),
    ):
        with pytest.raises(PlanError, match=words):
            check_pair(plan, wrong)


def test_blocks_are_large_enough_and_even() -> None:
    assert block_size(200, LoadSettings(rate_per_s=1.0)) == 20
    assert block_size(20, LoadSettings(rate_per_s=1.0)) == 8
    assert block_size(3, LoadSettings(rate_per_s=1.0)) == 3
    assert block_size(100, LoadSettings(concurrency=8)) == 32
    assert block_size(None, LoadSettings(concurrency=2)) == 8


def test_a_moved_row_keeps_its_latencies() -> None:
    (row,) = made_rows(1)
    later = moved(row, 100.0)
    assert later.scheduled_s == row.scheduled_s + 100.0
    assert later.ttft_ms == pytest.approx(row.ttft_ms)
    assert later.e2e_ms == pytest.approx(row.e2e_ms)
    assert later.lateness_ms == pytest.approx(row.lateness_ms)
