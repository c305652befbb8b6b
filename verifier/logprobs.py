"""Log-probabilities of emitted tokens, for all rows of a pass at once."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any, Final

import numpy.typing as npt
import torch
from torch import Tensor

from outrider.kernels.upload import read_back
from outrider.verifier.token_logprobs import PromptLogprobs, TokenLogprobs

# Rows whose log-probabilities are worked out at once: each takes a vocabulary of float32.
_CHUNK_ROWS: Final = 64


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class LogprobRows:
    """Log-probabilities of n rows, on the device."""

    chosen: Tensor
    """float32 [n], of the emitted tokens."""
    top_ids: Tensor
    """int64 [n, num_top], the likeliest tokens, best first."""
    top_values: Tensor
    """float32 [n, num_top]."""

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that `token_logprobs` needs."""
        return [self.top_ids, self.chosen, self.top_values]


def logprob_rows(logits: Tensor, token_ids: Tensor, num_top: int) -> LogprobRows:
    """Compute them from raw logits, float32 [n, vocab_size], and chosen tokens; only launched."""
    log_probs = logits.log_softmax(-1)
    best = log_probs.topk(min(num_top, log_probs.shape[1]))
    return LogprobRows(
        chosen=log_probs.gather(1, token_ids[:, None])[:, 0],
        top_ids=best.indices,
        top_values=best.values,
    )


def token_logprobs(
    token_ids: SequenceOf[int], num_top: SequenceOf[int], found: SequenceOf[npt.NDArray[Any]]
) -> list[TokenLogprobs]:
    """Make an entry for each row.

    `num_top`: of each row; `found`: the rows' tensors, on the host.
    """
    top_ids, chosen, top_values = (array.tolist() for array in found)
    return [
        TokenLogprobs(
            token_id=token_id,
            logprob=logprob,
            top=tuple(zip(ids[:number], values[:number], strict=True)),
        )
        for token_id, number, logprob, ids, values in zip(
            token_ids, num_top, chosen, top_ids, top_values, strict=True
        )
    ]


def prompt_logprobs(
    logits: Tensor, token_ids: SequenceOf[int], num_top: int
) -> list[PromptLogprobs]:
    """Return the log-probabilities of the tokens that follow the rows, which are all in the prompt.

    `logits`: float32 [n, vocab_size]; `token_ids`: n. Waits for the device.
    """
    entries: list[PromptLogprobs] = []
    for start in range(0, len(token_ids), _CHUNK_ROWS):
        ids = token_ids[start : start + _CHUNK_ROWS]
        rows = logits[start : start + len(ids)]
        chosen = torch.tensor(ids, device=logits.device)
        found = logprob_rows(rows, chosen, num_top)
        num_better = (rows > rows.gather(1, chosen[:, None])).sum(1)
        *tops, ranks = read_back([*found.tensors, num_better])
        entries += [
            PromptLogprobs(
                token_id=entry.token_id, logprob=entry.logprob, top=entry.top, rank=rank + 1
            )
            for entry, rank in zip(
                token_logprobs(ids, [num_top] * len(ids), tops), ranks.tolist(), strict=True
            )
        ]
    return entries


def most_wanted(num_logprobs: SequenceOf[int | None]) -> int:
    """Return the greatest number of alternatives; 0 where none are wanted."""
    return max((number for number in num_logprobs if number is not None), default=0)
