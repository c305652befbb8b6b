"""Mistakes of a router: the prompts that it was surest about, and the words they have in common."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from outrider.router.calibration import OperatingPoint, StageRows, split

_WORD: Final = re.compile(r"\w+")
_DIGIT: Final = re.compile(r"\d")
_MAX_CHARS: Final = 2000
_BEGINNING_CHARS: Final = 60
_MIN_PROMPTS: Final = 3
# Thousands of n-grams are compared: by chance alone a few of them reach 3.
_MIN_Z: Final = 3.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistake:
    """A prompt that the router gave to the wrong tier; scores in [0, 1]."""

    prompt: str
    quality: float
    weak: float
    strong: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonWords:
    """A word or two that mistakes have more often than other prompts with the same decision."""

    text: str
    """Digits are written as 0."""
    share_of_mistakes: float
    share_of_others: float
    z: float
    """Standard errors between the two shares."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MistakeGroup:
    """One kind of mistake: how many of how many decisions, the surest ones, their words."""

    num_mistakes: int
    num_decisions: int
    examples: tuple[Mistake, ...]
    words: tuple[CommonWords, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistakes:
    """The two kinds of a router's mistakes."""

    missed: MistakeGroup
    """The small model's answer stood; the large one's was better."""
    needless: MistakeGroup
    """The large model answered, and was no better."""


def find_mistakes(
    prompts: Sequence[str], rows: StageRows, point: OperatingPoint, *, num_examples: int = 10
) -> Mistakes:
    """The mistakes of a setting on labelled prompts, those that it was surest about first.

    Sure is what the last stage says, which decides where it is asked. Of prompts that begin alike
    one stands for all.
    """
    is_strong, _ = split(rows, point.threshold, point.band)
    gains = rows.strong > rows.weak
    quality = rows.quality(rows.stages[-1])

    def group(decided: NDArray[np.bool_], wrong: NDArray[np.bool_], sign: float) -> MistakeGroup:
        places = np.flatnonzero(decided & wrong)
        surest = places[np.argsort(sign * quality[places], kind="stable")]
        return MistakeGroup(
            num_mistakes=len(places),
            num_decisions=int(decided.sum()),
            examples=tuple(
                Mistake(
                    prompt=prompts[place],
                    quality=min(1.0, float(quality[place])),
                    weak=float(rows.weak[place]),
                    strong=float(rows.strong[place]),
                )
                for place in _unalike(prompts, surest.tolist())[:num_examples]
            ),
            words=common_words(
                [prompts[place] for place in places.tolist()],
                [prompts[place] for place in np.flatnonzero(decided & ~wrong).tolist()],
            ),
        )

    return Mistakes(missed=group(~is_strong, gains, -1.0), needless=group(is_strong, ~gains, 1.0))


def _unalike(prompts: Sequence[str], places: Sequence[int]) -> list[int]:
    """The first place of each beginning, in the order given."""
    firsts: dict[str, int] = {}
    for place in places:
        beginning = _DIGIT.sub("0", prompts[place][:_BEGINNING_CHARS])
        firsts.setdefault(beginning, place)
    return list(firsts.values())


def common_words(
    mistakes: Sequence[str], others: Sequence[str], *, most: int = 12
) -> tuple[CommonWords, ...]:
    """Words and pairs of neighbours by falling z; only what chance would hardly do."""
    if not mistakes or not others:
        return ()
    here, there = (Counter(_words_of(prompts)) for prompts in (mistakes, others))
    found = []
    for text, count in here.items():
        shares = count / len(mistakes), there[text] / len(others)
        pooled = (count + there[text]) / (len(mistakes) + len(others))
        variance = pooled * (1.0 - pooled) * (1.0 / len(mistakes) + 1.0 / len(others))
        if count < _MIN_PROMPTS or variance == 0.0:
            continue
        z = (shares[0] - shares[1]) / variance**0.5
        if z >= _MIN_Z:
            found.append(
                CommonWords(text=text, share_of_mistakes=shares[0], share_of_others=shares[1], z=z)
            )
    return tuple(sorted(found, key=lambda words: (-words.z, words.text))[:most])


def _words_of(prompts: Sequence[str]) -> list[str]:
    """Each different word and pair of every prompt, once a prompt."""
    words: list[str] = []
    for prompt in prompts:
        text = _DIGIT.sub("0", prompt[:_MAX_CHARS].lower())
        line = _WORD.findall(text)
        words.extend({*line, *(f"{left} {right}" for left, right in pairwise(line))})
    return words
