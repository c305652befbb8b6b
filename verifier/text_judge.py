"""Judges a text that is there already: is each of its tokens the one that would be chosen?

Behind the same words the rule chooses the same token, so one pass over prompt and answer is enough
to check every token, whoever wrote it and with whatever guesses (docs/receipts.md). A hypothesis
that is not the writer's disagrees, at places that it cannot foresee. Where it is a cascade, the
small model has to read the text as well.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from math import isnan
from typing import Final

import torch
from torch import Tensor

from outrider.verifier.cascade import mixture_scores
from outrider.verifier.logit_rules import LogitRule, build_rules
from outrider.verifier.noise import SequenceNoise
from outrider.verifier.params import CascadeParams, Hypothesis, SamplingParams
from outrider.verifier.sampling import (
    RowGroup,
    choose_ruled_tokens,
    mark_not_finite,
    perturbed,
    process_logits,
)
from outrider.verifier.token_logprobs import Judgement, TokenDifference

MOST_GAP: Final = 10.0
"""More says no more: a token that was cut from the distribution has an infinite one."""

_MOST_DIFFERENCES: Final = 8
# Rows that are judged at once: each takes a vocabulary of float32, several times. On a CPU they
# stay in its caches, elsewhere each chunk is a round trip.
_CHUNK_ROWS: Final = 16
_DEVICE_CHUNK_ROWS: Final = 256


@dataclass(slots=True, kw_only=True, eq=False)
class _Writer:
    """A text as one hypothesis would write it: a `JudgedSequence`."""

    sampling: SamplingParams
    noise: SequenceNoise
    rules: list[LogitRule]
    token_ids: list[int]
    request_id: str
    cascade: CascadeParams | None
    failure: Exception | None = None


class TextJudge:
    """Judges one text, from its first token on, in as many calls as it takes."""

    def __init__(
        self,
        hypotheses: SequenceOf[Hypothesis],
        prompt: SequenceOf[int],
        *,
        request_id: str,
        vocab_size: int,
    ) -> None:
        """`prompt`: the tokens in front of the text."""
        self.judgements = [Judgement() for _ in hypotheses]
        self._text = list(prompt)  # up to the next token that is judged
        self._small_logits: Tensor | None = None
        self._writers = [
            _Writer(
                sampling=each.sampling,
                noise=SequenceNoise(each.sampling, each.noise_tier, vocab_size=vocab_size),
                rules=build_rules(each.sampling, num_prompt_tokens=len(prompt)),
                token_ids=self._text,
                request_id=request_id,
                cascade=each.cascade,
            )
            for each in hypotheses
        ]

    def follow(self, grammar: LogitRule) -> None:
        """Take a grammar into all hypotheses; to be called before the first token is judged."""
        for writer in self._writers:
            writer.rules.insert(0, grammar)

    @property
    def needs_small(self) -> bool:
        """True if it cannot judge without the small model's logits."""
        return any(writer.cascade is not None for writer in self._writers)

    def take_small(self, logits: Tensor) -> None:
        """Take the small model's logits of the rows that are judged next, float32 [num_rows, …]."""
        self._small_logits = logits

    @property
    def num_tokens(self) -> int:
        """Count the tokens that are judged."""
        return self.judgements[0].num_tokens

    @property
    def failure(self) -> Exception | None:
        """What broke while a hypothesis's rules were followed."""
        return next((each.failure for each in self._writers if each.failure is not None), None)

    def judge(self, logits: Tensor, token_ids: SequenceOf[int]) -> None:
        """Judge the text's next tokens, one for each row.

        `logits`: float32 [num_rows, vocab_size]; row i decides token i. Waits for the device.
        """
        # Rules read the text as it grows, as they do when it is written: row by row.
        has_rules = any(writer.rules for writer in self._writers)
        most = _CHUNK_ROWS if logits.device.type == "cpu" else _DEVICE_CHUNK_ROWS
        step = 1 if has_rules else most
        small, self._small_logits = self._small_logits, None
        for start in range(0, len(logits), step):
            written = token_ids[start : start + step]
            rows = logits[start : start + len(written)]
            small_rows = None if small is None else small[start : start + len(written)]
            ids = torch.tensor(written, device=rows.device)
            for number, writer in enumerate(self._writers):
                found = _differences(writer, rows, small_rows, ids)
                self.judgements[number] = _joined(self.judgements[number], len(ids), found)
            self._text += written


def _differences(
    writer: _Writer, rows: Tensor, small: Tensor | None, written: Tensor
) -> list[TokenDifference]:
    """Return where a writer would have chosen another token; `index` counts rows."""
    every = [_group(writer, list(range(len(rows))))]
    mixed: Tensor | None = None
    if writer.cascade is None:
        best = choose_ruled_tokens(rows, every)
    elif small is None:
        raise ValueError("a cascade is judged by the small model's logits too")
    else:
        mixed = mixture_scores(small, process_logits(rows, every), every)
        best = mixed.argmax(-1)
    chosen = mark_not_finite(best, rows)
    different = (chosen != written).nonzero()[:, 0]
    places: list[int] = different.tolist()
    if not places:
        return []
    if mixed is None:
        scores = perturbed(process_logits(rows, every)[different], [_group(writer, places)])
    else:
        scores = mixed[different]
    theirs, own = written[different], chosen[different]
    gaps = scores.gather(1, own.clamp(min=0)[:, None]) - scores.gather(1, theirs[:, None])
    return [
        TokenDifference(index=place, token_id=token, chosen_id=choice, gap=_bounded(gap))
        for place, token, choice, gap in zip(
            places, theirs.tolist(), own.tolist(), gaps[:, 0].tolist(), strict=True
        )
    ]


def _group(writer: _Writer, depths: list[int]) -> RowGroup:
    """Return rows that are `depths` tokens behind the text so far; only one where rules read it."""
    return RowGroup(sequence=writer, depths=depths, paths=lambda: [[]] * len(depths))


def _bounded(gap: float) -> float:
    """Return a gap that JSON can say: of numbers that are not finite the greatest."""
    return min(max(gap, 0.0), MOST_GAP) if not isnan(gap) else MOST_GAP


def _joined(before: Judgement, num_rows: int, found: list[TokenDifference]) -> Judgement:
    """Return a judgement with that of the next rows."""
    room = max(_MOST_DIFFERENCES - len(before.differences), 0)
    placed = [replace(each, index=each.index + before.num_tokens) for each in found[:room]]
    return Judgement(
        num_tokens=before.num_tokens + num_rows,
        num_same=before.num_same + num_rows - len(found),
        total_gap=before.total_gap + sum(each.gap for each in found),
        differences=(*before.differences, *placed),
    )
