"""Tokens and cost of an answer: reported, counted again, or estimated."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from outrider.gateway.settings.passed import UpstreamPriceSettings
from outrider.gateway.upstream.bounds import media_parts
from outrider.gateway.upstream.call import Chunk, UpstreamCall, WholeAnswer
from outrider.gateway.upstream.tally import Tally, size_bytes, tokens_of
from outrider.gateway.upstream.upstream_usage import UpstreamUsage

CountText = Callable[[str], int]
CountPrompt = Callable[[UpstreamCall], int | None]

# A report this near to our own count is taken as it is: servers count the token that ends an
# answer, and text may be cut into tokens in more than one way.
_FREE_TOKENS: Final = 2
_FREE_SHARE: Final = 0.02
# Hot sampling writes words in more tokens than their spelling needs.
_HOT: Final = 1.0
_FREE_SHARE_ABOVE_IF_HOT: Final = 0.3
_TOKENS_PER_MILLION: Final = 1e6
_LEAST_PROMPT_SHARE: Final = 1 / 16
"""Share of the estimate by its length: templates leave out much, but not more than that."""
_READ_FIELDS: Final = ("prompt", "messages", "tools", "functions", "response_format")
_MAX_DEPTH: Final = 32
"""Depth of JSON that estimates look into; deeper nesting is an attack."""


class UsageMeter:
    """Collects one attempt's answer and determines its tokens.

    `count_text` counts the tokens of a text, `count_prompt` those of a call's prompt; None where
    the server's tokenizer is not known. Only an answer's plain text is compared with the report:
    tool calls and reasoning may have hidden tokens. A report of fewer tokens than the text can
    have, without a tokenizer, is replaced by the estimate.
    """

    __slots__ = (
        "_call",
        "_count_prompt",
        "_count_text",
        "_media_tokens",
        "_num_other_bytes",
        "_num_other_parts",
        "_reasoning",
        "_reported",
        "_tally",
        "_texts",
    )

    def __init__(
        self,
        call: UpstreamCall,
        count_text: CountText | None = None,
        count_prompt: CountPrompt | None = None,
        media_tokens: int = 0,
    ) -> None:
        """Store the arguments. `media_tokens` estimates an image, a sound or a file."""
        self._call = call
        self._count_text = count_text
        self._count_prompt = count_prompt
        self._media_tokens = media_tokens
        self._texts: defaultdict[int, list[str]] = defaultdict(list)
        self._reasoning: defaultdict[int, list[str]] = defaultdict(list)
        self._num_other_bytes = 0
        self._num_other_parts = 0
        self._tally = Tally()
        self._reported: UpstreamUsage | None = None

    def add(self, chunk: Chunk) -> None:
        """Add one more chunk. This runs for each token of each client."""
        if chunk.content:
            self._texts[chunk.index].append(chunk.content)
        if chunk.reasoning:
            self._reasoning[chunk.index].append(chunk.reasoning)
        if chunk.has_calls or chunk.num_other_bytes:
            self._num_other_parts += 1
            self._num_other_bytes += chunk.num_other_bytes
        self._tally.add(chunk)
        if chunk.usage is not None:
            self._reported = chunk.usage  # of several, the last one is about all of the answer

    def take_back(self, chunk: Chunk) -> None:
        """Take back the last chunk. Its share of a report is not known."""
        if chunk.content:
            self._texts[chunk.index].pop()
        if chunk.reasoning:
            self._reasoning[chunk.index].pop()
        if chunk.has_calls or chunk.num_other_bytes:
            self._num_other_parts -= 1
            self._num_other_bytes -= chunk.num_other_bytes
        self._tally.take_back(chunk)

    def add_whole(self, answer: WholeAnswer) -> None:
        """Add an answer that is not streamed."""
        for index, text in enumerate(answer.texts):
            self._texts[index].append(text)
        for index, text in enumerate(answer.reasoning):
            if text:
                self._reasoning[index].append(text)
        self._num_other_parts += answer.has_calls or bool(answer.num_other_bytes)
        self._num_other_bytes += answer.num_other_bytes
        self._tally.add_whole(answer)
        self._reported = answer.usage or self._reported

    def result(self) -> UpstreamUsage:
        """Return the usage of all that was added."""
        if self._reported is None:
            return self._call.untold or self._without_report()
        if self._count_text is None or self._call.untold is not None:
            return self._believed(self._reported)
        return self._checked(self._reported, self._count_text)

    def _believed(self, reported: UpstreamUsage) -> UpstreamUsage:
        """Return the report, without numbers that are too small for the text received."""
        usage = reported
        if reported.num_completion_tokens < self._tally.least_tokens:
            usage = _estimated(usage, num_completion_tokens=self._tally.num_tokens)
        prompt = _estimate_prompt(self._call.document)
        if reported.num_prompt_tokens < max(prompt * _LEAST_PROMPT_SHARE, min(prompt, 1)):
            usage = _estimated(usage, num_prompt_tokens=prompt)
        return usage

    def _checked(self, reported: UpstreamUsage, count: CountText) -> UpstreamUsage:
        """Return the report, or our own count where it is too far from it."""
        usage = reported
        if not (self._num_other_parts or any(self._reasoning.values())):
            counted = _count(self._texts.values(), count)
            hidden = reported.num_reasoning_tokens
            told = reported.num_completion_tokens - hidden
            if not (_is_near(told, counted) or self._may_be_more(told, counted)):
                usage = _corrected(usage, num_completion_tokens=counted + hidden)
        elif reported.num_completion_tokens < self._tally.least_tokens:
            usage = _estimated(usage, num_completion_tokens=self._tally.num_tokens)
        prompt = self._count_prompt(self._call) if self._count_prompt else None
        if prompt is not None and not _is_near(reported.num_prompt_tokens, prompt):
            cached = min(reported.num_cached_tokens, prompt)
            usage = _corrected(usage, num_prompt_tokens=prompt, num_cached_tokens=cached)
        return usage

    def _may_be_more(self, reported: int, counted: int) -> bool:
        """Return whether chance may have cut the text into so many tokens."""
        temperature = self._call.document.get("temperature")
        is_hot = isinstance(temperature, int | float) and temperature > _HOT
        return is_hot and counted <= reported <= (1 + _FREE_SHARE_ABOVE_IF_HOT) * counted + 1

    def _without_report(self) -> UpstreamUsage:
        """Count the answer where all of it can be counted, else estimate it."""
        prompt = self._count_prompt(self._call) if self._count_prompt else None
        is_counted = self._count_text is not None and not self._num_other_parts
        count = self._count_text or _estimate
        reasoning = _count(self._reasoning.values(), count)
        num_completion = self._tally.num_tokens
        if self._count_text is not None:
            num_other = max(self._num_other_parts, tokens_of(self._num_other_bytes))
            num_completion = _count(self._texts.values(), count) + reasoning + num_other
        if prompt is None:
            is_counted = False
            document = self._call.document
            prompt = _estimate_prompt(document) + _estimate_media(document, self._media_tokens)
        return UpstreamUsage(
            num_prompt_tokens=prompt,
            num_completion_tokens=num_completion,
            num_reasoning_tokens=min(reasoning, num_completion),
            source="counted" if is_counted else "estimated",
        )


def cost_usd(usage: UpstreamUsage, price: UpstreamPriceSettings) -> float | None:
    """Return the cost at these prices; None where no price is named."""
    if usage.units is not None and (each := price.of(usage.units.unit)) is not None:
        return usage.units.num * each
    rate = price.at(usage.num_prompt_tokens)
    if not (rate.prompt or rate.completion or rate.cached_prompt):
        return None
    num_cached = min(usage.num_cached_tokens, usage.num_prompt_tokens)
    return (
        (usage.num_prompt_tokens - num_cached) * rate.prompt
        + num_cached * rate.cached
        + usage.num_completion_tokens * rate.completion
    ) / _TOKENS_PER_MILLION


def usage_object(usage: UpstreamUsage) -> dict[str, Any]:
    """Return OpenAI's `usage`."""
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_completion_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.num_reasoning_tokens},
    }


def _corrected(usage: UpstreamUsage, **numbers: Any) -> UpstreamUsage:
    return replace(usage, source="counted", is_corrected=True, **numbers)


def _estimated(usage: UpstreamUsage, **numbers: Any) -> UpstreamUsage:
    return replace(usage, source="estimated", is_corrected=True, **numbers)


def _is_near(reported: int, counted: int) -> bool:
    return abs(reported - counted) <= max(_FREE_TOKENS, _FREE_SHARE * counted)


def _count(texts: Iterable[list[str]], count: CountText) -> int:
    """Count the tokens of several choices; each is a text of its own."""
    return sum(count("".join(parts)) for parts in texts if parts)


def _estimate(text: str) -> int:
    return tokens_of(size_bytes(text))


def _estimate_prompt(document: Mapping[str, Any]) -> int:
    """Estimate from the length of all the text that the model is given."""
    prompt = document.get("prompt")
    if isinstance(prompt, list):
        return sum(_estimate_part(part) for part in prompt)
    return sum(_estimate_part(document.get(name)) for name in _READ_FIELDS)


def _estimate_media(document: Mapping[str, Any], media_tokens: int) -> int:
    """Return the tokens reserved for each image, sound and file beyond the text."""
    parts = media_parts(document)
    return sum(max(media_tokens - _estimate_part(part), 0) for part in parts)


def _estimate_part(value: object, depth: int = 0) -> int:
    """Estimate JSON: its texts, and a token for each number (prompts may be token ids)."""
    if depth > _MAX_DEPTH:
        return 0
    match value:
        case str():
            # Images and files are in the request as text that the model never sees.
            return 0 if value.startswith("data:") else _estimate(value)
        case bool() | None:
            return 0
        case int():
            return 1
        case list():
            return sum(_estimate_part(item, depth + 1) for item in value)
        case dict():
            return sum(_estimate_part(item, depth + 1) for item in value.values())
    return 0
