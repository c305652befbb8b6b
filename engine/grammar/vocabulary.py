"""A vocabulary as llguidance takes it, its bounds, and its errors in our words."""

import re
from collections.abc import Sequence
from typing import Final

import llguidance

# llguidance counts work instead of time, so a grammar that is refused is refused everywhere. Its
# own bounds, but for the lexer's states (1 to 2 kB each) and the number of symbols.
LIMITS: Final = llguidance.LLParserLimits(
    max_lexer_states=50_000, max_grammar_size=200_000, verbose_errors=False
)
_MAX_REASON_CHARS: Final = 1000
_STUCK: Final = "NoExtension"
_PLACE: Final = re.compile(r"^(at )?\d+\(\d+\): ")
_CONTEXT: Final = re.compile(r"\n +\d+ \|.*|<non-verbose/>|<backtrace>.*", re.DOTALL)


_WORDS: Final = (
    (re.compile(r"Unimplemented keys: \[(.*)\]"), r"not supported in structured output: \1"),
    (
        re.compile(r"oneOf constraints are not supported.*"),
        "oneOf: more than one branch may fit, which a grammar cannot exclude; use anyOf, or give "
        "the branches different types or constants",
    ),
    (
        re.compile(r"Unable to determine if regex is empty:.*", re.DOTALL),
        "a pattern is too complex beside another bound on the same text",
    ),
    (
        re.compile(r"Unsatisfiable schema: Regex is empty:.*", re.DOTALL),
        "no text fits pattern, format and length together",
    ),
    (
        re.compile(r".*(lexer error: too many|fuel exhausted|Current row has).*", re.DOTALL),
        "following it takes too much work; simplify it",
    ),
)


class _Vocabulary:
    """What LLTokenizer asks of a tokenizer. Nothing is ever encoded by it."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    special_token_ids: tuple[int, ...] = ()

    def __init__(self, tokens: Sequence[bytes], eos_token_id: int) -> None:
        self.tokens = list(tokens)
        self.eos_token_id = eos_token_id

    def __call__(self, text: object) -> list[int]:
        raise NotImplementedError


def tokenizer_of(
    token_bytes: Sequence[bytes], stop_token_ids: Sequence[int]
) -> llguidance.LLTokenizer:
    """Return a vocabulary of these tokens; b"" for one without text, which has its id alone."""
    # The byte 0xFF is in no text: llguidance marks special tokens by it.
    tokens = [text or b"\xff[%d]" % i for i, text in enumerate(token_bytes)]
    vocabulary = _Vocabulary(tokens, stop_token_ids[0])
    return llguidance.LLTokenizer(
        vocabulary,  # type: ignore[arg-type] # it is asked for no more than these names
        n_vocab=len(tokens),
        eos_token=list(stop_token_ids),
    )


def is_stuck(error: str) -> bool:
    """True for a place from which no token of the vocabulary leads on."""
    return error.startswith(_STUCK)


def reason(error: str) -> str:
    """llguidance's own words, without the place in its notation and without most of a long text."""
    if is_stuck(error):
        return "no text conforms to it"
    text = _PLACE.sub("", _CONTEXT.sub("", error))
    text = text.removeprefix("failed to compile JSON schema: ")
    for theirs, ours in _WORDS:
        text = theirs.sub(ours, text)
    return text.strip()[:_MAX_REASON_CHARS] or "it cannot be compiled"
