"""Requests whose blocks another engine has: they wait for it, others do not, no text is another."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest

from outrider.engine.cache.block_pool import PRIVATE_SALT
from outrider.engine.cache.extents import Extent, ExtentError
from outrider.engine.cache.peers import BlocksWanted, PeerError
from outrider.engine.core import Engine
from outrider.engine.events import PeerStats
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
from tests.laws.same_answers import plainly
from tests.peers import from_source
from tests.stores import slow_down

PROMPT = random_prompt(330)  # two extents
NUM_CACHED = 320

Answering = Callable[[BlocksWanted], list[Extent]]


class ScriptedPeers:
    """Another engine, whose answers a test makes: its list of extents, or what it raises."""

    def __init__(self, answer: Answering | None = None) -> None:
        """Without `answer` nothing is ever answered."""
        self._answer = answer
        self.asked: list[tuple[str, BlocksWanted]] = []

    def pull(self, endpoint: str, wanted: BlocksWanted) -> "Future[list[Extent]]":
        self.asked.append((endpoint, wanted))
        future: Future[list[Extent]] = Future()
        if self._answer is not None:
            try:
                future.set_result(self._answer(wanted))
            except (ExtentError, PeerError) as error:
                future.set_exception(error)
        return future


def request_of(**options: Any) -> EngineRequest:
    request = make_request("r", PROMPT, **{"max_tokens": 8, "cache_salt": "tenant", **options})
    return from_source([request], "tcp://peer:1")[0]


def fail_with(error: Exception) -> Answering:
    def answer(_: BlocksWanted) -> list[Extent]:
        raise error

    return answer


def source_of(**options: Any) -> Engine:
    """An engine that has the prompt's blocks."""
    engine = make_engine(tiny_pair(), **options)
    serve(engine, [request_of()])
    return engine


def exported(source: Engine) -> Answering:
    return lambda wanted: source.export_blocks(wanted) or []


def target_of(peers: ScriptedPeers | None, **options: Any) -> Engine:
    engine = make_engine(tiny_pair(), peers=peers, **options)
    slow_down(engine)
    return engine


def check_served(
    engine: Engine, num_cached: int, request: EngineRequest | None = None
) -> PeerStats:
    """The answer is the plain one, behind so many tokens that were not computed."""
    request = request or request_of()
    pulled_before = engine.stats().peers.num_pulled_tokens
    answers = serve(engine, [request], max_steps=10**6)
    assert texts(answers) == texts(plain(request))
    assert answers["r"].stats.num_cached_tokens == num_cached
    (prefill,) = answers["r"].prefills
    assert prefill.num_pulled_tokens == engine.stats().peers.num_pulled_tokens - pulled_before
    assert_idle(engine)
    return engine.stats().peers


def plain(request: EngineRequest) -> dict[str, Answer]:
    own = replace(request, source=None)
    return {"r": Answer(token_ids=plainly(tiny_pair(), [own])["r"])}


def test_blocks_come_from_the_source_and_are_asked_for_in_order() -> None:
    peers, source = ScriptedPeers(), source_of()
    peers._answer = exported(source)
    stats = check_served(target_of(peers), NUM_CACHED)
    assert [each.first for _, each in peers.asked] == [0, 16]
    assert {endpoint for endpoint, _ in peers.asked} == {"tcp://peer:1"}
    assert stats.num_pulled_tokens == NUM_CACHED
    assert stats.num_pulled_bytes == source.stats().peers.num_sent_bytes > 0


def test_only_what_is_missing_is_asked_for() -> None:
    peers = ScriptedPeers(exported(source_of()))
    engine = target_of(peers)
    serve(engine, [make_request("begin", PROMPT[:200], max_tokens=1, cache_salt="tenant")])
    slow_down(engine)
    check_served(engine, NUM_CACHED)
    assert [(each.first, len(each.hashes)) for _, each in peers.asked] == [(12, 4), (16, 4)]


def only(request: EngineRequest) -> EngineRequest:
    """The request of nobody: its blocks are to come, and nothing is computed."""
    assert request.source is not None
    source = replace(request.source, is_only=True)
    sampling = replace(request.sampling, max_tokens=0)
    return replace(request, request_id="only", source=source, sampling=sampling)


def test_blocks_that_come_for_nobody_are_there_for_the_next_turn_and_nothing_is_computed() -> None:
    peers = ScriptedPeers(exported(source_of()))
    engine = target_of(peers)
    for _ in range(2):  # the second time nothing is missing
        answers = serve(engine, [only(request_of())])
        assert answers["only"].finish_reason == "length"
        assert_idle(engine)
    assert len(peers.asked) == 2
    stats = engine.stats()
    assert stats.peers.num_pulled_tokens == NUM_CACHED
    assert (stats.num_steps, stats.tiers["large"].num_computed_tokens) == (0, 0)
    check_served(engine, NUM_CACHED)
    assert len(peers.asked) == 2


def test_nothing_is_computed_where_nothing_comes_for_nobody() -> None:
    for answer in (lambda _: [], fail_with(PeerError("gone"))):
        engine = target_of(ScriptedPeers(answer))
        assert serve(engine, [only(request_of())])["only"].finish_reason == "length"
        assert engine.stats().num_steps == 0
        assert_idle(engine)


def test_nothing_is_asked_of_nobody_or_for_a_private_request() -> None:
    for peers, salt in ((None, "tenant"), (ScriptedPeers(), f"{PRIVATE_SALT}tenant")):
        check_served(target_of(peers), 0, request_of(cache_salt=salt))
        assert peers is None or not peers.asked


def test_another_tenants_request_finds_nothing_at_the_source() -> None:
    stats = check_served(
        target_of(ScriptedPeers(exported(source_of()))), 0, request_of(cache_salt="other")
    )
    assert stats.num_pulled_tokens == stats.num_pulled_bytes == 0
    assert stats.num_failed == 1


@pytest.mark.slow
def test_a_source_that_does_not_answer_is_waited_for_as_long_as_computing_takes() -> None:
    engine = make_engine(tiny_pair(), peers=ScriptedPeers())
    for tier in engine.scheduler.running:
        engine.scheduler.note_pass(tier, num_rows=330, elapsed_s=0.3)
    assert check_served(engine, 0).num_late == 1


def test_others_get_on_while_a_request_waits() -> None:
    engine = target_of(ScriptedPeers())
    answers: dict[str, Answer] = {}
    for request in (request_of(), make_request("other", random_prompt(20), max_tokens=4)):
        engine.submit(request)
    while "other" not in answers or answers["other"].finished is None:
        step_once(engine, answers)
    assert "r" not in answers
    assert engine.stats().tiers["large"].num_waiting == 1
    engine.abort("r")
    step_once(engine, answers)
    assert answers["r"].finish_reason == "abort"
    assert_idle(engine)


def second_fails(source: Engine, error: Exception | None) -> Answering:
    """The second extent is not there, or is damaged."""

    def answer(wanted: BlocksWanted) -> list[Extent]:
        if wanted.first:
            if error is not None:
                raise error
            return []
        return source.export_blocks(wanted) or []

    return answer


@pytest.mark.parametrize("error", [None, PeerError("it has ended"), ExtentError("cut off")])
def test_the_rest_is_computed_where_a_source_ends_in_the_middle(error: Exception | None) -> None:
    stats = check_served(target_of(ScriptedPeers(second_fails(source_of(), error))), 256)
    assert stats.num_pulled_tokens == 256
    is_damaged = isinstance(error, ExtentError)
    assert (stats.num_failed, stats.num_damaged) == (int(not is_damaged), int(is_damaged))


def test_blocks_of_other_hashes_are_not_taken() -> None:
    source, noting = source_of(), ScriptedPeers()
    other = make_request("r", random_prompt(330, seed=8), max_tokens=8, cache_salt="tenant")
    serve(source, [other])
    target_of(noting).submit(from_source([other], "tcp://peer:1")[0])
    others = {wanted.first: wanted for _, wanted in noting.asked}

    def answer(wanted: BlocksWanted) -> list[Extent]:
        return source.export_blocks(others[wanted.first]) or []

    assert check_served(target_of(ScriptedPeers(answer)), 0).num_damaged == 1


def test_another_cache_is_refused_by_name() -> None:
    source = source_of(block_size=8)
    peers = ScriptedPeers(exported(source))
    stats = check_served(target_of(peers), 0)
    assert stats.num_failed == 1
    _, wanted = peers.asked[0]
    with pytest.raises(PeerError, match=f"large tier.*{wanted.fingerprint} is wanted"):
        source.export_blocks(wanted)


def test_a_full_cache_of_running_answers_is_not_touched() -> None:
    engine = target_of(ScriptedPeers(exported(source_of())), large_blocks=30, small_blocks=30)
    running = make_request("long", random_prompt(120, seed=8), max_tokens=60)
    served = serve(engine, [running, request_of()], arrivals={"r": 2})
    assert texts(served) == {**plainly(tiny_pair(), [running]), **texts(plain(request_of()))}
    assert_idle(engine)


@pytest.mark.parametrize(
    "changes", [{"hashes": ()}, {"hashes": (b"x",) * 17}, {"wait_s": float("nan")}, {"first": -1}]
)
def test_what_no_engine_asks_for_is_refused(changes: dict[str, Any]) -> None:
    fields: dict[str, Any] = {"tier": "large", "fingerprint": "", "first": 0, "parent": b""}
    with pytest.raises(ValueError, match=next(iter(changes))):
        BlocksWanted(**{**fields, "hashes": (b"x",), "wait_s": 1.0, **changes})
