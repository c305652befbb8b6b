"""The next tokens of sequences without trees: one upload and one read-back for all that is asked.

Beside the token itself that is, for answers that may change their tier, what else the small model
thought likely, and log-probabilities. Asked for one by one, each would wait for the device.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.kernels.sampling.sample import perturb, top_tokens
from outrider.kernels.triton_support import uses_triton
from outrider.kernels.upload import read_back, upload_all
from outrider.verifier.judged import JudgedSequence
from outrider.verifier.logprobs import (
    LogprobRows,
    logprob_rows,
    most_wanted,
    token_logprobs,
)
from outrider.verifier.noise import SequenceNoise
from outrider.verifier.sampling import (
    RowGroup,
    choose_ruled_tokens,
    choose_tokens,
    mark_not_finite,
    perturbed,
    process_logits,
    sampling_rows_of,
    sampling_words,
)
from outrider.verifier.token_logprobs import TokenLogprobs

_NUM_RIVALS: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class NextRow:
    """The one row of a sequence, and what is asked about its next token.

    Whether log-probabilities are wanted is the request's to say.
    """

    sequence: JudgedSequence
    rival_noise: SequenceNoise | None = None
    """The noise under which the likeliest tokens are named; None: they are not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NextToken:
    """A next token, or `NOT_FINITE`."""

    token_id: int
    rivals: list[tuple[int, float]]
    """With `rival_noise`, (token id, chance) of it and of the likeliest under them."""
    logprobs: tuple[TokenLogprobs, ...]
    """One entry, or none."""


def next_tokens(rows: SequenceOf[NextRow], logits: Tensor) -> list[NextToken]:
    """Choose all rows' tokens and answer what is asked about them; waits for the device once.

    `logits`: float32 [num_rows, vocab_size].
    """
    groups = [_group(row.sequence, None) for row in rows]
    ranked = [number for number, row in enumerate(rows) if row.rival_noise is not None]
    wanted = [row.sequence.sampling.num_logprobs for row in rows]
    reported = [number for number, count in enumerate(wanted) if count is not None]
    rival_groups = [_group(rows[number].sequence, rows[number].rival_noise) for number in ranked]
    indices = [np.array(numbers, dtype=np.int64) for numbers in (ranked, reported)]
    if uses_triton(logits):
        processed = process_logits(logits, groups)
        words = [sampling_words(own) for own in (groups, rival_groups)]
        own_words, rival_words, *index = upload_all([*words, *indices], logits.device)
        chosen = top_tokens(processed, sampling_rows_of(own_words, groups), 1).token_ids[:, 0]
        ranks = _of_rows(processed, index[0])
        scores = perturb(ranks, sampling_rows_of(rival_words, rival_groups)) if ranked else ranks
    else:
        index = [torch.from_numpy(numbers) for numbers in indices]
        if ranked:
            processed = process_logits(logits, groups)
            chosen = choose_tokens(processed, groups)
            scores = perturbed(_of_rows(processed, index[0]), rival_groups)
        else:
            chosen, scores = choose_ruled_tokens(logits, groups), logits
    found = [mark_not_finite(chosen, logits)]
    if ranked:
        found += _rivals(scores, _of_rows(chosen, index[0]))
    report: LogprobRows | None = None
    if reported:
        own = _of_rows(logits, index[1]), _of_rows(chosen, index[1])
        report = logprob_rows(*own, most_wanted(wanted))
        found += report.tensors
    return _answers(read_back(found), ranked, reported, wanted)


def _group(sequence: JudgedSequence, noise: SequenceNoise | None) -> RowGroup:
    return RowGroup(sequence=sequence, depths=[0], paths=lambda: [[]], noise=noise)


def _of_rows(values: Tensor, index: Tensor) -> Tensor:
    """Some rows; `index`: ascending, so where all are asked for they are the values themselves."""
    return values if len(index) == len(values) else values.index_select(0, index)


def _rivals(scores: Tensor, chosen: Tensor) -> list[Tensor]:
    """Ids, int64, and chances, float32, [num_ranked, 3] each: of the chosen, of the likeliest."""
    chances = scores.softmax(-1)
    best = chances.topk(min(_NUM_RIVALS, chances.shape[1]))
    ids = torch.cat((chosen[:, None], best.indices), dim=1)
    return [ids, torch.cat((chances.gather(1, chosen[:, None]), best.values), dim=1)]


def _answers(
    found: list[npt.NDArray[Any]],
    ranked: list[int],
    reported: list[int],
    wanted: list[int | None],
) -> list[NextToken]:
    tokens: list[int] = found[0].tolist()
    rivals: dict[int, list[tuple[int, float]]] = {}
    if ranked:
        for number, ids, probs in zip(ranked, found[1].tolist(), found[2].tolist(), strict=True):
            # The chosen token is mostly among the best: each is named once.
            rivals[number] = list(dict(zip(ids, probs, strict=True)).items())
    entries: dict[int, TokenLogprobs] = {}
    if reported:
        counts = [wanted[number] or 0 for number in reported]
        own = token_logprobs([tokens[number] for number in reported], counts, found[-3:])
        entries = dict(zip(reported, own, strict=True))
    return [
        NextToken(
            token_id=token,
            rivals=rivals.get(number, []),
            logprobs=(entries[number],) if number in entries else (),
        )
        for number, token in enumerate(tokens)
    ]
