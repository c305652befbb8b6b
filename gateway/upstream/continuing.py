"""Continues an answer that broke off in its middle, without lost or repeated text."""

from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec

from outrider.gateway.settings.server_traits import ContinuationStrategy
from outrider.gateway.upstream.call import Chunk, UpstreamCall
from outrider.gateway.upstream.dialects.base import Resume, to_event
from outrider.gateway.upstream.dialects.openai_request import is_resumable
from outrider.gateway.upstream.dialects.rewriting import (
    cut_content,
    cut_logprobs,
    id_of,
    num_logprobs,
    says_something,
    splice,
    with_id,
    without_role,
)
from outrider.gateway.upstream.event_stream import event_data
from outrider.gateway.upstream.upstream_request import DONE_CHUNK
from outrider.gateway.upstream.upstream_usage import UpstreamUsage
from outrider.gateway.upstream.usage import CountText, usage_object

_encode: Final = msgspec.json.Encoder().encode


class DivergedError(Exception):
    """Another replica's answer is not the one that broke off."""


class Delivered:
    """The part of an answer that the client has received. Its text is that of the first choice."""

    __slots__ = ("_content", "_num_parts", "_reasoning", "has_calls", "num_logprobs", "sample")

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._num_parts = 0
        self.has_calls = False
        self.num_logprobs = 0
        """Tokens whose log-probabilities were delivered."""
        self.sample = b""
        """The first event with text: it has the answer's id, and the form of its chunks."""

    def add(self, chunk: Chunk) -> None:
        """Add one more chunk. This runs for each token of each client."""
        if (chunk.content or chunk.reasoning) and not chunk.index:
            if chunk.content:
                self._content.append(chunk.content)
            if chunk.reasoning:
                self._reasoning.append(chunk.reasoning)
            self._num_parts += 1
            if not self.sample:
                self.sample = chunk.raw
        if chunk.has_calls:
            self.has_calls = True
        if chunk.has_logprobs:
            self.num_logprobs += num_logprobs(chunk.raw)

    @property
    def content(self) -> str:
        """Return the answer so far."""
        return "".join(self._content)

    @property
    def reasoning(self) -> str:
        """Return the reasoning delivered before it."""
        return "".join(self._reasoning)

    def num_tokens(self, count_text: CountText | None) -> int:
        """Return all its tokens; without a tokenizer, one for each chunk is assumed."""
        if count_text is None:
            return self._num_parts
        return sum(count_text(text) for text in (self.content, self.reasoning) if text)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContinuationPlan:
    """The request for the rest of an answer."""

    resume: Resume | None
    """The fields to add for the server; None: repeat the request."""
    known_reasoning: str
    """Reasoning that the new stream must begin with."""
    known_content: str
    """Content that the new stream must begin with."""
    num_before: int
    """Tokens that it does not count as its own."""
    known_logprobs: int = 0
    """Number of tokens whose log-probabilities are repeated."""


def plan_of(
    call: UpstreamCall,
    delivered: Delivered,
    strategy: ContinuationStrategy,
    count_text: CountText | None,
) -> ContinuationPlan | None:
    """Plan the continuation at another replica of the same model; None where none is possible."""
    if delivered.has_calls or not is_resumable(call, strategy):
        return None
    content, reasoning = delivered.content, delivered.reasoning
    num_tokens = delivered.num_tokens(count_text)
    if strategy == "replay":
        resume = Resume(text=content, num_tokens=num_tokens, strategy=strategy)
        return ContinuationPlan(
            resume=resume,
            known_reasoning=reasoning,
            known_content=content,
            num_before=0,
            known_logprobs=delivered.num_logprobs,
        )
    if reasoning or delivered.num_logprobs:
        return None
    # Chat templates strip a message's last spaces. So they are not sent, and must come again.
    sent = content.rstrip() if call.endpoint == "chat" else content
    if sent != content:
        num_tokens = num_tokens - 1 if count_text is None else count_text(sent)
    if not sent:
        return ContinuationPlan(
            resume=None, known_reasoning="", known_content=content, num_before=0
        )
    return ContinuationPlan(
        resume=Resume(text=sent, num_tokens=num_tokens, strategy=strategy),
        known_reasoning="",
        known_content=content[len(sent) :],
        num_before=num_tokens,
    )


class StreamSplicer:
    """Fits the stream of a continuation to the text delivered before it."""

    __slots__ = (
        "_answer_id",
        "_has_joined",
        "_num_content",
        "_num_logprobs_left",
        "_num_reasoning",
        "_plan",
    )

    def __init__(self, plan: ContinuationPlan, sample: bytes) -> None:
        self._plan = plan
        self._answer_id = id_of(sample)
        self._num_reasoning = 0
        self._num_content = 0
        self._num_logprobs_left = plan.known_logprobs
        self._has_joined = False

    def fit(self, chunk: Chunk) -> Chunk | None:
        """Return the chunk without known text, under the first stream's id; None if nothing is new.

        Raises DivergedError where it is not the same answer.
        """
        num_chars = 0
        if not self._is_caught_up:
            num_chars = self._skip(chunk)
            is_over = chunk.finish_reason is not None or chunk.is_done
            if not self._is_caught_up and (chunk.has_calls or is_over):
                raise DivergedError
        rest: Chunk | None = self._without_known_logprobs(chunk)
        if num_chars and rest is not None:
            rest = cut_content(rest, num_chars)
        if rest is None or not (self._is_caught_up or rest.has_logprobs):
            return None
        if not self._has_joined:
            # The role was sent when the answer began.
            if not says_something(rest):
                return None
            rest = msgspec.structs.replace(rest, raw=without_role(rest.raw))
            self._has_joined = True
        return self._renamed(rest)

    def _without_known_logprobs(self, chunk: Chunk) -> Chunk | None:
        """Cut known log-probabilities, counted apart: a text may come later than its tokens."""
        if not chunk.has_logprobs or not self._num_logprobs_left:
            return chunk
        num_known = min(num_logprobs(chunk.raw), self._num_logprobs_left)
        self._num_logprobs_left -= num_known
        rest = cut_logprobs(chunk, num_known)
        return rest if says_something(rest) else None

    @property
    def _is_caught_up(self) -> bool:
        plan = self._plan
        return self._num_content == len(plan.known_content) and self._num_reasoning == len(
            plan.known_reasoning
        )

    def _skip(self, chunk: Chunk) -> int:
        """Return the number of characters of this chunk that are known."""
        plan = self._plan
        reasoning = plan.known_reasoning[self._num_reasoning :][: len(chunk.reasoning)]
        content = plan.known_content[self._num_content :][: len(chunk.content)]
        self._num_reasoning += len(reasoning)
        thinks_more = len(chunk.reasoning) > len(reasoning)
        thought_more = self._num_reasoning < len(plan.known_reasoning)
        if (
            not chunk.reasoning.startswith(reasoning)
            or not chunk.content.startswith(content)
            or (thinks_more and plan.known_content)
            or (chunk.content and thought_more)
        ):
            raise DivergedError
        self._num_content += len(content)
        return len(reasoning) + len(content)

    def _renamed(self, chunk: Chunk) -> Chunk:
        if chunk.is_done or (self._answer_id is None and chunk.usage is None):
            return chunk
        raw = chunk.raw if self._answer_id is None else with_id(chunk.raw, self._answer_id)
        if chunk.usage is None or not self._plan.num_before:
            return msgspec.structs.replace(chunk, raw=raw)
        usage = as_one_answer(chunk.usage, self._plan.num_before)
        return msgspec.structs.replace(
            chunk, raw=splice(raw, "usage", _encode(usage_object(usage))), usage=usage
        )


def as_one_answer(usage: UpstreamUsage, num_before: int) -> UpstreamUsage:
    """Return a continuation's usage as one answer's: the text it resumed is no prompt."""
    prompt = max(usage.num_prompt_tokens - num_before, 0)
    return replace(
        usage,
        num_prompt_tokens=prompt,
        num_completion_tokens=usage.num_completion_tokens + num_before,
        num_cached_tokens=min(usage.num_cached_tokens, prompt),
    )


def has_reached_limit(call: UpstreamCall, delivered: Delivered, count: CountText | None) -> bool:
    """Return whether the answer broke off exactly at its maximum length."""
    limit = call.token_limit
    return limit is not None and 0 < limit <= delivered.num_tokens(count)


def ending(call: UpstreamCall, delivered: Delivered, usage: UpstreamUsage) -> list[Chunk]:
    """Return the end of an answer at its token limit, which no server sends any more."""
    head: dict[str, Any] = msgspec.json.decode(event_data(delivered.sample) or b"{}")
    nothing: dict[str, Any] = {"delta": {}} if call.endpoint == "chat" else {"text": ""}
    choice = {"index": 0, **nothing, "logprobs": None, "finish_reason": "length"}
    chunks = [
        Chunk(raw=to_event(_encode({**head, "choices": [choice]})), finish_reason="length"),
    ]
    if call.wants_usage_chunk:
        body = {**head, "choices": [], "usage": usage_object(usage)}
        chunks.append(Chunk(raw=to_event(_encode(body)), usage=usage, is_usage_only=True))
    return [*chunks, DONE_CHUNK]
