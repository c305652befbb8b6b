"""Answers that break off and continue at another server: no text is lost or repeated."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.shared.mock_upstream import MockRequest, MockScript, ToolCall, Toxic
from outrider.gateway.contract.errors.tree import DeadlineExceededError, UpstreamError
from outrider.gateway.upstream.call import Chunk
from outrider.gateway.upstream.continuing import (
    ContinuationPlan,
    Delivered,
    DivergedError,
    StreamSplicer,
    as_one_answer,
    plan_of,
)
from outrider.gateway.upstream.dialects.base import to_event
from outrider.gateway.upstream.dialects.openai import OpenAIDialect
from outrider.gateway.upstream.upstream_usage import UpstreamUsage
from tests.gateway.upstream.tiers import (
    Bench,
    bench,
    call_of,
    expected_text,
    read_all,
    read_broken,
    until,
)

NUM_PIECES: Final = 7
TEXT: Final = MockScript(num_pieces=NUM_PIECES)
THOUGHTS: Final = MockScript(num_pieces=NUM_PIECES, reasoning=("Let me", " think", " about it."))
REPLAY: Final = "outrider"
FINAL_MESSAGE: Final = "vllm"


def cut(
    after_events: int, kind: Any = "reset", script: MockScript = TEXT, **toxic: Any
) -> MockScript:
    """The same answer by a server that fails behind so many events with text."""
    fields = {name: getattr(script, name) for name in script.__slots__}
    return MockScript(**{**fields, "toxic": Toxic(kind=kind, after_events=after_events, **toxic)})


def in_turn(*scripts: MockScript) -> Callable[[MockRequest], MockScript]:
    """One script for each request, the last one for ever."""
    return lambda request: scripts[min(request.index, len(scripts) - 1)]


@asynccontextmanager
async def checked_bench(*scripts: Any, **settings: Any) -> AsyncIterator[Bench]:
    """A tier that asks its first replica first. Nothing may be left."""
    async with bench(*scripts, **{"server": REPLAY, **settings}) as under_test:
        first, *others = under_test.tier.replicas.replicas
        first.latency.add(1e-6)
        for other in others:
            other.latency.add(0.1)
        async with asyncio.timeout(8):
            yield under_test
        under_test.nothing_left()


def documents(chunks: Sequence[Chunk]) -> list[dict[str, Any]]:
    """Return what a client reads out of the bytes."""
    return [
        json.loads(chunk.raw.removeprefix(b"data: "))
        for chunk in chunks
        if not (chunk.is_done or chunk.raw.startswith(b":"))
    ]


def sent(chunks: Sequence[Chunk], field: str = "content") -> str:
    """The text that a client reads out of the bytes."""
    choices = [choice for document in documents(chunks) for choice in document["choices"]]
    deltas = [choice.get("delta") or {"content": choice.get("text")} for choice in choices]
    return "".join(delta.get(field) or "" for delta in deltas)


def check_stream(chunks: Sequence[Chunk], *, num_tokens: int = NUM_PIECES) -> None:
    """It looks as if one server had sent it."""
    read = documents(chunks)
    assert len({document["id"] for document in read}) == 1
    choices = [choice for document in read for choice in document["choices"]]
    assert [c["finish_reason"] for c in choices if c["finish_reason"]] in (["stop"], ["length"])
    assert choices[-1]["finish_reason"] is not None
    assert sum("role" in choice.get("delta", {}) for choice in choices) <= 1
    assert [chunk.is_done for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    usages = [document["usage"] for document in read if document.get("usage")]
    assert [usage["completion_tokens"] for usage in usages] == [num_tokens]
    # What was read out of the bytes is what others are told.
    assert sent(chunks) == "".join(chunk.content for chunk in chunks)
    assert sent(chunks, "reasoning_content") in ("", "".join(chunk.reasoning for chunk in chunks))


# ---- every cut ----------------------------------------------------------------------------------


@pytest.mark.slow_cases
@pytest.mark.parametrize("server", [REPLAY, FINAL_MESSAGE])
@pytest.mark.parametrize("endpoint", ["chat", "completion"])
async def test_every_cut_of_a_text(server: str, endpoint: Any) -> None:
    for after_events in range(1, NUM_PIECES + 1):
        async with bench(cut(after_events), TEXT, server=server) as under_test:
            under_test.tier.replicas.replicas[0].latency.add(1e-6)
            under_test.tier.replicas.replicas[1].latency.add(0.1)
            call = {"endpoint": endpoint, "stream_options": {"include_usage": True}}
            answer = under_test.answer(**call)
            chunks = await read_all(answer)
            expected = expected_text(TEXT, call_of(**call))
            assert sent(chunks) == answer.delivered_text == expected
            check_stream(chunks)
            assert answer.num_continuations == 1
            assert under_test.outcomes == [
                ("answer", "failed", "reset"),
                ("continuation", "answered", None),
            ]
            assert answer.usage.num_completion_tokens == NUM_PIECES
            under_test.nothing_left()


async def test_every_cut_of_thoughts_and_text() -> None:
    num_thoughts = len(THOUGHTS.reasoning)
    for after_events in range(1, num_thoughts + NUM_PIECES + 1):
        broken = cut(after_events, script=THOUGHTS)
        async with bench(broken, THOUGHTS, server=REPLAY) as under_test:
            under_test.tier.replicas.replicas[0].latency.add(1e-6)
            under_test.tier.replicas.replicas[1].latency.add(0.1)
            chunks = await read_all(under_test.answer())
            assert sent(chunks) == expected_text(THOUGHTS)
            assert sent(chunks, "reasoning_content") == "".join(THOUGHTS.reasoning)
            check_stream(chunks, num_tokens=num_thoughts + NUM_PIECES)
            under_test.nothing_left()


@pytest.mark.slow_cases
@pytest.mark.parametrize("server", [REPLAY, FINAL_MESSAGE])
@pytest.mark.parametrize(
    ("kind", "failure"),
    [
        ("half_closed", "reset"),
        ("no_done", "ended_early"),
        ("stall", "between_tokens_timeout"),
        ("garbage", "garbage"),
        ("error_event", "reported"),
        ("long_line", "too_large"),
    ],
)
async def test_every_way_to_break_off(server: str, kind: str, failure: str) -> None:
    async with checked_bench(
        cut(3, kind), TEXT, server=server, timeouts={"between_tokens_s": 0.3}
    ) as under_test:
        chunks = await read_all(under_test.answer(stream_options={"include_usage": True}))
        assert sent(chunks) == expected_text(TEXT)
        check_stream(chunks)
        assert under_test.outcomes == [
            ("answer", "failed", failure),
            ("continuation", "answered", None),
        ]


@pytest.mark.parametrize("server", [REPLAY, FINAL_MESSAGE])
async def test_a_single_server_that_is_back_goes_on_itself(server: str) -> None:
    async with checked_bench(in_turn(cut(4), TEXT), server=server) as under_test:
        chunks = await read_all(under_test.answer())
        assert sent(chunks) == expected_text(TEXT)
        assert under_test.num_asked == [2]


@pytest.mark.parametrize("server", [REPLAY, FINAL_MESSAGE])
async def test_a_continuation_breaks_off_too(server: str) -> None:
    """Three times it goes on."""

    # Replayed answers begin anew, so their cuts are counted from the beginning.
    cuts = (2, 4, 5) if server == REPLAY else (2, 2, 1)
    async with checked_bench(in_turn(*map(cut, cuts), TEXT), server=server) as under_test:
        answer = under_test.answer(stream_options={"include_usage": True})
        chunks = await read_all(answer)
        assert sent(chunks) == expected_text(TEXT)
        check_stream(chunks)
        assert answer.num_continuations == 3


@pytest.mark.parametrize("server", [REPLAY, FINAL_MESSAGE])
async def test_the_fourth_time_is_the_end(server: str) -> None:
    cuts = (2, 3, 4, 5) if server == REPLAY else (2, 1, 1, 1)
    async with checked_bench(in_turn(*map(cut, cuts), TEXT), server=server) as under_test:
        answer = under_test.answer()
        chunks, error = await read_broken(answer)
        assert isinstance(error, UpstreamError)
        assert error.failure == "reset"
        assert expected_text(TEXT).startswith(sent(chunks))
        assert answer.delivered_text == sent(chunks)
        assert len(sent(chunks).split()) == 5
        assert answer.num_continuations == 3


async def test_a_replay_that_breaks_off_before_anything_new() -> None:
    async with checked_bench(in_turn(cut(5), cut(2), TEXT)) as under_test:
        chunks = await read_all(under_test.answer())
        assert sent(chunks) == expected_text(TEXT)
        check_stream(chunks)


# ---- how the rest is asked for ------------------------------------------------------------------


async def test_a_replay_has_the_seed_of_the_first_request() -> None:
    """Sampled without a seed: the tier gives one, so that the text can be had a second time."""
    sampled = MockScript(num_pieces=NUM_PIECES, is_sampled=True)

    async with checked_bench(cut(3, script=sampled), sampled, rng=random.Random(4)) as under_test:
        chunks = await read_all(under_test.answer(temperature=1.0))
        (first,), (second,) = (mock.requests for mock in under_test.mocks)
        seed = first.document["seed"]
        assert isinstance(seed, int)
        assert second.document["seed"] == seed
        assert sent(chunks) == expected_text(sampled, call_of(seed=seed, temperature=1.0))
        # What was delivered is a guess that saves the new server most of the work.
        guess = second.document["prediction"]["content"]
        assert sent(chunks).startswith(guess)
        assert len(guess.split()) == 3


@pytest.mark.parametrize(
    ("document", "seed"),
    [({"seed": 11}, 11), ({"temperature": 0}, None), ({"n": 2}, None), ({"stream": False}, None)],
)
async def test_seeds_that_are_left_as_they_are(document: dict[str, Any], seed: int | None) -> None:
    async with checked_bench(TEXT) as under_test:
        answer = under_test.answer(**document)
        if document.get("stream", True):
            await read_all(answer)
        else:
            await answer.whole()
            await answer.aclose()
        assert under_test.mocks[0].requests[0].document.get("seed") == seed


async def test_a_final_message_is_what_was_delivered() -> None:
    async with checked_bench(cut(3), TEXT, server=FINAL_MESSAGE) as under_test:
        chunks = await read_all(under_test.answer(max_tokens=NUM_PIECES + 2))
        document = under_test.mocks[1].requests[0].document
        delivered = document["messages"][-1]
        assert delivered["role"] == "assistant"
        assert sent(chunks).startswith(delivered["content"])
        assert len(delivered["content"].split()) == 3
        assert document["continue_final_message"] is True
        assert document["add_generation_prompt"] is False
        assert document["max_tokens"] == NUM_PIECES - 1
        assert "seed" not in document


async def test_spaces_at_the_end_are_asked_for_again() -> None:
    """Chat templates strip them, so a server would not know that they are there."""
    spaced = MockScript(pieces=("One ", "\n", "\n", "two  ", "three"))

    for after_events in range(1, 6):
        async with bench(
            cut(after_events, script=spaced), spaced, server=FINAL_MESSAGE
        ) as under_test:
            under_test.tier.replicas.replicas[0].latency.add(1e-6)
            under_test.tier.replicas.replicas[1].latency.add(0.1)
            chunks = await read_all(under_test.answer())
            assert sent(chunks) == "One \n\ntwo  three"
            begun = under_test.mocks[1].requests[0].document["messages"][-1]["content"]
            assert begun == begun.rstrip() != ""


async def test_nothing_but_spaces_is_asked_for_anew() -> None:
    spaced = MockScript(pieces=("\n", "\n", "Hello"))

    async with checked_bench(cut(2, script=spaced), spaced, server=FINAL_MESSAGE) as under_test:
        chunks = await read_all(under_test.answer(stream_options={"include_usage": True}))
        assert sent(chunks) == "\n\nHello"
        check_stream(chunks, num_tokens=3)
        assert "continue_final_message" not in under_test.mocks[1].requests[0].document


@pytest.mark.parametrize("endpoint", ["chat", "completion"])
async def test_an_answer_that_broke_off_at_its_limit_is_whole(endpoint: Any) -> None:
    """No token is left to request, but the server did not say so."""
    limit = 4

    count = lambda text: len(text.split())  # noqa: E731
    async with checked_bench(
        cut(limit), TEXT, server=FINAL_MESSAGE, count_text=count
    ) as under_test:
        call = {
            "endpoint": endpoint,
            "max_tokens": limit,
            "stream_options": {"include_usage": True},
        }
        answer = under_test.answer(**call)
        chunks = await read_all(answer)
        assert sent(chunks) == expected_text(TEXT, call_of(**call))
        assert chunks[-3].finish_reason == "length"
        check_stream(chunks, num_tokens=limit)
        assert answer.num_attempts == 1


async def test_usage_over_a_seam() -> None:
    """The delivered text is a prompt to the second server, but an answer to the client."""

    count = lambda text: len(text.split())  # noqa: E731
    async with checked_bench(cut(3), TEXT, server=FINAL_MESSAGE, count_text=count) as under_test:
        answer = under_test.answer(stream_options={"include_usage": True})
        chunks = await read_all(answer)
        (reported,) = [chunk.usage for chunk in chunks if chunk.usage]
        assert reported == answer.usage
        assert answer.usage.num_completion_tokens == NUM_PIECES
        failed, answered = under_test.booked
        # Each server is paid for what it did.
        assert failed.usage is not None
        assert answered.usage is not None
        assert failed.usage.num_completion_tokens == 3
        assert answered.usage.num_completion_tokens == NUM_PIECES - 3
        assert answered.usage.num_prompt_tokens == answer.usage.num_prompt_tokens + 3


def test_usage_as_one_answer() -> None:
    usage = UpstreamUsage(num_prompt_tokens=10, num_completion_tokens=4, num_cached_tokens=9)
    assert as_one_answer(usage, 3) == UpstreamUsage(
        num_prompt_tokens=7, num_completion_tokens=7, num_cached_tokens=7
    )


# ---- answers that cannot go on ------------------------------------------------------------------


def broken_off(chunks: Sequence[Chunk], error: Exception, script: MockScript = TEXT) -> None:
    """The failure stands, and what was delivered is right as far as it goes."""
    assert isinstance(error, UpstreamError)
    assert error.failure == "reset"
    assert expected_text(script).startswith(sent(chunks))


async def test_another_answer_is_not_mixed_into_this_one() -> None:
    # The first word is the same, and so would be all the rest of the length.
    pieces = tuple(f"{word} " for word in expected_text(TEXT).split())
    async with checked_bench(
        cut(3), MockScript(pieces=(pieces[0], "other ", *pieces[2:]))
    ) as under_test:
        chunks, error = await read_broken(under_test.answer())
        broken_off(chunks, error)
        assert len(sent(chunks).split()) == 3
        assert under_test.outcomes == [
            ("answer", "failed", "reset"),
            ("continuation", "failed", "diverged"),
        ]
        # A server with another answer is not a broken one.
        other = under_test.tier.replicas.replicas[1]
        assert other.breaker.state == "closed"
        await under_test.mocks[1].settled()


async def test_a_shorter_answer_is_another_one() -> None:
    async with checked_bench(cut(3), MockScript(num_pieces=2)) as under_test:
        chunks, error = await read_broken(under_test.answer())
        broken_off(chunks, error)
        assert under_test.outcomes[-1] == ("continuation", "failed", "diverged")


@pytest.mark.parametrize("server", ["openai", "tgi", "llama_cpp"])
async def test_servers_that_cannot_go_on(server: str) -> None:
    async with checked_bench(cut(3), TEXT, server=server) as under_test:
        chunks, error = await read_broken(under_test.answer())
        broken_off(chunks, error)
        assert under_test.num_asked == [1, 0]


@pytest.mark.parametrize(
    ("server", "document"),
    [
        (REPLAY, {"n": 2}),
        (FINAL_MESSAGE, {"n": 2}),
        (FINAL_MESSAGE, {"logprobs": True}),
        (FINAL_MESSAGE, {"response_format": {"type": "json_object"}}),
        (FINAL_MESSAGE, {"tools": [{"type": "function", "function": {"name": "plant"}}]}),
    ],
)
async def test_requests_that_cannot_go_on(server: str, document: dict[str, Any]) -> None:
    async with checked_bench(cut(3), TEXT, server=server) as under_test:
        _, error = await read_broken(under_test.answer(**document))
        assert isinstance(error, UpstreamError)
        assert under_test.num_asked == [1, 0]


async def test_calls_that_were_begun_do_not_go_on() -> None:
    calling = MockScript(num_pieces=1, tool_calls=(ToolCall(name="plant", arguments='{"a": 1}'),))

    async with checked_bench(cut(3, script=calling), calling) as under_test:
        chunks, error = await read_broken(under_test.answer())
        broken_off(chunks, error, calling)
        assert under_test.num_asked == [1, 0]


async def test_thoughts_are_not_put_into_a_final_message() -> None:
    async with checked_bench(cut(4, script=THOUGHTS), THOUGHTS, server=FINAL_MESSAGE) as under_test:
        chunks, error = await read_broken(under_test.answer())
        broken_off(chunks, error, THOUGHTS)
        assert under_test.num_asked == [1, 0]


async def test_logprobs_go_on_where_nothing_is_cut() -> None:
    async with checked_bench(cut(3), TEXT) as under_test:
        chunks = await read_all(under_test.answer(logprobs=True))
        assert sent(chunks) == expected_text(TEXT)
        tokens = [
            entry["token"]
            for document in documents(chunks)
            for choice in document["choices"]
            for entry in (choice["logprobs"] or {}).get("content", [])
        ]
        assert "".join(tokens) == expected_text(TEXT)


@pytest.mark.parametrize(
    "second",
    [
        MockScript(toxic=Toxic(kind="status", status=400)),
        MockScript(toxic=Toxic(kind="status", status=429, retry_after_s=30.0)),
        MockScript(toxic=Toxic(kind="status", status=500)),
    ],
)
async def test_the_first_failure_is_the_one_that_is_told(second: MockScript) -> None:
    async with checked_bench(
        in_turn(cut(3), second), second, server=FINAL_MESSAGE, max_retries=1
    ) as under_test:
        chunks, error = await read_broken(under_test.answer())
        broken_off(chunks, error)


async def test_a_continuation_is_retried_at_another_server() -> None:
    async with checked_bench(
        in_turn(cut(3), TEXT), MockScript(toxic=Toxic(kind="status", status=500))
    ) as under_test:
        answer = under_test.answer()
        assert sent(await read_all(answer)) == expected_text(TEXT)
        assert answer.num_continuations == 1
        assert under_test.outcomes == [
            ("answer", "failed", "reset"),
            ("continuation", "failed", "status"),
            ("continuation", "answered", None),
        ]


async def test_a_deadline_ends_a_continuation() -> None:
    async with checked_bench(cut(3), MockScript(toxic=Toxic(kind="slow_headers"))) as under_test:
        chunks, error = await read_broken(under_test.answer(deadline_in_s=0.4))
        assert isinstance(error, DeadlineExceededError)
        assert len(sent(chunks).split()) == 3


async def test_the_total_time_is_for_the_whole_answer() -> None:
    async with checked_bench(cut(3, "stall"), TEXT, timeouts={"total_s": 0.4}) as under_test:
        chunks, error = await read_broken(under_test.answer())
        assert isinstance(error, UpstreamError)
        assert error.failure == "total_timeout"
        assert len(sent(chunks).split()) == 3
        assert under_test.num_asked == [1, 0]


async def test_mirrors_do_not_go_on() -> None:
    async with checked_bench(cut(3), TEXT) as under_test:
        chunks, error = await read_broken(under_test.answer(kind="mirror"))
        broken_off(chunks, error)
        assert under_test.outcomes == [("mirror", "failed", "reset")]


async def test_leaving_while_it_goes_on() -> None:
    async with checked_bench(cut(3), MockScript(toxic=Toxic(kind="slow_headers"))) as under_test:
        answer = under_test.answer()
        task = asyncio.create_task(read_all(answer))
        await until(lambda: under_test.num_asked == [1, 1])
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await under_test.mocks[1].settled()
        assert under_test.outcomes == [
            ("answer", "failed", "reset"),
            ("continuation", "cancelled", None),
        ]


# ---- the seam, whatever the chunks --------------------------------------------------------------


def cut_up(text: str, cuts: list[int]) -> list[str]:
    """The text in pieces; cuts are taken modulo its length."""
    places = sorted({place % (len(text) + 1) for place in cuts} | {0, len(text)})
    return [text[a:b] for a, b in pairwise(places)]


def stream(reasoning: list[str], content: list[str], answer_id: str) -> list[Chunk]:
    """Chunks of an answer, as a server might send them."""
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{"reasoning_content": piece} for piece in reasoning]
    deltas += [{"content": piece} for piece in content]
    events = [
        {"id": answer_id, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
        for delta in deltas
    ]
    end = {"index": 0, "delta": {}, "finish_reason": "stop"}
    events.append({"id": answer_id, "choices": [end]})
    raws = [to_event(json.dumps(event).encode()) for event in events]
    reader = OpenAIDialect("cloud").chunk_reader(call_of())
    return [reader.read(raw) for raw in [b": alive\n\n", *raws, b"data: [DONE]\n\n"]]


def replayed(delivered: Delivered, chunks: list[Chunk]) -> list[Chunk]:
    """Return what a replayed stream adds."""
    plan = plan_of(call_of(), delivered, "replay", None)
    assert plan is not None
    seam = StreamSplicer(plan, delivered.sample)
    return [fitted for chunk in chunks if (fitted := seam.fit(chunk)) is not None]


CUTS = st.lists(st.integers(0, 200), max_size=6)


@given(st.text(max_size=30), st.text(min_size=1, max_size=30), CUTS, CUTS, st.integers(1, 12))
def test_any_two_ways_to_cut_an_answer_fit(
    reasoning: str, content: str, one: list[int], other: list[int], num_delivered: int
) -> None:
    first = stream(cut_up(reasoning, one), cut_up(content, one), "first")
    num_texts = sum(chunk.has_text for chunk in first)
    delivered = Delivered()
    before = []
    for chunk in first:
        if chunk.finish_reason or sum(c.has_text for c in before) == min(num_delivered, num_texts):
            break
        before.append(chunk)
        delivered.add(chunk)
    after = replayed(delivered, stream(cut_up(reasoning, other), cut_up(content, other), "second"))
    assert sent([*before, *after]) == content
    assert sent([*before, *after], "reasoning_content") == reasoning
    assert {document["id"] for document in documents([*before, *after])} == {"first"}
    assert sum("role" in d["choices"][0]["delta"] for d in documents([*before, *after])) == 1
    assert after[-1].is_done


@given(st.text(min_size=1, max_size=30), st.text(min_size=1, max_size=30), CUTS, CUTS)
def test_another_answer_never_fits(known: str, text: str, one: list[int], other: list[int]) -> None:
    delivered = Delivered()
    for chunk in stream([], cut_up(known, one), "first"):
        if not chunk.finish_reason and not chunk.is_done:
            delivered.add(chunk)
    chunks = stream([], cut_up(text, other), "second")
    if text.startswith(known):
        assert known + sent(replayed(delivered, chunks)) == text
    else:
        with pytest.raises(DivergedError):
            replayed(delivered, chunks)


@pytest.mark.parametrize(
    ("reasoning", "content"),
    [
        (["Hm", "m, more"], ["Hello"]),  # thinks on behind what was thought
        (["H"], ["Hello"]),  # answers before all was thought
        (["Hm"], []),  # ends before it answers
    ],
)
def test_other_thoughts_do_not_fit(reasoning: list[str], content: list[str]) -> None:
    plan = ContinuationPlan(resume=None, known_reasoning="Hm", known_content="Hel", num_before=0)
    seam = StreamSplicer(plan, b"")
    chunks = stream(reasoning, content, "second")
    with pytest.raises(DivergedError):
        all(seam.fit(chunk) is None for chunk in chunks)


def test_thoughts_behind_the_answer_do_not_fit() -> None:
    plan = ContinuationPlan(resume=None, known_reasoning="Hm", known_content="Hel", num_before=0)
    seam = StreamSplicer(plan, b"")
    chunks = stream(["H"], ["Hel"], "second")[:-2] + stream(["m"], ["lo"], "second")
    with pytest.raises(DivergedError):
        all(seam.fit(chunk) is None for chunk in chunks)
