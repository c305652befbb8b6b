"""How long an answer may think: from the fields of a chat to the engine's budget."""

from collections.abc import Collection
from typing import Final, TypeGuard

from outrider.gateway.answering.text.chat import ChatTokenizer, Prompt
from outrider.gateway.contract.schema.chat import ChatRequest
from outrider.verifier.params import ThinkingBudget

EFFORTS: Final[dict[str, int | None]] = {
    "none": 0,
    "minimal": 512,
    "low": 1024,
    "medium": 8192,
    "high": None,
    "xhigh": None,
    "max": None,
}
"""The tokens of thinking for each `reasoning_effort`; None: as many as the model likes."""
_TEMPLATE_EFFORT: Final = "reasoning_effort"


def budget_of(
    request: ChatRequest, tokenizer: ChatTokenizer, prompt: Prompt
) -> ThinkingBudget | None:
    """Return the engine's budget; None where there is none, or the model does not think."""
    marks = tokenizer.thinking_marks
    most = _wanted_tokens(request, tokenizer)
    if most is None or marks is None:
        return None
    opens = () if prompt.opens_thinking else marks.opens
    return ThinkingBudget(max_tokens=most, opens=opens, closes=marks.closes)


def template_effort(request: ChatRequest, tokenizer: ChatTokenizer) -> dict[str, str]:
    """Return `reasoning_effort` as a variable, for templates that read it.

    gpt-oss's knows low, medium and high only.
    """
    effort = request.reasoning_effort
    if not _is_effort(effort) or not tokenizer.template_reads(_TEMPLATE_EFFORT):
        return {}
    if tokenizer.reasoning.format.has_channels:
        effort = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}.get(
            effort, effort
        )
    return {_TEMPLATE_EFFORT: effort}


def ignored_by(request: ChatRequest, tokenizers: Collection[ChatTokenizer]) -> tuple[str, ...]:
    """Return the fields that none of these models has a use for."""
    ignored = []
    effort = request.reasoning_effort
    is_known = _is_effort(effort)
    if effort is not None and not any(is_known and _takes_effort(each) for each in tokenizers):
        ignored.append("reasoning_effort")
    if all(each.thinking_marks is None for each in tokenizers):
        if request.own_thinking_budget is not None:
            ignored.append("thinking_token_budget")
        elif request.template_thinking_budget is not None:
            ignored.append("thinking_budget")
    return tuple(ignored)


def _wanted_tokens(request: ChatRequest, tokenizer: ChatTokenizer) -> int | None:
    """Return the tokens of thinking that a request allows: the first of its fields that says."""
    for tokens in (request.own_thinking_budget, request.template_thinking_budget):
        if tokens is not None:
            return tokens
    if request.thinking_token_budget is not None or tokenizer.template_reads(_TEMPLATE_EFFORT):
        return None
    effort = request.reasoning_effort
    return EFFORTS[effort] if _is_effort(effort) else None


def _takes_effort(tokenizer: ChatTokenizer) -> bool:
    return tokenizer.thinking_marks is not None or tokenizer.template_reads(_TEMPLATE_EFFORT)


def _is_effort(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and value in EFFORTS
