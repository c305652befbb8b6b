"""Grammars for tests: the shipped tokenizer's compiler, and their specifications."""

import json
from functools import cache

import llguidance

from outrider.draft.text.vocabulary import vocabulary_bytes
from outrider.engine.errors import InvalidGrammarError
from outrider.engine.grammar.leaving_out import LeavingOut
from outrider.engine.grammar.llguidance_backend import LLGuidanceCompiler
from outrider.engine.grammar.source import prepare_source
from outrider.engine.request import GrammarSpec
from tests.engines import shipped_tokenizer


@cache
def shipped_token_bytes() -> tuple[bytes, ...]:
    token_bytes = vocabulary_bytes(shipped_tokenizer().backend_tokenizer)
    assert token_bytes is not None
    return tuple(token_bytes)


@cache
def shipped_compiler() -> LLGuidanceCompiler:
    return LLGuidanceCompiler(
        shipped_token_bytes(),
        vocab_size=len(shipped_token_bytes()),
        stop_token_ids=[shipped_tokenizer().eos_token_id],
    )


def text_of(token_ids: list[int]) -> str:
    return b"".join(shipped_token_bytes()[token_id] for token_id in token_ids).decode()


def schema_spec(schema: object) -> GrammarSpec:
    return GrammarSpec(kind="json_schema", text=json.dumps(schema))


def is_refused(schema: object) -> bool:
    """Whether the compiler takes no such schema, without a vocabulary and a process of its own."""
    try:
        source = prepare_source("json_schema", json.dumps(schema), LeavingOut(None))
    except InvalidGrammarError:
        return True
    return bool(llguidance.LLMatcher.validate_grammar(source.text))
