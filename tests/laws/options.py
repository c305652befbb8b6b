"""Request options: the set that the laws go through, and what they do to logits, the slow way."""

from typing import Any

import torch
from torch import Tensor

from outrider.verifier.params import SamplingParams, ThinkingBudget

# Tokens that the bundled pair's answers often hold: the end, "-", "=" and the line's end; then "-",
# ":", "1", a space and "Answer".
STOPS = (2, 18, 34, 204)
BIAS = ((18, -100.0), (31, -12.0), (22, 6.0), (226, -12.0), (278, 4.0))

# How its answers often begin; one that comes in some of them, what none of them writes by itself,
# and one that some have begun when their budget ends.
OPENS = ((292,), (497, 414))
CLOSES = ((33, 20, 475), (31, 226), (471, 279, 35, 36))

# Every option alone, then together. `temperature` 0 is the default.
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "hot": {"temperature": 1.2},
    "top-k": {"temperature": 1.2, "top_k": 20},
    "top-p": {"temperature": 1.2, "top_p": 0.8},
    "min-p": {"temperature": 1.2, "min_p": 0.05},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 2.0},
    "negative-penalties": {"frequency_penalty": -1.5, "presence_penalty": -2.0},
    "repetition": {"repetition_penalty": 1.3},
    "bias": {"logit_bias": BIAS},
    "stop-ids": {"stop_token_ids": STOPS},
    "min-tokens": {"stop_token_ids": STOPS, "min_tokens": 12},
    "logprobs": {"num_logprobs": 5},
    "choice": {"temperature": 0.8, "choice_index": 3},
    "sampled-penalties": {"temperature": 0.8, "presence_penalty": 1.5, "frequency_penalty": 0.8},
    "sampled-repetition": {"temperature": 1.2, "repetition_penalty": 1.3, "top_p": 0.9},
    "sampled-bias": {"temperature": 0.8, "logit_bias": BIAS, "top_k": 50},
    "everything": {
        "temperature": 0.8,
        "top_k": 50,
        "top_p": 0.95,
        "min_p": 0.01,
        "presence_penalty": 0.7,
        "frequency_penalty": 0.4,
        "repetition_penalty": 1.2,
        "logit_bias": BIAS,
        "stop_token_ids": STOPS,
        "min_tokens": 12,
        "num_logprobs": 5,
        "choice_index": 2,
    },
    "everything-greedy": {
        "presence_penalty": 0.7,
        "frequency_penalty": 0.4,
        "repetition_penalty": 1.2,
        "logit_bias": BIAS,
        "stop_token_ids": STOPS,
        "min_tokens": 12,
        "num_logprobs": 0,
    },
    "thinking": {"thinking": ThinkingBudget(max_tokens=5, opens=(), closes=CLOSES)},
    "no-thinking": {"thinking": ThinkingBudget(max_tokens=0, opens=(), closes=CLOSES)},
    "sampled-thinking": {
        "temperature": 1.2,
        "presence_penalty": 0.5,
        "thinking": ThinkingBudget(max_tokens=6, opens=OPENS, closes=CLOSES),
    },
}


def changed_logits(
    logits: Tensor, prompt: list[int], answer: list[int], s: SamplingParams
) -> Tensor:
    """Return what the options make of one row of logits, by dense counts over the vocabulary.

    logits: [vocab_size], of the token behind `prompt + answer`.
    """
    vocab_size = len(logits)
    in_answer = torch.bincount(torch.tensor(answer, dtype=torch.int64), minlength=vocab_size)
    in_prompt = torch.bincount(torch.tensor(prompt, dtype=torch.int64), minlength=vocab_size)
    in_answer, in_prompt = in_answer[:vocab_size], in_prompt[:vocab_size]
    repeated = (in_answer + in_prompt) > 0
    scaled = torch.where(logits > 0, logits / s.repetition_penalty, logits * s.repetition_penalty)
    logits = torch.where(repeated, scaled, logits)
    logits = logits - s.frequency_penalty * in_answer - s.presence_penalty * (in_answer > 0)
    for token, bias in s.logit_bias:
        if token < vocab_size:
            logits[token] += bias
    if len(answer) < s.min_tokens:
        for token in s.stop_token_ids:
            if token < vocab_size:
                logits[token] = float("-inf")
    forced = forced_token(answer, s.thinking) if s.thinking else None
    if forced is not None and forced < vocab_size and logits[forced] > float("-inf"):
        kept = logits[forced].clone()
        logits[:] = float("-inf")
        logits[forced] = kept
    return logits


def forced_token(answer: list[int], budget: ThinkingBudget) -> int | None:
    """Return the one token that a budget of thinking allows behind an answer; None for all."""
    opened = [mark for mark in budget.opens if tuple(answer[: len(mark)]) == mark]
    if budget.opens and not opened:
        return None
    thought = answer[min(map(len, opened), default=0) :]
    written = [_num_ends(thought[:end], mark) for end in range(len(thought) + 1)
               for mark in budget.closes]  # fmt: skip
    if -1 in written or len(thought) < budget.max_tokens:
        return None
    begun = [_num_ends(thought, mark) for mark in budget.closes]
    place = begun.index(max(begun))
    return budget.closes[place][begun[place]]


def _num_ends(thought: list[int], mark: tuple[int, ...]) -> int:
    """Count the tokens of a mark with which a thought ends; -1 for all of them."""
    ends = [k for k in range(len(mark) + 1) if tuple(thought[len(thought) - k :]) == mark[:k]]
    return -1 if ends[-1] == len(mark) else ends[-1]
