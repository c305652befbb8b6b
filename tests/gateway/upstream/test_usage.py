from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.gateway.settings.passed import UpstreamPriceSettings
from outrider.gateway.upstream.call import Chunk, UpstreamCall, WholeAnswer
from outrider.gateway.upstream.upstream_usage import UpstreamUsage
from outrider.gateway.upstream.usage import CountText, UsageMeter, cost_usd, usage_object


def call(document: Mapping[str, Any] | None = None) -> UpstreamCall:
    return UpstreamCall(
        endpoint="chat",
        document=document or {"messages": [{"role": "user", "content": "x" * 40}]},
        model="m",
        request_id="r",
        arrival_s=0.0,
    )


def count_words(text: str) -> int:
    return len(text.split())


def text(content: str, index: int = 0) -> Chunk:
    return Chunk(raw=b"", content=content, index=index)


def report(num_completion: int, **fields: Any) -> UpstreamUsage:
    return UpstreamUsage(num_prompt_tokens=7, num_completion_tokens=num_completion, **fields)


@pytest.mark.parametrize(
    ("temperature", "reported", "is_corrected"),
    [
        *((2.0, 13, False), (2.0, 14, False), (2.0, 15, True), (2.0, 7, True)),
        *((1.0, 13, True), (0, 13, True), (None, 13, True)),
    ],
)
def test_hot_text_may_have_more_tokens_than_its_spelling_needs(
    temperature: float | None, reported: int, is_corrected: bool
) -> None:
    asked = call({"messages": [], "temperature": temperature})
    meter = UsageMeter(asked, count_words, None)
    meter.add(text("word " * 10))
    meter.add(told(report(reported)))
    assert meter.result().is_corrected is is_corrected


def metered(
    *chunks: Chunk, count: CountText | None = count_words, num_prompt: int | None = None
) -> UpstreamUsage:
    meter = UsageMeter(call(), count, None if num_prompt is None else lambda _: num_prompt)
    for chunk in chunks:
        meter.add(chunk)
    return meter.result()


def told(usage: UpstreamUsage) -> Chunk:
    return Chunk(raw=b"", usage=usage)


@pytest.mark.parametrize(
    ("num_words", "reported", "is_corrected"),
    [
        *((10, 12, False), (10, 8, False), (10, 13, True), (10, 7, True), (200, 204, False)),
        *((200, 205, True), (200, 195, True), (10, 0, True), (10, 1_000_000, True)),
    ],
)
def test_a_report_is_held_against_the_text(
    num_words: int, reported: int, is_corrected: bool
) -> None:
    # Words are cut in the middle: only the whole text counts.
    words = "word " * num_words
    usage = metered(text(words[:12]), text(words[12:]), told(report(reported)))
    assert usage.is_corrected is is_corrected
    assert usage.num_completion_tokens == (num_words if is_corrected else reported)
    assert usage.source == ("counted" if is_corrected else "reported")
    assert usage.num_prompt_tokens == 7


def test_a_report_is_used_where_tokens_cannot_be_counted() -> None:
    usage = report(99999)
    assert metered(text("a"), told(usage), count=None) is usage


@pytest.mark.parametrize("hidden", [Chunk(raw=b"", has_calls=True), Chunk(raw=b"", reasoning="Hm")])
def test_calls_and_thoughts_may_have_hidden_tokens(hidden: Chunk) -> None:
    usage = report(500)
    assert metered(text("a b"), hidden, told(usage)) is usage


def test_reasoning_that_is_reported_only_is_believed() -> None:
    honest = report(103, num_reasoning_tokens=100)
    assert metered(text("a b c"), told(honest)) is honest
    lying = metered(text("a b c"), told(report(150, num_reasoning_tokens=100)))
    assert (lying.num_completion_tokens, lying.num_reasoning_tokens) == (103, 100)
    assert lying.is_corrected


def test_the_prompt_is_counted_too() -> None:
    fine = metered(text("a"), told(report(1)), num_prompt=9)
    assert (fine.num_prompt_tokens, fine.is_corrected) == (7, False)
    usage = metered(text("a"), told(report(1, num_cached_tokens=6)), num_prompt=4)
    assert (usage.num_prompt_tokens, usage.num_cached_tokens) == (4, 4)
    assert (usage.source, usage.is_corrected) == ("counted", True)
    assert usage.num_completion_tokens == 1
    unknown = UsageMeter(call(), count_words, lambda _: None)
    unknown.add(told(report(0)))
    assert unknown.result().num_prompt_tokens == 7


def test_choices_are_counted_each_on_its_own() -> None:
    usage = metered(text("a", 0), text("b", 1), text("c", 0), num_prompt=3)
    assert usage.num_completion_tokens == 2  # "ac" and "b"
    assert (usage.source, usage.is_corrected) == ("counted", False)


def test_without_a_report_all_is_counted() -> None:
    usage = metered(Chunk(raw=b"", reasoning="H m"), text("a b c"), num_prompt=5)
    assert usage == UpstreamUsage(
        num_prompt_tokens=5, num_completion_tokens=5, num_reasoning_tokens=2, source="counted"
    )


def test_uncountable_tokens_are_estimated() -> None:
    usage = metered(text("a" * 9), count=None)
    # Forty characters and the role's four; nine of the answer.
    assert (usage.num_prompt_tokens, usage.num_completion_tokens) == (11, 3)
    assert usage.source == "estimated"
    called = Chunk(raw=b"", has_calls=True)
    usage = metered(text("a b"), called, called, num_prompt=5)
    assert (usage.num_completion_tokens, usage.source) == (4, "estimated")
    assert metered(text("a b")).source == "estimated"  # of the prompt nobody knows


@pytest.mark.parametrize(
    ("document", "num_tokens"),
    [
        ({"prompt": "a" * 8}, 2),
        ({"prompt": [1, 2, 3]}, 3),
        ({"prompt": [[1, 2], "abcd"]}, 3),
        ({"messages": [{"content": [{"type": "x", "url": "data:" + "a" * 99}]}]}, 1),
        ({"messages": [{"content": "abcd"}], "tools": [{"d": "abcd", "e": [True, None, 0.5]}]}, 2),
        ({}, 0),
        ({"messages": 7}, 1),
    ],
)
def test_prompts_are_estimated_by_their_text(document: dict[str, Any], num_tokens: int) -> None:
    meter = UsageMeter(call(document or {"model": "m"}))
    assert meter.result().num_prompt_tokens == num_tokens


def test_prompts_may_be_nested_deeply() -> None:
    nested: list[Any] = ["abcd"]
    for _ in range(5000):
        nested = [nested]
    assert UsageMeter(call({"messages": nested})).result().num_prompt_tokens == 0


def test_the_last_report_counts() -> None:
    last = report(2)
    assert metered(told(report(1)), text("a b"), told(last), Chunk(raw=b"")) is last


def test_a_whole_answer() -> None:
    meter = UsageMeter(call(), count_words)
    meter.add_whole(WholeAnswer(body=b"", texts=("a b", "c"), reasoning=("", ""), usage=report(9)))
    usage = meter.result()
    assert (usage.num_completion_tokens, usage.is_corrected) == (3, True)
    meter = UsageMeter(call(), count_words)
    meter.add_whole(WholeAnswer(body=b"", texts=("a",), has_calls=True, usage=report(9)))
    assert meter.result() == report(9)


def test_costs() -> None:
    usage = UpstreamUsage(num_prompt_tokens=1000, num_completion_tokens=100, num_cached_tokens=400)
    assert cost_usd(usage, UpstreamPriceSettings()) is None
    price = UpstreamPriceSettings(prompt=2.0, completion=10.0)
    assert cost_usd(usage, price) == pytest.approx(0.003)
    cached = UpstreamPriceSettings(prompt=2.0, cached_prompt=0.5, completion=10.0)
    assert cost_usd(usage, cached) == pytest.approx(0.0024)
    free = UpstreamPriceSettings(prompt=2.0, cached_prompt=0.0)
    assert cost_usd(usage, free) == pytest.approx(0.0012)
    odd = UpstreamUsage(num_prompt_tokens=10, num_cached_tokens=99)
    assert cost_usd(odd, price) == pytest.approx(0.00002)
    assert usage_object(usage)["total_tokens"] == 1100


@given(
    st.lists(st.text("ab ", max_size=5), max_size=5),
    st.none() | st.integers(0, 50),
    st.none() | st.integers(0, 50),
)
def test_estimates_are_near_the_counted_tokens(
    pieces: list[str], reported: int | None, num_prompt: int | None
) -> None:
    chunks = [text(piece) for piece in pieces]
    if reported is not None:
        chunks.append(told(report(reported, num_cached_tokens=7)))
    usage = metered(*chunks, num_prompt=num_prompt)
    counted = count_words("".join(pieces))
    assert abs(usage.num_completion_tokens - counted) <= max(2, 0.02 * counted)
    assert 0 <= usage.num_cached_tokens <= usage.num_prompt_tokens
    assert usage.is_corrected is (
        reported is not None and usage != report(reported, num_cached_tokens=7)
    )
