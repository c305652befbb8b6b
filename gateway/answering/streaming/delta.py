"""What the choices of an answer add to it, and what each of them used."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Final, Literal

import msgspec

from outrider.gateway.answering.streaming.trace import DeltaTrace
from outrider.gateway.answering.text.chat import ChatTokenizer
from outrider.gateway.answering.text.reasoning_formats import TextKind
from outrider.gateway.answering.text.tool_parser import PieceKind
from outrider.verifier.token_logprobs import TokenLogprobs

ApiFinishReason = Literal["stop", "length", "tool_calls"]
AnswerKind = TextKind | PieceKind
Piece = tuple[str, bool]


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """An addition to one choice.

    The last delta of a choice has the finish reason and no text.
    """

    index: int
    kind: AnswerKind = "content"
    """"call" begins a call, and `text` is the function's name; "arguments" goes on with it."""
    call_index: int = 0
    """Counts a choice's tool calls."""
    call_id: str = ""
    """Where a call begins."""
    text: str = ""
    pieces: tuple[Piece, ...] = ()
    """(text, whether it was drafted); they join to `text`."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    tokenizer: ChatTokenizer | None = None
    """The one that knows `logprobs`, where it is not the job's."""
    finish_reason: ApiFinishReason | None = None
    stop: str | None = None
    """The stop string that ended the choice, if it was one of the request's."""
    trace: DeltaTrace | None = None
    """The trace of the pieces, where the request is traced."""


@dataclass(slots=True)
class ChoiceUsage:
    """The usage of one choice. Times in seconds; None before the event."""

    num_tokens: int = 0
    num_reasoning_tokens: int = 0
    num_cached_tokens: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    num_unratified_tokens: int = 0
    num_reused_tokens: int = 0
    """Tokens that the other tier's retracted answer held."""
    num_steps: int = 0
    num_prediction_tokens: int = 0
    """Tokens of the request's prediction."""
    num_predicted_tokens: int = 0
    """Tokens of the prediction that were right."""
    queue_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None

    @classmethod
    def total(cls, usages: "Sequence[ChoiceUsage]") -> "ChoiceUsage":
        """Return the usage of several choices together: the first token of any, the longest wait.

        Its numbers are sums, but for `num_mispredicted_tokens`, which is each choice's own.
        """
        queued = [u.queue_s for u in usages if u.queue_s is not None]
        firsts = [u.first_token_s for u in usages if u.first_token_s is not None]
        lasts = [u.last_token_s for u in usages if u.last_token_s is not None]
        return cls(
            **{name: sum([getattr(u, name) for u in usages]) for name in _COUNTS},
            queue_s=max(queued, default=None),
            first_token_s=min(firsts, default=None),
            last_token_s=max(lasts, default=None),
        )

    @property
    def num_mispredicted_tokens(self) -> int:
        """Tokens of the prediction that did not come out; a piece that came twice counts twice."""
        return max(self.num_prediction_tokens - self.num_predicted_tokens, 0)


_COUNTS: Final = tuple(f.name for f in fields(ChoiceUsage) if f.name.startswith("num_"))
