"""What is added to a choice: text by kind, its tokens, the end."""

from typing import Literal

import msgspec

from outrider.gateway.answering.streaming.trace import DeltaTrace
from outrider.gateway.answering.text.chat import ChatTokenizer
from outrider.gateway.answering.text.reasoning_formats import TextKind
from outrider.gateway.answering.text.tool_parser import PieceKind
from outrider.verifier.token_logprobs import Judgement, PromptLogprobs, TokenLogprobs

ApiFinishReason = Literal["stop", "length", "tool_calls"]
AnswerKind = TextKind | PieceKind | Literal["prompt"]
Piece = tuple[str, bool]


class PromptTokens(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt as its model read it."""

    token_ids: tuple[int, ...]
    logprobs: tuple[PromptLogprobs, ...] = ()
    """Of all but the first, where they are wanted."""
    judgements: tuple[Judgement, ...] = ()
    """Of the prompt's end, where that is an answer to be judged."""


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """An addition to one choice.

    The last delta of a choice has the finish reason and no text.
    """

    index: int
    kind: AnswerKind = "content"
    """"call" begins a call, and `text` is the function's name; "arguments" goes on with it.
    "prompt" comes first, where anything is said of it; `text` is what the answer echoes."""
    call_index: int = 0
    """Counts a choice's tool calls."""
    call_id: str = ""
    """The call's id; empty except where a call begins."""
    text: str = ""
    pieces: tuple[Piece, ...] = ()
    """(text, whether it was drafted); they join to `text`."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    token_ids: tuple[int, ...] = ()
    """The tokens that were written since the last delta, where the answer names them."""
    prompt: PromptTokens | None = None
    tokenizer: ChatTokenizer | None = None
    """The one that knows the tokens, where it is not the job's."""
    finish_reason: ApiFinishReason | None = None
    stop: str | None = None
    """The stop string that ended the choice, if it was one of the request's."""
    trace: DeltaTrace | None = None
    """The trace of the pieces, where the request is traced."""
