"""What a request asks of its tokens: an echo, log-probabilities of the prompt, ids."""

from collections.abc import Sequence
from typing import Final

import msgspec

from outrider.engine.request import MAX_PROMPT_LOGPROBS
from outrider.gateway.answering.reading.parsed_request import ApiRequest
from outrider.gateway.contract.errors.tree import BadRequestError
from outrider.gateway.contract.schema.completions import CompletionRequest


class Extras(msgspec.Struct, frozen=True, kw_only=True):
    """What an answer says of its tokens beside its text and their log-probabilities."""

    echoes: bool = False
    """The text begins with the prompt, and so do the log-probabilities, where there are any."""
    num_prompt_logprobs: int | None = None
    """Alternatives in `prompt_logprobs`; None: the answer has no such field."""
    has_token_ids: bool = False
    """The ids of the tokens of prompt and answer."""
    has_judgements: bool = False
    """Those of an answer that was there before."""
    names_ids: bool = False
    """Log-probabilities name a token by its id."""
    has_prompt: bool = False
    """Something is said of the prompt."""


NO_EXTRAS: Final = Extras()


def read_extras(request: ApiRequest) -> Extras:
    """Read the fields that ask for them."""
    echoes = isinstance(request, CompletionRequest) and bool(request.echo)
    options = request.outrider
    has_receipt = options is not None and bool(options.receipt)
    has_token_ids = bool(request.return_token_ids) or has_receipt  # without them it cannot be used
    has_judgements = options is not None and options.judge is not None
    return Extras(
        echoes=echoes,
        num_prompt_logprobs=request.prompt_logprobs,
        has_token_ids=has_token_ids,
        has_judgements=has_judgements,
        names_ids=bool(request.return_tokens_as_token_ids),
        has_prompt=echoes or has_token_ids or has_judgements or request.prompt_logprobs is not None,
    )


def check_scores(request: ApiRequest, lengths: Sequence[int]) -> None:
    """Raise BadRequestError for more log-probabilities of prompts than one request may have.

    `lengths`: the prompts' tokens.
    """
    num_top, param = wanted_prompt_logprobs(request)
    if num_top is None:
        return
    if (request.n or 1) > 1:
        raise BadRequestError(
            f"n: must be 1 where log-probabilities of the prompt are asked for ({param}).",
            param="n",
        )
    num_tokens = sum(lengths)
    most = MAX_PROMPT_LOGPROBS // (num_top + 1)
    if num_tokens > most:
        raise BadRequestError(
            f"{param}: with {num_top} alternatives, log-probabilities of at most {most} tokens of "
            f"prompts are computed for one request; these have {num_tokens}.",
            param=param,
        )


def wanted_prompt_logprobs(request: ApiRequest) -> tuple[int | None, str]:
    """Return the alternatives wanted of a prompt's tokens, None for none, and the field's name."""
    echoed = request.logprobs if isinstance(request, CompletionRequest) and request.echo else None
    own = request.prompt_logprobs
    if echoed is not None and (own is None or echoed > own):
        return echoed, "logprobs"
    return own, "prompt_logprobs"
