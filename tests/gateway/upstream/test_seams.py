"""The seam between a continuation and the delivered text: texts, log-probabilities, the role."""

import json
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.gateway.contract.schema.kinds import Endpoint
from outrider.gateway.upstream.call import Chunk, UpstreamCall
from outrider.gateway.upstream.continuing import Delivered, StreamSplicer, plan_of
from outrider.gateway.upstream.dialects.base import to_event
from outrider.gateway.upstream.dialects.openai import OpenAIDialect
from outrider.gateway.upstream.dialects.rewriting import cut_logprobs, num_logprobs, without_role

ENDPOINTS: Final = pytest.mark.parametrize("endpoint", ["chat", "completion"])


def event_of(
    endpoint: Endpoint, texts: list[str], tokens: list[str], *, is_first: bool, answer_id: str
) -> bytes:
    """One event with these texts and the log-probabilities of these tokens."""
    logprobs: dict[str, Any] | None = None
    if tokens and endpoint == "chat":
        logprobs = {"content": [entry_of(token) for token in tokens], "refusal": None}
    elif tokens:
        logprobs = {
            "tokens": tokens,
            "token_logprobs": [-len(token) for token in tokens],
            "top_logprobs": None,
            "text_offset": [7] * len(tokens),
        }
    choice: dict[str, Any] = {"index": 0, "logprobs": logprobs, "finish_reason": None}
    if endpoint == "chat":
        role = {"role": "assistant"} if is_first else {}
        choice["delta"] = {**role, "content": "".join(texts)}
    else:
        choice["text"] = "".join(texts)
    return to_event(json.dumps({"id": answer_id, "choices": [choice]}).encode())


def entry_of(token: str) -> dict[str, Any]:
    return {"token": token, "logprob": -len(token), "bytes": None, "top_logprobs": []}


def stream(
    endpoint: Endpoint, tokens: list[str], sizes: list[int], *, lag: int, answer_id: str
) -> list[Chunk]:
    """An answer, `sizes` tokens an event. The text comes `lag` tokens behind its log-probabilities.

    Where both are at their end, the finish reason follows.
    """
    reader = OpenAIDialect("cloud").chunk_reader(call_of(endpoint))
    events = []
    at, said = 0, 0
    while said < len(tokens):
        size = sizes[len(events) % len(sizes)]
        end = min(at + size, len(tokens))
        say = len(tokens) if at == len(tokens) else max(end - lag, said)
        events.append(
            event_of(
                endpoint,
                tokens[said:say],
                tokens[at:end],
                is_first=not events,
                answer_id=answer_id,
            )
        )
        at, said = end, say
    choice = {"index": 0, "finish_reason": "stop", "logprobs": None}
    choice |= {"delta": {}} if endpoint == "chat" else {"text": ""}
    events.append(to_event(json.dumps({"id": answer_id, "choices": [choice]}).encode()))
    return [reader.read(event) for event in events]


def call_of(endpoint: Endpoint) -> UpstreamCall:
    asked = {"messages": []} if endpoint == "chat" else {"prompt": "Once"}
    return UpstreamCall(
        endpoint=endpoint, document={**asked, "seed": 1}, model="m", request_id="r", arrival_s=0.0
    )


def choices_of(chunks: list[Chunk]) -> list[dict[str, Any]]:
    documents = [json.loads(chunk.raw.removeprefix(b"data: ")) for chunk in chunks]
    assert {document["id"] for document in documents} == {"one"}
    return [choice for document in documents for choice in document["choices"]]


def texts_of(choices: list[dict[str, Any]]) -> str:
    return "".join(
        choice.get("delta", choice).get("content") or choice.get("text") or "" for choice in choices
    )


def told_tokens(choices: list[dict[str, Any]]) -> list[str]:
    told = []
    for choice in choices:
        logprobs = choice["logprobs"] or {}
        told += [entry["token"] for entry in logprobs.get("content") or ()]
        told += logprobs.get("tokens", ())
        lengths = {len(value) for value in logprobs.values() if value is not None}
        assert len(lengths) <= 1
    return told


SIZES: Final = st.lists(st.integers(1, 4), min_size=1, max_size=5)


@ENDPOINTS
@given(
    tokens=st.lists(st.sampled_from(["a", "bc", " d", "漢", "🙂"]), min_size=2, max_size=12),
    sizes=st.tuples(SIZES, SIZES),
    lags=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    cut=st.integers(1, 12),
)
def test_however_both_streams_are_cut_they_join(
    endpoint: Endpoint,
    tokens: list[str],
    sizes: tuple[list[int], list[int]],
    lags: tuple[int, int],
    cut: int,
) -> None:
    """Texts and log-probabilities are all there, each once, and one role."""
    first = stream(endpoint, tokens, sizes[0], lag=lags[0], answer_id="one")
    sent = first[: min(cut, len(first) - 1)]
    delivered = Delivered()
    for chunk in sent:
        delivered.add(chunk)
    if not delivered.sample:
        return  # before the first text it is just asked again
    plan = plan_of(call_of(endpoint), delivered, "replay", None)
    assert plan is not None
    seam = StreamSplicer(plan, delivered.sample)
    rest = [
        fitted
        for chunk in stream(endpoint, tokens, sizes[1], lag=lags[1], answer_id="other")
        if (fitted := seam.fit(chunk)) is not None
    ]
    choices = choices_of(sent + rest)
    assert texts_of(choices) == "".join(tokens)
    assert "".join(chunk.content for chunk in sent + rest) == "".join(tokens)
    assert told_tokens(choices) == tokens
    assert sum("role" in choice.get("delta", {}) for choice in choices) == (endpoint == "chat")
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["stop"]


@ENDPOINTS
def test_cutting_log_probabilities_leaves_the_text(endpoint: Endpoint) -> None:
    raw = event_of(endpoint, ["abc"], ["a", "b", "c"], is_first=True, answer_id="one")
    chunk = OpenAIDialect("cloud").chunk_reader(call_of(endpoint)).read(raw)
    assert num_logprobs(raw) == 3
    for num_tokens in range(4):
        rest = cut_logprobs(chunk, num_tokens)
        assert rest.has_logprobs == (num_tokens < 3)
        assert num_logprobs(rest.raw) == 3 - num_tokens
        choices = choices_of([rest])
        assert texts_of(choices) == "abc" == rest.content
        assert told_tokens(choices) == ["a", "b", "c"][num_tokens:]
        assert (choices[0]["logprobs"] is None) == (num_tokens == 3)


@pytest.mark.parametrize(
    "raw",
    [
        b": a sign of life\n\n",
        b"data: [DONE]\n\n",
        b'data: {"choices":[],"role":"x"}\n\n',
        b'data: {"choices":[{"role":"x"}]}\n\n',
        b'data: {"role":1,"choices":7}\n\n',
        b'data: {"choices":[{"delta":null,"role":"x","logprobs":{"content":null}}]}\n\n',
    ],
)
def test_chunks_without_role_or_log_probabilities_are_unchanged(raw: bytes) -> None:
    assert without_role(raw).replace(b" ", b"") == raw.replace(b" ", b"")
    assert num_logprobs(raw) == 0


def test_only_the_role_goes() -> None:
    choice = b'{"index":0,"delta":{"role":"assistant","content":"\\u00e9"}}'
    raw = b'data: {"id":"one","choices":[' + choice + b"]}\n\n"
    assert without_role(raw) == raw.replace(b'"role":"assistant",', b"")
