"""Features of a prompt: hashed n-grams and statistics, one vector, numpy only.

Training and serving call the same function, so they cannot disagree. Everything is vectorised over
the prompt's code points. An n-gram's hash is a difference of two prefix hashes (Karp, Rabin 1987),
modulo 2**64. It is mixed (the finaliser of MurmurHash3), then folded into a block of the vector
with a random sign (feature hashing: Weinberger et al., ICML 2009).

Layout of the vector [num_features]: character n-grams | word n-grams | steps of statistics.
Only the first `max_head_chars` and the last `max_tail_chars` characters are looked at, so the cost
is bounded; the length of the whole prompt is one of the statistics.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

FloatRows = NDArray[np.float64]
_Words = NDArray[np.uint64]
_Ints = NDArray[np.intp]

# Odd, so that it has an inverse modulo 2**64 and a span's hash can be shifted back to position 0.
_BASE: Final = 0x9E3779B97F4A7C15
_BASE_INVERSE: Final = pow(_BASE, -1, 2**64)

_SIGN_BIT: Final = np.uint64(1 << 63)
_BITS_OF_ONE: Final = np.float64(1.0).view(np.uint64)

_GEOMETRIC: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_SMALL: Final = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 20, 24, 32)
_LONG: Final = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096, 8192, 16384)
_PERCENT: Final = (1, 2, 3, 5, 8, 10, 15, 20, 25, 30, 35, 40, 50, 60, 75, 90)

# Name and the edges of the steps into which a statistic is cut; a linear model on steps can follow
# any monotone or bent dependence. Order and edges are part of the format: FEATURE_VERSION.
STATISTICS: Final[tuple[tuple[str, tuple[int, ...]], ...]] = (
    ("num_chars", _LONG),
    ("num_words", _GEOMETRIC),
    ("num_lines", _SMALL),
    ("num_sentences", _SMALL),
    ("num_digits", _GEOMETRIC),
    ("num_numbers", _SMALL),
    ("longest_number", _SMALL),
    ("longest_word", _SMALL),
    ("mean_number_tenths", tuple(10 * edge for edge in _SMALL)),
    ("mean_word_tenths", tuple(range(20, 100, 5))),
    ("num_operators", _SMALL),
    ("num_commas", _SMALL),
    ("num_quotes", _SMALL),
    ("num_code_marks", _GEOMETRIC),
    ("num_json_marks", _GEOMETRIC),
    ("num_question_marks", _SMALL),
    ("percent_upper", _PERCENT),
    ("percent_not_ascii", _PERCENT),
    ("percent_distinct_words", _PERCENT),
    ("num_question_words", _SMALL),
    ("num_capital_words", _SMALL),
)
_STEPS: Final = 16
FEATURE_VERSION: Final = 1

_QUESTION_WORDS: Final = (
    *("what", "which", "who", "whose", "when", "where", "why", "how", "if", "explain", "prove"),
    *("compare", "describe", "find", "calculate", "determine", "not", "except"),
)
_CHARACTER_CLASSES: Final = ("+-*/^=<>%", ",", "\"'`", "{}()[];=<>`_\\", '{}[]:"', "?", ".?!")


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureConfig:
    """Sizes of the vector's blocks and how much of a prompt is read.

    Blocks are powers of two; 0 leaves the block out. Each n-gram block has norm 1.
    """

    num_char_features: int = 8192
    num_word_features: int = 8192
    min_char_ngram: int = 3
    max_char_ngram: int = 5
    max_word_ngram: int = 2
    max_head_chars: int = 2048
    max_tail_chars: int = 1024
    statistic_scale: float = 0.1
    """What each step that a statistic reaches counts."""

    def __post_init__(self) -> None:
        """Raise ValueError naming the field that is out of range."""
        for name in ("num_char_features", "num_word_features"):
            value = getattr(self, name)
            if value < 0 or value > 2**20 or value & (value - 1):
                raise ValueError(f"{name}={value} must be 0 or a power of two up to 2**20")
        low, high = self.min_char_ngram, self.max_char_ngram
        head, tail, scale = self.max_head_chars, self.max_tail_chars, self.statistic_scale
        checks = (
            ("min_char_ngram", low, low >= 1, "at least 1"),
            ("max_char_ngram", high, low <= high <= 8, "between min_char_ngram and 8"),
            ("max_word_ngram", self.max_word_ngram, 1 <= self.max_word_ngram <= 3, "in [1, 3]"),
            ("max_head_chars", head, 64 <= head <= 2**16, "in [64, 65536]"),
            ("max_tail_chars", tail, 0 <= tail <= 2**16, "in [0, 65536]"),
            ("statistic_scale", scale, 0.0 <= scale <= 100.0, "in [0, 100]"),
        )
        for name, value, ok, allowed in checks:
            if not ok:
                raise ValueError(f"{name}={value} must be {allowed}")

    @property
    def num_features(self) -> int:
        """Length of the vector."""
        return self.num_char_features + self.num_word_features + _STEPS * len(STATISTICS)


@dataclass(frozen=True, slots=True, eq=False)
class SparseVector:
    """The places of a vector that are not zero, ascending, and what stands there: both [any]."""

    indices: _Ints
    values: FloatRows


def prompt_features(text: str, config: FeatureConfig) -> SparseVector:
    """The features of a prompt: a vector of `config.num_features` places, most of them empty.

    Any string is accepted: empty, 100,000 characters long, with lone surrogates.
    """
    view = _View(text, config)
    statistics = _statistics(text, view)
    reached = statistics[:, None] >= _edges()  # [num_statistics, _STEPS]
    indices, values = _fold(
        (
            (_char_ngrams(view, config), config.num_char_features),
            (_word_ngrams(view, config), config.num_word_features),
        )
    )
    steps = np.flatnonzero(reached)
    first = config.num_features - reached.size
    return SparseVector(
        np.concatenate((indices, steps + first)),
        np.concatenate((values, np.full(len(steps), config.statistic_scale))),
    )


class _View:
    """The part of a prompt that is looked at, with what several features share.

    `codes`: code points of the lower-cased text, digits all 0 ([n], uint64). `prefix[i]`: hash of
    the first i of them ([n + 1]). `word_starts`, `word_ends`: runs of letters and digits, with
    their `word_hashes`.
    """

    __slots__ = (
        "classes", "codes", "number_sizes", "prefix", "raw", "word_ends", "word_hashes",
        "word_starts",
    )  # fmt: skip

    def __init__(self, text: str, config: FeatureConfig) -> None:
        self.raw = _bounded(text, config)
        # A lone surrogate is a legal part of a JSON string; it must not stop a request.
        encoded = self.raw.lower().encode("utf-32-le", "surrogatepass")
        codes = np.frombuffer(encoded, dtype=np.uint32)
        ascii_codes = np.minimum(codes, 127)
        is_digit = (codes >= ord("0")) & (codes <= ord("9"))
        self.codes = codes.astype(np.uint64)
        self.codes[is_digit] = ord("0")
        self.classes = np.bincount(ascii_codes, minlength=128)
        self.word_starts, self.word_ends = _runs(np.take(_is_word(), ascii_codes))
        number_starts, number_ends = _runs(is_digit)
        self.number_sizes = number_ends - number_starts
        powers, _ = _powers(len(codes) + 1)
        self.prefix = np.zeros(len(codes) + 1, dtype=np.uint64)
        # + 1, so that a NUL character counts.
        np.cumsum((self.codes + np.uint64(1)) * powers[:-1], out=self.prefix[1:])
        self.word_hashes = self.span_hashes(self.word_starts, self.word_ends)

    def span_hashes(self, starts: _Ints, ends: _Ints) -> _Words:
        """Hashes of the spans [starts, ends), independent of where they lie."""
        _, inverse_powers = _powers(len(self.prefix))
        hashes: _Words = (self.prefix[ends] - self.prefix[starts]) * inverse_powers[starts]
        return hashes


def _bounded(text: str, config: FeatureConfig) -> str:
    """Head and tail, with a line break where something was left out."""
    if len(text) <= config.max_head_chars + config.max_tail_chars:
        return text
    tail = text[len(text) - config.max_tail_chars :]
    return text[: config.max_head_chars] + "\n" + tail


def _runs(mask: NDArray[np.bool_]) -> tuple[_Ints, _Ints]:
    """Starts and ends of the runs of True."""
    padded = np.zeros(len(mask) + 2, dtype=np.bool_)
    padded[1:-1] = mask
    edges = np.flatnonzero(padded[1:] != padded[:-1])
    return edges[::2], edges[1::2]


def _char_ngrams(view: _View, config: FeatureConfig) -> _Words:
    """Hashes of all character n-grams, [any]."""
    length = len(view.codes)
    _, inverse_powers = _powers(length + 1)
    parts = [
        (view.prefix[size:] - view.prefix[:-size]) * inverse_powers[: length + 1 - size]
        for size in range(config.min_char_ngram, min(config.max_char_ngram, length) + 1)
    ]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.uint64)


def _word_ngrams(view: _View, config: FeatureConfig) -> _Words:
    """Hashes of words and of word pairs (and triples), punctuation between them left out, [any]."""
    gram = words = view.word_hashes
    parts = [words]
    for size in range(2, min(config.max_word_ngram, len(words)) + 1):
        gram = _mix(gram[:-1]) + words[size - 1 :]
        parts.append(gram)
    return np.concatenate(parts)


def _statistics(text: str, view: _View) -> FloatRows:
    """Raw statistics in the order of STATISTICS, [num_statistics]."""
    sizes = view.word_ends - view.word_starts
    numbers = view.number_sizes
    num_words, num_numbers = len(sizes), len(numbers)
    words = view.word_hashes
    marks = _class_table() @ view.classes  # [num_classes]
    num_chars = max(len(view.raw), 1)
    uppers = np.frombuffer(view.raw.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    is_upper = (uppers >= ord("A")) & (uppers <= ord("Z"))
    starts_upper = is_upper[view.word_starts[view.word_starts < len(is_upper)]]
    operators, commas, quotes, code, json_marks, questions, sentences = marks.tolist()
    return np.array(
        (
            len(text),
            num_words,
            _num_lines(text),
            sentences,
            numbers.sum(),
            num_numbers,
            numbers.max(initial=0),
            sizes.max(initial=0),
            10 * numbers.sum() / max(num_numbers, 1),
            10 * sizes.sum() / max(num_words, 1),
            operators,
            commas,
            quotes,
            code,
            json_marks,
            questions,
            100 * np.count_nonzero(is_upper) / num_chars,
            100 * view.classes[127] / num_chars,
            100 * len(np.unique(words)) / max(num_words, 1),
            np.count_nonzero(words == _question_words()[:, None]),
            np.count_nonzero(starts_upper),
        ),
        dtype=np.float64,
    )


def _num_lines(text: str) -> int:
    """Count the whole prompt's lines; str.count takes a tenth of a millisecond for 100,000."""
    encoded = np.frombuffer(text.encode("utf-8", "surrogatepass"), dtype=np.uint8)
    return int(np.count_nonzero(encoded == ord("\n"))) + 1


def _fold(blocks: tuple[tuple[_Words, int], ...]) -> tuple[_Ints, FloatRows]:
    """Signed counts of each block's hashes in its places, damped, each block with norm 1.

    `blocks`: (hashes, number of places), laid end to end. Returns indices and values, [any].
    """
    indices, values = [np.zeros(0, dtype=np.intp)], [np.zeros(0)]
    first = 0
    for hashes, size in blocks:
        if size:
            filled, damped = _fold_block(hashes, size)
            indices.append(filled + first)
            values.append(damped)
            first += size
    return np.concatenate(indices), np.concatenate(values)


def _fold_block(hashes: _Words, size: int) -> tuple[_Ints, FloatRows]:
    """Signed counts of hashes in `size` places, damped, with norm 1: filled places and values."""
    mixed = _mix(hashes)
    places = (mixed & np.uint64(size - 1)).view(np.intp)
    # Each hash's highest bit as the sign of a float's 1.
    signs = ((mixed & _SIGN_BIT) | _BITS_OF_ONE).view(np.float64)
    counts = np.bincount(places, weights=signs, minlength=size)
    filled = np.flatnonzero(counts != 0.0)  # of bools: four times as fast as of the counts
    # A word said ten times is not ten words.
    values: FloatRows = np.take(counts, filled)
    values = np.copysign(np.sqrt(np.abs(values)), values)
    if len(values):
        values /= np.sqrt(values @ values)
    return filled, values


def _mix(hashes: _Words) -> _Words:
    """MurmurHash3's 64-bit finaliser (Appleby, public domain): every bit depends on every bit."""
    mixed = hashes ^ (hashes >> np.uint64(33))
    mixed = mixed * np.uint64(0xFF51AFD7ED558CCD)
    mixed ^= mixed >> np.uint64(33)
    mixed *= np.uint64(0xC4CEB9FE1A85EC53)
    mixed ^= mixed >> np.uint64(33)
    return mixed


def _powers(length: int) -> tuple[_Words, _Words]:
    """_BASE**i and _BASE**-i modulo 2**64 for i < length."""
    size = max(4096, 1 << (length - 1).bit_length())
    powers, inverse_powers = _power_table(size)
    return powers[:length], inverse_powers[:length]


@lru_cache(maxsize=8)
def _power_table(size: int) -> tuple[_Words, _Words]:
    tables = []
    for base in (_BASE, _BASE_INVERSE):
        factors = np.full(size, base, dtype=np.uint64)
        factors[0] = 1
        tables.append(np.cumprod(factors))
    return tables[0], tables[1]


@lru_cache(maxsize=1)
def _edges() -> FloatRows:
    """[num_statistics, _STEPS]"""
    return np.array([edges for _, edges in STATISTICS], dtype=np.float64)


@lru_cache(maxsize=1)
def _is_word() -> NDArray[np.bool_]:
    # Code 127 stands for everything beyond ASCII: letters, for this purpose.
    return np.array([chr(code).isalnum() or code == 127 for code in range(128)])


@lru_cache(maxsize=1)
def _class_table() -> NDArray[np.intp]:
    """[num_classes, 128]"""
    rows = [[int(chr(code) in marks) for code in range(128)] for marks in _CHARACTER_CLASSES]
    return np.array(rows, dtype=np.intp)


@lru_cache(maxsize=1)
def _question_words() -> _Words:
    config = FeatureConfig()
    hashes = [_View(word, config) for word in _QUESTION_WORDS]
    return np.concatenate([view.span_hashes(view.word_starts, view.word_ends) for view in hashes])
