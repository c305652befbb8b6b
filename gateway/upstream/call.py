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
    """One request for an upstream tier.

    `document` is the client's request as JSON, without its `outrider` object; its `model` is still
    the gateway's name, `model` the name to request from the server. `hops`: the gateways that the
    request has come through, this one last. `deadline_s` and `arrival_s` are on the gateway's
    clock. `affinity` is equal for requests that begin alike; empty: unknown. `prediction`: the text
    of an answer that was given up, a guess at this one's. `on_attempt` is called with each request
    made for this call, beside the tier's own books. `span`: the request's, in whose trace these
    requests stand. `untold`: the usage to book where the server reports none; None: an estimate by
    the text. wants_logprobs: the gateway reads the tokens' log-probabilities; the client sees
    them only if its document asks for them too.
    """

    endpoint: Endpoint
    document: Mapping[str, Any]
    model: str
    request_id: str
    arrival_s: float
    hops: tuple[str, ...] = ()
    deadline_s: float | None = None
    affinity: str = ""
    prediction: str = ""
    on_attempt: OnAttempt | None = None
    span: Span = NULL_SPAN
    wants_logprobs: bool = False
    untold: UpstreamUsage | None = None

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
        limit = self.document.get("max_completion_tokens") or self.document.get("max_tokens")
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

    `raw` is the whole event with its blank line, as it may be sent on: the server's own bytes where
    nothing had to be translated. A comment has only `raw`. `content` and `reasoning` are the
    text that it adds to choice `index`; `num_other_bytes` counts the model's other text (names and
    arguments of calls, refusals, other choices in the same event). `has_calls`, `has_logprobs`: it
    carries a part of a tool call, log-probabilities. `token_logprobs`: those that the gateway asked
    for. `usage`: the server's report in it;
    `is_usage_only`: it has no choice and is there because usage was asked for. `is_done`: the
    stream's [DONE].

    There is one for each token of each client: a struct is made faster than a frozen dataclass, and
    the garbage collector does not look at it.
    """

    raw: bytes
    index: int = 0
    content: str = ""
    reasoning: str = ""
    num_other_bytes: int = 0
    has_calls: bool = False
    has_logprobs: bool = False
    token_logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None
    usage: UpstreamUsage | None = None
    is_usage_only: bool = False
    is_done: bool = False

    @property
    def has_text(self) -> bool:
        """Return whether it carries a part of the answer, by which the first token is timed."""
        return bool(self.content or self.reasoning or self.has_calls)


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeAnswer:
    """An answer that was not streamed, in OpenAI's form.

    `body` is its JSON: the server's own bytes where nothing had to be translated. `texts` are the
    contents of its choices, `reasoning` their reasoning. `has_calls`: some choice calls a tool;
    `num_other_bytes` is the size of calls and refusals. `token_logprobs`: of the first choice,
    where the gateway asked for them.
    """

    body: bytes
    texts: tuple[str, ...] = ()
    reasoning: tuple[str, ...] = ()
    num_other_bytes: int = 0
    has_calls: bool = False
    token_logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None
    usage: UpstreamUsage | None = None
