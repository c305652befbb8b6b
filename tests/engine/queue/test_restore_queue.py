"""Requests whose blocks are on a disk: they wait for it, others do not, and no text is another."""

import itertools
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from outrider.engine.cache.block_pool import PRIVATE_SALT
from outrider.engine.cache.extent_store import ExtentStore
from outrider.engine.cache.extents import Extent
from outrider.engine.config import EngineConfig
from outrider.engine.core import Engine
from outrider.engine.queue import block_offload
from outrider.engine.request import EngineRequest
from tests.engines import (
    Answer,
    assert_idle,
    make_engine,
    make_request,
    random_prompt,
    serve,
    step_once,
    texts,
    tiny_pair,
)
from tests.heads import make_head_engine, random_head, random_pair
from tests.laws.same_answers import plainly
from tests.stores import opened_store, settle, slow_down, stored_files

PROMPT = random_prompt(100)
ALONE = EngineConfig(max_sequences=1)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ExtentStore]:
    with opened_store(tmp_path / "kv") as opened:
        yield opened


def engine_of(store: ExtentStore, **options: Any) -> Engine:
    engine = make_engine(tiny_pair(), store=store, **options)
    slow_down(engine)
    return engine


def request_of(name: str = "r", **options: Any) -> EngineRequest:
    return make_request(name, PROMPT, max_tokens=8, **options)


def fill(store: ExtentStore, *requests: EngineRequest) -> None:
    """Have an engine serve requests that is gone then."""
    engine = engine_of(store)
    serve(engine, requests or [request_of()])
    settle(engine, store)


def test_nothing_is_written_of_private_requests(store: ExtentStore) -> None:
    fill(store, request_of(cache_salt=f"{PRIVATE_SALT}tenant"))
    assert not stored_files(store.folder.folder)
    fill(store, request_of(cache_salt="tenant"))
    assert len(stored_files(store.folder.folder)) == 2  # of the large model and of the drafter


def test_nothing_is_written_of_private_requests_that_a_head_reads(store: ExtentStore) -> None:
    engine = make_head_engine(random_pair(), random_head(), store=store)
    serve(engine, [request_of(cache_salt=f"{PRIVATE_SALT}tenant")])
    settle(engine, store)
    assert not stored_files(store.folder.folder)
    serve(engine, [request_of(cache_salt="tenant")])
    settle(engine, store)
    assert len(stored_files(store.folder.folder)) == 2


def test_tenants_share_nothing_on_the_disk(store: ExtentStore) -> None:
    fill(store, request_of(cache_salt="a"))
    for salt, num_cached in (("b", 0), ("", 0), (f"{PRIVATE_SALT}a", 0), ("a", 96)):
        answers = serve(engine_of(store), [request_of(cache_salt=salt)])
        assert answers["r"].stats.num_cached_tokens == num_cached


def test_what_was_evicted_comes_back_from_the_disk(store: ExtentStore) -> None:
    engine = engine_of(store, large_blocks=12, small_blocks=12)
    others = [make_request(f"{n}", random_prompt(90, seed=n), max_tokens=8) for n in range(3)]
    for request in (request_of(), *others):
        serve(engine, [request])
        settle(engine, store)
    slow_down(engine)
    again = serve(engine, [request_of()])
    assert again["r"].stats.num_cached_tokens == 96
    assert [each.num_restored_tokens for each in again["r"].prefills] == [96]
    stats = engine.stats().store
    assert stats.num_restored_tokens == 96
    assert stats.saved_s > 1.0
    assert texts(again) == texts(plainly_answered())
    assert_idle(engine)


def test_what_is_computed_faster_than_read_is_computed(store: ExtentStore) -> None:
    fill(store)
    engine = make_engine(tiny_pair(), store=store)
    for tier in engine.scheduler.running:
        engine.scheduler.note_pass(tier, num_rows=100, elapsed_s=1e-6)
    assert serve(engine, [request_of()])["r"].stats.num_cached_tokens == 0
    assert engine.stats().store.num_read_bytes == 0


def plainly_answered() -> dict[str, Answer]:
    return {"r": Answer(token_ids=plainly(tiny_pair(), [request_of()])["r"])}


def test_a_longer_text_goes_on_behind_what_the_disk_has(store: ExtentStore) -> None:
    fill(store)
    longer = make_request("r", (*PROMPT[:60], *random_prompt(60, seed=3)), max_tokens=4)
    engine = engine_of(store)
    answers = serve(engine, [longer])
    assert answers["r"].stats.num_cached_tokens == 48  # whole blocks in front of where they part
    settle(engine, store)
    assert serve(engine_of(store), [longer])["r"].stats.num_cached_tokens == 112


@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_damaged_files_are_counted_and_computed_again(store: ExtentStore, damage: str) -> None:
    fill(store)
    engine = engine_of(store)
    for path in stored_files(store.folder.folder):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        match damage:
            case "flip":
                path.write_bytes(content)
            case "cut":
                path.write_bytes(content[:100])
            case "gone":
                path.unlink()
    answers = serve(engine, [request_of()])
    assert answers["r"].stats.num_cached_tokens == 0
    assert texts(answers) == texts(plainly_answered())
    assert engine.stats().store.num_damaged == (0 if damage == "gone" else 2)
    assert engine.stats().store.num_restored_tokens == 0
    settle(engine, store)
    # It was written again.
    assert serve(engine_of(store), [request_of()])["r"].stats.num_cached_tokens == 96


class StuckDisk:
    """Reads that end when a test says so."""

    def __init__(self, store: ExtentStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reads: list[tuple[Future[Extent | None], Any]] = []
        self._read = store.read
        monkeypatch.setattr(store, "read", self._begin)

    def _begin(self, *wanted: Any) -> "Future[Extent | None]":
        self.reads.append((Future(), wanted))
        return self.reads[-1][0]

    def end(self) -> None:
        for future, wanted in self.reads:
            future.set_result(self._read(*wanted).result())


def test_others_get_on_while_a_request_waits_for_the_disk(
    store: ExtentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store)
    disk, engine = StuckDisk(store, monkeypatch), engine_of(store)
    other = make_request("other", random_prompt(20, seed=4), max_tokens=4)
    answers: dict[str, Answer] = {}
    for request in (request_of(), other):
        engine.submit(request)
    while "other" not in answers or answers["other"].finished is None:
        step_once(engine, answers)
    assert "r" not in answers
    assert engine.stats().tiers["large"].num_waiting == 1
    disk.end()
    while engine.has_work:
        step_once(engine, answers)
    assert answers["r"].stats.num_cached_tokens == 96
    assert_idle(engine)


@pytest.mark.slow
def test_a_disk_that_does_not_answer_is_not_waited_for(
    store: ExtentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store)
    StuckDisk(store, monkeypatch)
    engine = make_engine(tiny_pair(), store=store)
    for tier in engine.scheduler.running:
        engine.scheduler.note_pass(tier, num_rows=100, elapsed_s=0.5)  # a wait of 1 s at most
    answers = serve(engine, [request_of()], max_steps=10**6)
    assert answers["r"].stats.num_cached_tokens == 0
    assert texts(answers) == texts(plainly_answered())


def test_a_request_that_ends_while_it_waits_leaves_nothing(
    store: ExtentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store)
    disk, engine = StuckDisk(store, monkeypatch), engine_of(store)
    engine.submit(request_of())
    engine.step()
    first, wanted = disk.reads[0]
    first.set_result(disk._read(*wanted).result())
    engine.step()  # takes in what has come
    engine.abort("r")
    answers: dict[str, Answer] = {}
    step_once(engine, answers)
    assert answers["r"].finish_reason == "abort"
    assert_idle(engine)


@pytest.mark.slow
def test_what_finds_no_room_comes_back_when_its_request_starts(store: ExtentStore) -> None:
    fill(store)
    engine = engine_of(store, large_blocks=12, small_blocks=12)
    running = make_request("long", random_prompt(120, seed=8), max_tokens=60)
    served = serve(engine, [running, request_of()], arrivals={"r": 2})
    assert texts(served) == plainly(tiny_pair(), [running, request_of()])
    assert served["r"].stats.num_cached_tokens == 96
    assert_idle(engine)


def test_what_is_evicted_while_a_request_waits_comes_back(store: ExtentStore) -> None:
    engine = engine_of(store, large_blocks=12, small_blocks=12, config=ALONE)
    serve(engine, [request_of("first")])
    settle(engine, store)
    slow_down(engine)
    others = [make_request(f"{n}", random_prompt(150, seed=n), max_tokens=4) for n in range(2)]
    served = serve(engine, [*others, request_of()])  # its blocks are there when it is submitted
    assert served["r"].stats.num_cached_tokens == 96
    assert engine.stats().store.num_restored_tokens == 96
    assert texts({"r": served["r"]}) == texts(plainly_answered())
    assert_idle(engine)


def test_answers_that_evict_each_other_are_all_written(
    store: ExtentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    milliseconds = itertools.count()
    monkeypatch.setattr(block_offload, "perf_counter", lambda: next(milliseconds) * 1e-3)
    requests = [make_request(f"{n}", random_prompt(150, seed=n), max_tokens=4) for n in range(4)]
    engine = engine_of(store, large_blocks=12, small_blocks=12, config=ALONE)
    serve(engine, requests)
    settle(engine, store)
    assert engine.stats().store.num_dropped == 0
    again = serve(engine_of(store), requests)
    assert [answer.stats.num_cached_tokens for answer in again.values()] == [144] * 4
    assert_idle(engine)


def test_a_disk_that_cannot_be_written_changes_no_answer(
    store: ExtentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> bool:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store.folder, "write", full)
    engine = engine_of(store)
    answers = serve(engine, [request_of()])
    settle(engine, store)
    assert texts(answers) == texts(plainly_answered())
    assert engine.stats().store.num_failed == 1  # then it is left alone for a while
