"""Decisions that a change of a prompt's form turns over: case, spaces, typos, order of options.

What is asked stays the same, so a router's decision should too. RouterArena (Lu et al., 2025) calls
the share of decisions that stay a router's robustness. The changes here are deterministic: a seed,
the kind and the prompt decide them.
"""

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

_OPTION: Final = re.compile(r"\(?([A-J])[.):] ")
_MIN_WORD: Final = 4
_WORDS_PER_TYPO: Final = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Flips:
    """What one kind of change does to decisions."""

    num_prompts: int
    """Prompts that it changes."""
    num_flipped: int

    @property
    def share(self) -> float:
        """Share of the changed prompts whose decision is another one; 0 where none is changed."""
        return self.num_flipped / self.num_prompts if self.num_prompts else 0.0


def count_flips(
    prompts: Sequence[str], decide: Callable[[str], object], *, seed: int = 0
) -> dict[str, Flips]:
    """Compare decisions on prompts with those on each kind of paraphrase."""
    before = [decide(prompt) for prompt in prompts]
    found = {}
    for kind in PARAPHRASES:
        changed = [
            (decision, other)
            for prompt, decision in zip(prompts, before, strict=True)
            if (other := paraphrase(prompt, kind, seed=seed)) != prompt
        ]
        flipped = sum(decide(other) != decision for decision, other in changed)
        found[kind] = Flips(num_prompts=len(changed), num_flipped=flipped)
    return found


def paraphrase(prompt: str, kind: str, *, seed: int = 0) -> str:
    """Return the prompt in another form; itself where this kind of change finds nothing."""
    text = f"{seed} {kind} {prompt}".encode("utf-8", "surrogatepass")
    rng = random.Random(blake2b(text, digest_size=16).digest())
    return PARAPHRASES[kind](prompt, rng)


def _other_case(prompt: str, rng: random.Random) -> str:
    """In lower case, as on a phone; what is so already begins its words with capitals."""
    del rng
    lower = prompt.lower()
    return lower if lower != prompt else prompt.title()


def _other_spaces(prompt: str, rng: random.Random) -> str:
    """Some spaces doubled, a line break at the end."""
    parts = prompt.split(" ")
    gaps = ["  " if rng.random() < 0.2 else " " for _ in parts[1:]]
    return "".join([parts[0], *(gap + part for gap, part in zip(gaps, parts[1:], strict=True))]) + (
        "\n"
    )


def _with_typos(prompt: str, rng: random.Random) -> str:
    """Two neighbouring letters swapped in about one word of twenty, in one at least."""
    words = prompt.split(" ")
    places = [i for i, word in enumerate(words) if len(word) >= _MIN_WORD and word.isalpha()]
    for place in rng.sample(places, min(len(places), 1 + len(words) // _WORDS_PER_TYPO)):
        word = words[place]
        at = rng.randrange(1, len(word) - 2)
        words[place] = word[:at] + word[at + 1] + word[at] + word[at + 2 :]
    return " ".join(words)


def _other_order(prompt: str, rng: random.Random) -> str:
    """The texts of lettered options in another order behind the same letters."""
    lines = prompt.split("\n")
    heads = {i: found.end() for i, line in enumerate(lines) if (found := _OPTION.match(line))}
    if len(heads) < 2:
        return prompt
    texts = [lines[i][end:] for i, end in heads.items()]
    rng.shuffle(texts)
    for (i, end), text in zip(heads.items(), texts, strict=True):
        lines[i] = lines[i][:end] + text
    return "\n".join(lines)


PARAPHRASES: Final[Mapping[str, Callable[[str, random.Random], str]]] = {
    "case": _other_case,
    "spacing": _other_spaces,
    "typos": _with_typos,
    "options": _other_order,
}
