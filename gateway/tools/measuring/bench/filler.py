"""Texts of a wanted number of tokens, for traces that tell lengths and no words."""

import hashlib
import random
from dataclasses import dataclass
from typing import Final

# Everyday words: few tokens each in any vocabulary. What they say does not matter.
_TEXT: Final = """
    the of and to in is you that it he was for on are as with his they at be this have from or one
    had by word but not what all were we when your can said there use an each which she do how their
    if will up other about out many then them these so some her would make like him into time has
    look two more write go see number no way could people my than first water been call who oil its
    now find long down day did get come made may part over new sound take only little work know
    place year live me back give most very after thing our just name good sentence man think say
    great where help through much before line right too mean old any same tell boy follow came want
    show also around form three small set put end does another well large must big even such because
    turn here why ask went men read need land different home us move try kind hand picture again
    change off play spell air away animal house point page letter mother answer found study still
    learn should world
"""
_WORDS: Final = tuple(_TEXT.split())


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRatio:
    """Tokens of texts at a target: `num_fixed` for a chat's template, then `per_word` a word."""

    per_word: float = 1.3
    num_fixed: float = 8.0
    is_measured: bool = False

    def num_words(self, num_tokens: float) -> int:
        """Return the number of words that come nearest to `num_tokens`, without the template."""
        return max(0, round(num_tokens / self.per_word))


class Filler:
    """Texts by name: the same seed and name give the same words, whatever was asked before."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def words(self, name: str, count: int) -> list[str]:
        """The first `count` words of the text of this name; a longer text begins alike."""
        digest = hashlib.blake2b(f"{self._seed}/{name}".encode(), digest_size=8).digest()
        # One draw a word, so that the beginning does not depend on the length.
        return random.Random(int.from_bytes(digest)).choices(_WORDS, k=count)
