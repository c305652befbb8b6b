"""Request options: the set that the laws go through, and what they do to logits, the slow way."""

from typing import Any

import torch
from torch import Tensor

from outrider.verifier.params import SamplingParams

# Tokens that the bundled pair's answers often hold: the end, "-", "=" and the line's end; then "-",
# ":", "1", a space and "Answer".
STOPS = (2, 18, 34, 204)
BIAS = ((18, -100.0), (31, -12.0), (22, 6.0), (226, -12.0), (278, 4.0))

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
    return logits
