"""Hole 6: long prompts leave the interpreter free, share a few slots, and end early."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from outrider.engine.errors import PromptTooLongError
from outrider.gateway.answering.text.chat import ChatTokenizer
from outrider.gateway.answering.text.prompt_work import (
    INLINE_CHARS,
    LONG_CHARS,
    PromptSlots,
    PromptWork,
)
from outrider.gateway.contract.errors.tree import BadRequestError, PromptQueueFullError
from outrider.gateway.contract.schema.chat import ChatRequest

WORDS = "The quick brown fox jumps over the lazy dog. "


class Counting:
    """A tokenizer's backend that records how it was called."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.held_chars: list[int] = []
        self.free_chars: list[int] = []

    def encode(self, text: str, **options: Any) -> Any:
        self.held_chars.append(len(text))
        return self._backend.encode(text, **options)

    def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        self.free_chars += map(len, texts)
        return self._backend.encode_batch_fast(texts, **options)


@pytest.fixture
def counting(tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch) -> Counting:
    backend = Counting(tokenizer._backend)
    monkeypatch.setattr(tokenizer, "_backend", backend)
    return backend


def messages(text: str) -> Any:
    turns = [{"role": "user", "content": text}]
    return ChatRequest.model_validate({"model": "auto", "messages": turns}).messages


def test_long_texts_are_tokenised_with_the_interpreter_free(
    tokenizer: ChatTokenizer, counting: Counting
) -> None:
    text = WORDS * 400
    expected = tuple(counting._backend.encode(text, add_special_tokens=False).ids)
    assert asyncio.run(tokenizer.encode_answer(text, len(text))) == expected
    assert asyncio.run(tokenizer.encode(text)).token_ids == tuple(
        counting._backend.encode(text).ids
    )
    asyncio.run(tokenizer.render_chat(messages(text)))
    assert not counting.held_chars
    assert len(counting.free_chars) == 3


def test_of_a_prompt_far_too_long_only_the_beginning_is_tokenised(
    tokenizer: ChatTokenizer, counting: Counting
) -> None:
    work = PromptWork(max_context=1000, max_tokens=7)
    text = WORDS * 20_000
    for asked in (tokenizer.encode(text, work), tokenizer.render_chat(messages(text), work=work)):
        with pytest.raises(PromptTooLongError) as caught:
            asyncio.run(asked)
        assert caught.value.num_tokens > 1000
    assert counting.free_chars == [8000, 8000]


def test_a_prompt_of_few_tokens_for_its_characters_is_not_refused_early(
    tokenizer: ChatTokenizer, counting: Counting
) -> None:
    text = WORDS * 400
    num_tokens = len(counting._backend.encode(text).ids)
    work = PromptWork(max_context=num_tokens)
    assert len(asyncio.run(tokenizer.encode(text, work)).token_ids) == num_tokens


def test_too_many_characters_are_refused_before_anything_is_rendered(
    tokenizer: ChatTokenizer, counting: Counting
) -> None:
    work = PromptWork(max_chars=10_000)
    text = "x" * 10_001
    for asked in (
        tokenizer.encode(text, work=work),
        tokenizer.encode_answer(text, 20_000, work),
        tokenizer.render_chat(messages(text), work=work),
    ):
        with pytest.raises(BadRequestError, match=r"limits\.max_prompt_chars") as caught:
            asyncio.run(asked)
        assert "at most 10000" in str(caught.value)
    assert not counting.held_chars + counting.free_chars


class Held:
    """Work of tenants that ends when it is let go; says in which order it began."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self._gates: dict[str, threading.Event] = {}
        self._began = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def work(self, name: str) -> Callable[[], str]:
        gate = self._gates[name] = threading.Event()

        def run() -> str:
            self.begun.append(name)
            self._loop.call_soon_threadsafe(self._began.set)
            assert gate.wait(10)
            return name

        return run

    def let_go(self, name: str) -> None:
        self._gates[name].set()

    async def wait_for(self, count: int) -> None:
        async with asyncio.timeout(10):
            while len(self.begun) < count:
                self._began.clear()
                await self._began.wait()


async def _settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_tenants_take_turns_for_the_slots() -> None:
    async def scenario() -> list[str]:
        slots, held = PromptSlots(num_slots=1), Held()
        names = ["a1", "a2", "a3", "a4", "b1", "b2"]
        tasks = []
        for name in names:
            tasks.append(asyncio.create_task(slots.long.run(name[0], held.work(name))))
            await _settle()
        for count in range(1, 7):
            await held.wait_for(count)
            held.let_go(held.begun[-1])
        assert await asyncio.gather(*tasks) == names
        return held.begun

    assert asyncio.run(scenario()) == ["a1", "a2", "b1", "a3", "b2", "a4"]


async def test_one_tenant_has_a_bounded_queue_of_its_own() -> None:
    slots, held = PromptSlots(num_slots=1, max_waiting_per_tenant=2), Held()
    works = [held.work(name) for name in ("a1", "a2", "a3")]
    tasks = [asyncio.create_task(slots.long.run("a", work)) for work in works]
    await held.wait_for(1)
    with pytest.raises(PromptQueueFullError):
        await slots.long.run("a", held.work("a4"))
    tasks.append(asyncio.create_task(slots.long.run("b", held.work("b1"))))
    await _settle()
    for name in ("a1", "a2", "a3", "b1"):
        held.let_go(name)
    assert await asyncio.gather(*tasks) == ["a1", "a2", "a3", "b1"]


def test_a_client_that_leaves_frees_its_slot_when_its_thread_has_ended() -> None:
    async def scenario() -> list[str]:
        slots, held = PromptSlots(num_slots=1), Held()
        first = asyncio.create_task(slots.long.run("a", held.work("a1")))
        await held.wait_for(1)
        waits = asyncio.create_task(slots.long.run("a", held.work("a2")))
        last = asyncio.create_task(slots.long.run("b", held.work("b1")))
        await _settle()
        for task in (first, waits):
            task.cancel()
        await asyncio.gather(first, waits, return_exceptions=True)
        assert held.begun == ["a1"], "its thread still runs"
        held.let_go("a1")
        held.let_go("b1")
        assert await last == "b1"
        assert await slots.long.run("a", lambda: "free") == "free"
        return held.begun

    assert asyncio.run(scenario()) == ["a1", "b1"]


async def test_short_prompts_wait_for_no_slot() -> None:
    slots, held = PromptSlots(num_slots=1), Held()
    work = PromptWork(slots=slots, tenant="a")
    long = asyncio.create_task(work.run(LONG_CHARS, held.work("a1")))
    await held.wait_for(1)
    assert await work.run(LONG_CHARS - 1, lambda: 5) == 5
    assert await work.run(1, lambda: 6) == 6
    held.let_go("a1")
    await long


def test_tenants_take_turns_for_prompts_of_middle_length_too() -> None:
    """Issue 15, second round: a tenant's two thousand of them kept the others waiting."""

    async def scenario() -> list[str]:
        slots, held = PromptSlots(num_middle_slots=1), Held()
        names = ["a1", "a2", "a3", "a4", "b1"]
        tasks = []
        for name in names:
            work = PromptWork(slots=slots, tenant=name[0])
            tasks.append(asyncio.create_task(work.run(INLINE_CHARS, held.work(name))))
            await _settle()
        for count in range(1, 6):
            await held.wait_for(count)
            held.let_go(held.begun[-1])
        assert await asyncio.gather(*tasks) == names
        return held.begun

    assert asyncio.run(scenario()) == ["a1", "a2", "b1", "a3", "a4"]


async def test_a_client_that_leaves_as_its_turn_comes_is_cancelled_and_nothing_else() -> None:
    """Issue 15, second round: its turn was gone when it wanted to give it back, a KeyError."""

    slots = PromptSlots(num_slots=1)
    first = asyncio.create_task(slots.long.run("a", lambda: "a"))
    waits = asyncio.create_task(slots.long.run("b", lambda: "b"))
    await asyncio.sleep(0)
    asyncio.get_running_loop().call_soon(slots.long.leave)  # before the cancelled task runs
    waits.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waits
    assert await first == "a"


async def _longest_gap_s(work: Any) -> float:
    """Return how long the event loop was held at most while `work` ran."""
    clock = asyncio.get_running_loop().time
    gaps: list[float] = []

    async def tick() -> None:
        last_s = clock()
        while True:
            await asyncio.sleep(0)
            gaps.append(clock() - last_s)
            last_s = clock()

    ticking = asyncio.create_task(tick())
    await asyncio.sleep(0)
    await work
    ticking.cancel()
    return max(gaps)


@pytest.mark.long
@pytest.mark.parametrize("shape", ["text", "control tokens", "messages", "calls"])
def test_the_largest_prompts_do_not_hold_the_event_loop(
    tokenizer: ChatTokenizer, shape: str
) -> None:
    """The best of three: other processes may hold the machine, but not each time."""
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    user = {"role": "user", "content": "x"}
    answer = {"role": "assistant", "content": "y"}
    turns: dict[str, list[Any]] = {
        "text": [{**user, "content": (WORDS * 23_000)[:999_000]}],
        "control tokens": [{**user, "content": "<|im_end|>" * 9_000 + WORDS * 18_000}],
        "messages": [user, answer] * 4_900 + [user],
        "calls": [user, {**answer, "tool_calls": [call] * 4_900}],
    }
    request = ChatRequest.model_validate({"model": "auto", "messages": turns[shape]})

    async def gap_s() -> float:
        work = PromptWork(slots=PromptSlots(), tenant="a", max_chars=1_000_000)
        return await _longest_gap_s(tokenizer.render_chat(request.messages, work=work))

    assert min(asyncio.run(gap_s()) for _ in range(3)) < 0.1


async def test_a_database_that_does_not_answer_delays_no_prompt() -> None:
    """Its questions wait in the event loop's default threads: prompts have threads of their own."""

    database = threading.Event()
    default = ThreadPoolExecutor(1)
    asyncio.get_running_loop().set_default_executor(default)
    question = asyncio.create_task(asyncio.to_thread(database.wait))
    await asyncio.sleep(0)  # it is in its thread
    try:
        async with asyncio.timeout(2):
            built = await PromptWork(slots=PromptSlots()).run(INLINE_CHARS, lambda: "built")
    finally:
        database.set()
        await question
    assert built == "built"
