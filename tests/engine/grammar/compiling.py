"""A compiled grammar, and what it allows."""

import numpy as np

from outrider.engine.grammar.grammar import TokenGrammar
from outrider.engine.request import GrammarSpec
from tests.grammars import shipped_compiler

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 9},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
}


def compiled(spec: GrammarSpec) -> TokenGrammar:
    return shipped_compiler().compile(spec).result(20)


def allowed_after(grammar: TokenGrammar, tokens: list[int]) -> set[int] | None:
    """Brute force: a fresh matcher for each question. None behind the end or a refusal."""
    matcher = grammar.matcher()
    for token in tokens:
        if not matcher.accept(token):
            return None
    if tokens and tokens[-1] in grammar.stop_token_ids:
        return None
    mask = np.full(-(-grammar.vocab_size // 32), -1, dtype=np.int32)
    matcher.fill_mask(mask)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little", count=grammar.vocab_size)
    return set(np.flatnonzero(bits).tolist())
