"""Engine events to deltas: text, pieces, log-probabilities and counts stay consistent."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.engine.events import TokensEmitted
from outrider.engine.request import EngineRequest
from outrider.gateway.answering.candidates.local_responder import LocalResponder, Writing
from outrider.gateway.answering.reading.local_load import LocalLoad
from outrider.gateway.answering.streaming.fan_in import merge
from outrider.gateway.answering.streaming.generation import (
    Choice,
    ChoicePlan,
    Delta,
    Generation,
    Job,
)
from outrider.gateway.answering.text.chat import ChatTokenizer
from outrider.gateway.contract.answers.responder import DIRECT
from outrider.gateway.contract.errors.tree import EngineLostError
from outrider.gateway.tenancy.metering.gateway_metrics import GatewayMetrics
from outrider.verifier.params import SamplingParams
from outrider.verifier.token_logprobs import TokenLogprobs
from tests.gateway.scripted_client import Script, ScriptedClient, Step


def job_of(
    tokenizer: ChatTokenizer,
    *,
    stops: tuple[str, ...] = (),
    stop_ids: tuple[int, ...] | None = None,
    min_tokens: int = 0,
    thinks: bool = False,
    n: int = 1,
) -> Job:
    plans = [
        ChoicePlan(
            request=EngineRequest(
                request_id=f"r-{index}",
                prompt_token_ids=(5, 6),
                tier="large",
                sampling=SamplingParams(
                    max_tokens=100,
                    choice_index=index,
                    stop_token_ids=tokenizer.stop_token_ids if stop_ids is None else stop_ids,
                    min_tokens=min_tokens,
                ),
            )
        )
        for index in range(n)
    ]
    return Job(
        job_id="job",
        created=0,
        model_id="m",
        tier="large",
        reason="requested",
        seed=None,
        arrival_s=0.0,
        num_prompt_tokens=2,
        choices=tuple(plans),
        tokenizer=tokenizer,
        stops=stops,
        continues_text=not thinks,
    )


def events_of(ids: list[int], sizes: list[int]) -> list[TokensEmitted]:
    """The ids in groups of the given sizes (cycled); every group but its last token was drafted."""
    events, at = [], 0
    while at < len(ids):
        size = sizes[len(events) % len(sizes)]
        part = tuple(ids[at : at + size])
        entries = tuple(TokenLogprobs(token_id=i, logprob=-1.0) for i in part)
        events.append(
            TokensEmitted(
                request_id="r",
                token_ids=part,
                num_drafted_tokens=size + 1,
                num_accepted_tokens=len(part) - 1,
                logprobs=entries,
            )
        )
        at += size
    return events


def run_choice(choice: Choice, events: list[TokensEmitted]) -> list[Delta]:
    deltas = []
    for event in events:
        deltas += choice.add_tokens(event)
        if choice.finish_reason is not None:
            return deltas
    return deltas + choice.end("length")


sizes = st.lists(st.integers(1, 5), min_size=1, max_size=6)
some_text = st.lists(
    st.sampled_from(["ab", "STOP", "ST", "OP", "é漢", " ", "🙂", "x"]), max_size=12
)


@given(text=some_text.map("".join), sizes=sizes, use_stops=st.booleans())
def test_deltas_add_up(
    tokenizer: ChatTokenizer,
    encode: Callable[[str], list[int]],
    text: str,
    sizes: list[int],
    use_stops: bool,
) -> None:
    """However tokens are grouped: the same text, pieces that join to it, every token counted."""
    ids = encode(text)
    stops = ("STOP", "OPx") if use_stops else ()
    choice = Choice(0, job_of(tokenizer, stops=stops))
    deltas = run_choice(choice, events_of(ids, sizes))
    sent = "".join(delta.text for delta in deltas)
    starts = [text.find(word) for word in stops if word in text]
    if starts:
        assert text.startswith(sent)
        assert not any(word in sent for word in stops)
        assert choice.finish_reason == "stop"
    else:
        assert sent == text
        assert choice.finish_reason == "length"
        assert choice.usage.num_tokens == len(ids)
    for delta in deltas[:-1]:
        assert "".join(piece for piece, _ in delta.pieces) == delta.text
        assert delta.text
    assert deltas[-1].finish_reason == choice.finish_reason
    spelled = b"".join(
        tokenizer.token_bytes(entry.token_id) for delta in deltas for entry in delta.logprobs
    )
    assert spelled.startswith(sent.encode())
    if not starts:
        assert spelled == sent.encode()
    assert choice.usage.num_accepted_tokens <= choice.usage.num_drafted_tokens


def test_which_tokens_were_drafted(
    tokenizer: ChatTokenizer, encode: Callable[[str], list[int]]
) -> None:
    """A piece keeps its mark also when it was held back and came out in a later step."""
    ids = encode("STOx")
    assert len(ids) > 2
    choice = Choice(0, job_of(tokenizer, stops=("STOP",)))
    event = TokensEmitted(
        request_id="r", token_ids=tuple(ids[:-1]), num_drafted_tokens=3, num_accepted_tokens=1
    )
    assert choice.add_tokens(event) == []
    last = TokensEmitted(request_id="r", token_ids=(ids[-1],))
    (delta,) = choice.add_tokens(last)
    assert delta.text == "STOx"
    assert [drafted for _, drafted in delta.pieces] == [True] + [False] * (len(ids) - 1)


def test_tokens_behind_a_stop_string_do_not_count(
    tokenizer: ChatTokenizer, encode: Callable[[str], list[int]]
) -> None:
    before, after = encode("ab STOP"), encode(" and much more")
    choice = Choice(0, job_of(tokenizer, stops=("STOP",)))
    event = TokensEmitted(
        request_id="r",
        token_ids=tuple(before + after),
        num_drafted_tokens=40,
        num_accepted_tokens=len(before + after) - 1,
    )
    deltas = choice.add_tokens(event)
    assert "".join(delta.text for delta in deltas) == "ab "
    assert choice.usage.num_tokens == len(before)
    assert choice.usage.num_accepted_tokens == len(before)


def test_the_end_of_sequence_token_has_no_text_and_no_logprob(
    tokenizer: ChatTokenizer, encode: Callable[[str], list[int]]
) -> None:
    ids = [*encode("ab"), *tokenizer.stop_token_ids]
    choice = Choice(0, job_of(tokenizer))
    deltas = run_choice(choice, events_of(ids, [2]))
    assert "".join(delta.text for delta in deltas) == "ab"
    assert choice.usage.num_tokens == len(ids)
    assert sum(len(delta.logprobs) for delta in deltas) == len(ids) - 1


def test_a_requests_own_stop_token_has_no_text(
    tokenizer: ChatTokenizer, encode: Callable[[str], list[int]]
) -> None:
    """And with `ignore_eos` an end-of-sequence token is a token like others: counted, no text."""
    *text, last = encode("ab STOP x")
    (eos,) = tokenizer.stop_token_ids
    choice = Choice(0, job_of(tokenizer, stop_ids=(last,)))
    deltas = run_choice(choice, events_of([*text, eos, *text, last], [2]))
    spelled = b"".join(map(tokenizer.token_bytes, text)).decode()
    assert "".join(delta.text for delta in deltas) == spelled * 2
    assert choice.usage.num_tokens == 2 * len(text) + 2
    assert sum(len(delta.logprobs) for delta in deltas) == 2 * len(text) + 1


@pytest.mark.parametrize("size", [1, 3, 20])
def test_before_min_tokens_no_stop_string_ends_the_answer(
    tokenizer: ChatTokenizer, encode: Callable[[str], list[int]], size: int
) -> None:
    first, second = encode("one STOP two"), encode(" three STOP four")
    for min_tokens, expected in (
        (0, "one "),
        (len(first), "one STOP two three "),
        (len(first + second), "one STOP two three STOP four"),
    ):
        choice = Choice(0, job_of(tokenizer, stops=("STOP",), min_tokens=min_tokens))
        deltas = run_choice(choice, events_of([*first, *second], [size]))
        assert "".join(delta.text for delta in deltas) == expected
        spelled = b"".join(
            tokenizer.token_bytes(entry.token_id) for delta in deltas for entry in delta.logprobs
        )
        assert spelled.decode().startswith(expected.rstrip())


def test_stop_strings_do_not_look_into_thinking(
    tokenizer: ChatTokenizer, encode: Callable[[str], list[int]]
) -> None:
    ids = encode("<think>one STOP two</think>three STOP four")
    choice = Choice(0, job_of(tokenizer, stops=("STOP",), thinks=True))
    deltas = run_choice(choice, events_of(ids, [3]))
    texts = {"reasoning": "", "content": ""}
    for delta in deltas:
        texts[delta.kind] += delta.text
    assert texts == {"reasoning": "one STOP two", "content": "three "}
    assert abs(choice.usage.num_reasoning_tokens - len(encode("one STOP two"))) <= 1
    spelled = b"".join(
        tokenizer.token_bytes(entry.token_id) for delta in deltas for entry in delta.logprobs
    )
    assert b"one" not in spelled
    assert spelled.startswith(b"three")


def test_thinking_that_never_ends_is_no_answer(
    tokenizer: ChatTokenizer, encode: Callable[[str], list[int]]
) -> None:
    choice = Choice(0, job_of(tokenizer, thinks=True), opens_thinking=True)
    deltas = run_choice(choice, events_of(encode("fox </th"), [1]))
    assert {delta.kind for delta in deltas[:-1]} == {"reasoning"}
    assert "".join(delta.text for delta in deltas) == "fox </th"
    assert choice.usage.num_reasoning_tokens == choice.usage.num_tokens


def generation_of(
    tokenizer: ChatTokenizer, script: Script, **job: Any
) -> tuple[Generation, ScriptedClient]:
    engine = ScriptedClient(vocab_size=420, script=lambda _: script)
    return Generation(engine, job_of(tokenizer, **job), GatewayMetrics()), engine


async def test_a_stop_string_aborts_before_the_client_is_served(
    tokenizer: ChatTokenizer, encode: Callable[[str], list[int]]
) -> None:
    """A slow client must not keep a finished sequence alive."""
    steps = [Step(token_ids=tuple(encode("ab STOP")))]
    generation, engine = generation_of(tokenizer, Script(steps=steps, hangs=True), stops=("STOP",))

    async with aclosing(generation.steps()) as steps:
        assert [delta.text for delta in await anext(steps)] == ["ab ", ""]
        assert engine.aborted == ["r-0"]


async def test_the_events_of_a_step_are_one_part_of_the_stream(
    tokenizer: ChatTokenizer, encode: Callable[[str], list[int]]
) -> None:
    """Which is one write to the client. Later texts look as the first one, but for its role."""
    steps = [Step(token_ids=tuple(encode(text))) for text in ("one", ' "two"', " three STOP")]
    generation, _ = generation_of(tokenizer, Script(steps=steps, hangs=True), stops=("STOP",))
    load = LocalLoad(time.monotonic).admit()
    responder = LocalResponder(generation, Writing(is_streamed=True), DIRECT, load)

    parts = [part async for part in responder.parts()]

    assert [part.count(b"data: ") for part in parts] == [1, 1, 2, 1]
    events = b"".join(parts).removesuffix(b"data: [DONE]\n\n").split(b"data: ")[1:]
    first, second, third, end = map(json.loads, events)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": "one"}
    said = {"index": 0, "delta": {"content": ' "two"'}, "logprobs": None, "finish_reason": None}
    assert second == first | {"choices": [said]}
    assert third["choices"][0]["delta"] == {"content": " three "}
    assert end["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("n", [1, 3])
def test_closing_aborts_every_choice(
    tokenizer: ChatTokenizer, encode: Callable[[str], list[int]], n: int
) -> None:
    steps = [Step(token_ids=(token,)) for token in encode("Hello there")]
    generation, engine = generation_of(tokenizer, Script(steps=steps, hangs=True), n=n)

    async def main() -> None:
        async with aclosing(generation.steps()) as steps:
            await anext(steps)
            assert len(engine.running) == n

    asyncio.run(main())
    assert len(engine.aborted) == n
    assert not engine.running


def test_one_choice_that_fails_aborts_the_others(
    tokenizer: ChatTokenizer, encode: Callable[[str], list[int]]
) -> None:
    generation, engine = generation_of(tokenizer, Script(), n=3)
    steps = [Step(token_ids=tuple(encode("Hello")))]
    engine.script = lambda request: (
        Script(steps=steps, failure=("engine_died", "gone"))
        if request.sampling.choice_index == 1
        else Script(steps=steps, hangs=True)
    )

    async def main() -> list[Delta]:
        return [delta async for step in generation.steps() for delta in step]

    with pytest.raises(EngineLostError, match="gone"):
        asyncio.run(main())
    assert sorted(engine.aborted) == ["r-0", "r-2"]


def test_merge_is_fair() -> None:
    """Streams that always have something still take turns."""

    async def numbers(tag: str) -> AsyncGenerator[str]:
        for _ in range(50):
            yield tag

    async def main() -> list[str]:
        return [item async for item in merge([numbers("a"), numbers("b"), numbers("c")])]

    order = asyncio.run(main())
    assert len(order) == 150
    assert all(order[:90].count(tag) >= 25 for tag in "abc")
