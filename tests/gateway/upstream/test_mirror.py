"""Copies of requests: how many, of which requests, what is kept of them, and how they end."""

import asyncio
import json
import random
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from benchmarks.shared.mock_upstream import MockScript, MockUpstream, Toxic
from outrider.gateway.settings.tree import load_settings
from outrider.gateway.upstream.call import UpstreamCall
from outrider.gateway.upstream.mirror import Mirror, MirroredAnswer
from outrider.gateway.upstream.upstream_metrics import UpstreamMetrics
from outrider.gateway.wiring.upstream import build_mirror, build_upstreams
from tests.gateway.conftest import OpenWorld
from tests.gateway.waiting import until, wait_for

TALK = [{"role": "user", "content": "Hello there"}]
ANSWER = MirroredAnswer(
    tier="small", texts=("I am fine.",), duration_s=0.5, is_private=False, finish_reason="stop"
)
HELLO = MockScript(pieces=("Hello", " back"))


def call(**changes: Any) -> UpstreamCall:
    whole = UpstreamCall(
        endpoint="chat",
        document={"model": "auto", "messages": TALK, "stream": True, "seed": 3},
        model="something else",
        request_id="r-1",
        arrival_s=0.0,
        hops=("here",),
        deadline_s=0.001,
        prediction="I am fine.",
    )
    return replace(whole, **changes)


def written(folder: Path) -> bytes:
    """What the file of the day holds."""
    return b"".join(path.read_bytes() for path in folder.glob("mirror-20*.jsonl"))


@dataclass(frozen=True)
class Bench:
    mock: MockUpstream
    mirror: Mirror
    registry: CollectorRegistry

    def count(self, outcome: str) -> float:
        return self.value("mirror_copies_total", outcome=outcome)

    def value(self, name: str, **labels: str) -> float:
        found = self.registry.get_sample_value(f"outrider_{name}", {"tier": "shadow", **labels})
        return found or 0.0

    until = staticmethod(until)


@asynccontextmanager
async def bench(
    script: MockScript = HELLO, *, models: tuple[str, ...] = ("mock-model",), **flags: Any
) -> AsyncIterator[Bench]:
    async with MockUpstream(script, models=models) as mock:
        dotted = {key.replace("__", "."): value for key, value in flags.items()}
        wanted = {"mirror.share": 1, "mirror.tier": "shadow", "tiers.shadow.url": mock.url}
        settings = load_settings(environ={}, flags=wanted | dotted)
        registry = CollectorRegistry()
        metrics = UpstreamMetrics(registry)
        tiers = build_upstreams(settings, {}, metrics.on_attempt)
        mirror = build_mirror(settings, tiers, metrics, rng=random.Random(7))
        assert mirror is not None
        await tiers["shadow"].start()
        await mirror.start()
        try:
            yield Bench(mock, mirror, registry)
        finally:
            await mirror.close()
            await tiers["shadow"].close()


async def test_a_copy_is_whole_and_without_what_is_the_clients_own() -> None:
    async with bench(tiers__shadow__price__completion=500_000) as it:
        assert it.mirror.offer(call(), ANSWER)
        await it.until(lambda: it.count("answered") == 1)
        (request,) = it.mock.requests
        assert request.document == {"model": "mock-model", "messages": TALK, "seed": 3}
        assert "here" in str(request.headers), "a loop of gateways is noticed in copies too"
        assert it.value("mirror_request_seconds_count") == 1
        assert it.value("upstream_cost_usd_total", kind="mirror") == 1.0
        assert it.value("upstream_request_seconds_count") == 0, "booked apart"


async def test_a_private_request_is_never_copied() -> None:
    async with bench() as it:
        for _ in range(20):
            assert not it.mirror.offer(call(), replace(ANSWER, is_private=True))
        assert it.mirror.offer(call(request_id="open"), ANSWER)
        await it.until(lambda: it.count("answered") == 1)
        assert it.mock.num_requests == 1


async def test_a_share_is_copied() -> None:
    async with bench(mirror__share=0.25, mirror__max_in_flight=1000) as it:
        taken = sum(it.mirror.offer(call(), ANSWER) for _ in range(400))
        assert 70 <= taken <= 130
        await it.until(lambda: it.count("answered") == taken)
        assert it.mock.num_requests == taken


async def test_too_many_copies_are_dropped_and_what_is_left_ends_with_the_mirror() -> None:
    slow = replace(HELLO, first_token_delay_s=60.0)
    async with bench(slow, mirror__max_in_flight=2) as it:
        assert [it.mirror.offer(call(), ANSWER) for _ in range(5)] == [True] * 2 + [False] * 3
        assert it.count("dropped") == 3
        await it.until(lambda: it.mock.num_requests == 2)
        await it.mirror.close()
        await it.until(
            lambda: all(request.outcome == "client_left" for request in it.mock.requests)
        )
        assert not it.mirror.offer(call(), ANSWER), "it is closed"
        assert asyncio.all_tasks() >= {asyncio.current_task()}


async def test_offering_a_copy_does_not_wait() -> None:
    async with bench(replace(HELLO, first_token_delay_s=60.0)) as it:
        before = asyncio.get_running_loop().time()
        assert it.mirror.offer(call(), ANSWER)
        assert it.mock.num_requests == 0, "nothing was sent yet: the loop has not turned"
        assert asyncio.get_running_loop().time() - before < 1.0


@pytest.mark.parametrize(
    ("toxic", "failure"),
    [
        (Toxic(kind="status", status=500), "upstream_status"),
        (Toxic(kind="status", status=400), "upstream_refused"),
        (Toxic(kind="reset"), "upstream_reset"),
    ],
    ids=lambda value: getattr(value, "kind", None),
)
async def test_a_copy_that_fails_is_counted_and_written(
    tmp_path: Path, toxic: Toxic, failure: str
) -> None:
    file = tmp_path / "mirror.jsonl"
    spoilt = replace(HELLO, toxic=toxic)
    async with bench(spoilt, mirror__file=str(file), tiers__shadow__model="m") as it:
        assert it.mirror.offer(call(), ANSWER)
        await it.until(lambda: it.count("failed") == 1)
        await it.until(lambda: written(tmp_path).endswith(b"\n"))
        assert it.mock.num_requests == 1, "it is not tried again"
        assert json.loads(written(tmp_path))["mirror"]["failure"] == failure


async def test_without_a_model_there_is_no_copy() -> None:
    async with bench(models=()) as it:
        assert it.mirror.offer(call(), ANSWER)
        await it.until(lambda: it.count("failed") == 1)
        assert it.mock.num_requests == 0


async def test_a_server_that_is_out_of_order_gets_no_copies() -> None:
    async with bench(mirror__max_in_flight=100, tiers__shadow__model="m") as it:
        await it.mock.refuse()
        for number in range(5):
            assert it.mirror.offer(call(), ANSWER)
            await it.until(lambda number=number: it.count("failed") == number + 1)  # type: ignore[misc]
        assert not it.mirror.offer(call(), ANSWER), "its breaker is open"
        assert it.count("dropped") == 1


def test_the_file_has_a_line_for_each_copy(tmp_path: Path) -> None:
    file = tmp_path / "mirror.jsonl"

    async def main() -> None:
        async with bench(
            mirror__file=str(file), mirror__max_in_flight=50, tiers__shadow__model="named"
        ) as it:
            for number in range(50):
                long = [{"role": "user", "content": f"{number} ü " + "x" * 20_000}]
                document = {"messages": long, "stream": True}
                assert it.mirror.offer(call(request_id=f"r-{number}", document=document), ANSWER)
            await it.until(lambda: it.count("answered") == 50)
            await it.until(lambda: written(tmp_path).count(b"\n") == 50)

    asyncio.run(main())
    lines = [json.loads(line) for line in written(tmp_path).splitlines()]
    assert {line["request_id"] for line in lines} == {f"r-{number}" for number in range(50)}
    (file,) = tmp_path.iterdir()
    assert file.name == f"mirror-{lines[0]['time'][:10]}.jsonl"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    line = lines[0]
    assert line["endpoint"] == "chat"
    assert line["request"]["messages"][0]["content"].endswith("x")
    assert line["answer"] == {
        "tier": "small",
        "duration_s": 0.5,
        "texts": ["I am fine."],
        "finish_reason": "stop",
        "num_completion_tokens": None,
    }
    mirror = line["mirror"]
    assert mirror["tier"] == "shadow"
    assert mirror["model"] == "named"
    assert mirror["texts"] == ["Hello back"]
    assert mirror["finish_reason"] == "stop"
    assert mirror["num_completion_tokens"] == 2
    assert mirror["cost_usd"] is None
    assert mirror["duration_s"] > 0
    assert line["time"].endswith("+00:00")


@pytest.mark.parametrize("setting", ["mirror__retention_days", "retention__days"])
async def test_old_days_are_deleted_and_nothing_else(tmp_path: Path, setting: str) -> None:
    kept = (
        "mirror.jsonl",
        "mirror-notes.jsonl",
        "mirror-2100-01-01.jsonl",
        "other-2020-01-01.jsonl",
    )
    for name in (*kept, "mirror-2020-01-01.jsonl", "mirror-2026-01-31.jsonl"):
        (tmp_path / name).write_text("x")
    async with bench(mirror__file=str(tmp_path / "mirror.jsonl"), **{setting: 2}) as it:
        await it.until(lambda: {path.name for path in tmp_path.iterdir()} == set(kept))


async def test_without_a_time_all_days_are_kept(tmp_path: Path) -> None:
    old = tmp_path / "mirror-2020-01-01.jsonl"
    old.write_text("x")
    async with bench(mirror__file=str(tmp_path / "mirror.jsonl")) as it:
        assert it.mirror.offer(call(), ANSWER)
        await it.until(lambda: b"Hello back" in written(tmp_path))
    assert old.exists()


def test_an_unwritable_mirror_file_disturbs_no_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()

    async def main() -> None:
        async with bench(mirror__file=str(folder / "mirror.jsonl")) as it:
            folder.rmdir()
            assert it.mirror.offer(call(), ANSWER)
            await it.until(lambda: "copy failed" in caplog.text)
            assert it.mirror.offer(call(), ANSWER)
            await it.until(lambda: it.count("answered") == 2)

    asyncio.run(main())
    assert "Hello there" not in caplog.text, "logs have no prompts"


def test_the_file_says_whose_a_request_is(opened: OpenWorld, tmp_path: Path) -> None:
    """So that it can be erased: what goes to the server names no end user."""
    file = tmp_path / "mirror.jsonl"
    mirror = {"tier": "shadow", "share": 1.0, "file": file, "retention_days": 9}
    old = tmp_path / "mirror-2020-01-01.jsonl"
    old.write_text("x")
    with opened(mirror=mirror, mirrored=MockScript()) as books:
        assert books.world.chat(model="cloud", user="ann").status_code == 200
        wait_for(lambda: written(tmp_path).endswith(b"\n") and not old.exists())
        line = json.loads(written(tmp_path))
        assert (line["key"], line["end_user"]) == (books.key[3:11], "ann")
        assert "ann" not in str(line["request"])
