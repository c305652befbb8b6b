"""The interface between the gateway and its upstream tiers: a call, and its answer's chunks."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import msgspec

from outrider.gateway.contract.schema.kinds import Endpoint
from outrider.gateway.telemetry.tracer import NULL_SPAN, Span
from outrider.gateway.upstream.attempts import OnAttempt
from outrider.gateway.upstream.upstream_usage import UpstreamUsage

HOPS_HEADER: Final = "x-outrider-hops"
"""The gateways that a request has come through, comma-separated, oldest first."""


class TokenLogprob(NamedTuple):
    """A token's UTF-8 bytes, and its log-probability; NaN where the server gives no number."""

    token: bytes
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamCall:
    """One request for an upstream tier."""

    endpoint: Endpoint
    document: Mapping[str, Any]
    """The client's request as JSON, without its `outrider` object. Its `model` is still the
    gateway's name."""
    model: str
    """The name to request from the server."""
    request_id: str
    arrival_s: float
    """On the gateway's clock."""
    hops: tuple[str, ...] = ()
    """The gateways that the request has come through, this one last."""
    deadline_s: float | None = None
    """On the gateway's clock."""
    affinity: str = ""
    """Equal for requests that begin alike; empty: unknown."""
    prediction: str = ""
    """The text of an answer that was given up, a guess at this one's."""
    on_attempt: OnAttempt | None = None
    """Called with each request made for this call, beside the tier's own books."""
    span: Span = NULL_SPAN
    """The request's, in whose trace these requests stand."""
    wants_logprobs: bool = False
    """The gateway reads the tokens' log-probabilities. The client sees them only if its document
    asks for them too."""
    untold: UpstreamUsage | None = None
    """The usage to book where the server reports none; None: an estimate by the text."""

    @property
    def is_streamed(self) -> bool:
        """Return whether the client wants a stream."""
        return bool(self.document.get("stream"))

    @property
    def shows_logprobs(self) -> bool:
        """Return whether the client asked for log-probabilities itself."""
        return self.document.get("logprobs") not in (None, False)

    @property
    def wants_usage_chunk(self) -> bool:
        """Return whether the client asked for the chunk that carries `usage`."""
        options = self.document.get("stream_options")
        return isinstance(options, Mapping) and bool(options.get("include_usage"))

    @property
    def token_limit(self) -> int | None:
        """Return the most tokens that each answer may have; None where the request names none."""
        newer, older = map(self.document.get, ("max_completion_tokens", "max_tokens"))
        limit = older if newer is None else newer
        return int(limit) if isinstance(limit, int | float) else None

    @property
    def num_choices(self) -> int:
        """Return the request's n."""
        count = self.document.get("n")
        return count if isinstance(count, int) else 1


def num_answers(call: UpstreamCall) -> int:
    """Return the number of choices in the whole answer: n for each of the prompts."""
    prompt = call.document.get("prompt")
    num_prompts = 1
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        num_prompts = len(prompt)
    return num_prompts * max(call.num_choices, 1)


class Chunk(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One event of a streamed answer, in OpenAI's form.

    There is one for each token of each client: a struct is made faster than a frozen dataclass, and
    the garbage collector does not look at it.
    """

    raw: bytes
    """The whole event with its blank line, as it may be sent on: the server's own bytes where
    nothing had to be translated. A comment has only this."""
    index: int = 0
    content: str = ""
    """Text that it adds to choice `index`."""
    reasoning: str = ""
    """Reasoning that it adds to choice `index`."""
    num_other_bytes: int = 0
    """The size of the model's other text: names and arguments of calls, refusals, other choices in
    the same event."""
    has_calls: bool = False
    """It carries a part of a tool call."""
    has_logprobs: bool = False
    """It carries log-probabilities."""
    token_logprobs: tuple[TokenLogprob, ...] = ()
    """Those that the gateway asked for."""
    finish_reason: str | None = None
    usage: UpstreamUsage | None = None
    """The server's report in it."""
    is_usage_only: bool = False
    """It has no choice and is there because usage was asked for."""
    is_done: bool = False
    """The stream's [DONE]."""

    @property
    def has_text(self) -> bool:
        """Return whether it carries a part of the answer, by which the first token is timed."""
        return bool(self.content or self.reasoning or self.has_calls)


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeAnswer:
    """An answer that was not streamed, in OpenAI's form."""

    body: bytes
    """Its JSON: the server's own bytes where nothing had to be translated."""
    texts: tuple[str, ...] = ()
    """The contents of its choices."""
    reasoning: tuple[str, ...] = ()
    """The reasoning of its choices."""
    num_other_bytes: int = 0
    """The size of calls and refusals."""
    has_calls: bool = False
    """Some choice calls a tool."""
    token_logprobs: tuple[TokenLogprob, ...] = ()
    """Those of the first choice, where the gateway asked for them."""
    finish_reason: str | None = None
    usage: UpstreamUsage | None = None
