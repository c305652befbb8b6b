"""Hostile schemas, expressions, grammars and parts: each is refused or compiles, within bounds."""

import contextlib
import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.chaos.fuzzed_schemas import WORDS, random_schema
from outrider.engine.errors import InvalidGrammarError
from outrider.engine.grammar.process import CompileBounds, GrammarProcess
from outrider.engine.request import GrammarKind, GrammarSpec

VOCABULARY = [b"\xff", *(bytes([byte]) for byte in range(32, 127)), b'{"', b'": ', b"ab", b"\xc3"]

_KEYWORDS = (
    "type enum const anyOf oneOf allOf not if $ref $defs definitions properties required items"
    " additionalProperties patternProperties propertyNames minProperties maxProperties prefixItems"
    " minItems maxItems uniqueItems unevaluatedItems unevaluatedProperties minLength maxLength"
    " pattern format minimum maximum exclusiveMinimum exclusiveMaximum multipleOf title contains"
)
_REGEX_PARTS = (
    r"a b é 漢 ( ) (?: (?= (?! (?<n> [ [^ ] - ^ $ | * + ? . \d \w \S \b \1 \u00e9 \x \ \p{L}"
    r" {2} {0,1000} {1000000000} {3,1} {,} { } (a*)* [a-z] [\s\S] [z-a] [] ()"
)
_EBNF_PARTS = (
    'root ::= rule a "x" "\\x" \'y\' [a-z] [^" ( ) | * + ? {2,3} {1000000} {9,1} \n # "" ::= (('
    " root a ::= root\n 漢 \\U0010ffff [^\\n] (?= start: %json <[3]> <[*]> %ignore /a/ , & ~"
)
KEYWORDS = _KEYWORDS.split()
REGEX_PARTS = _REGEX_PARTS.split()
EBNF_PARTS = _EBNF_PARTS.split(" ")


def junk(rng: random.Random, depth: int = 0) -> Any:
    """A JSON value, seldom one that a keyword wants."""
    match rng.randrange(10 if depth < 3 else 7):
        case 0:
            return rng.choice((10**400, -(10**400), 2**63, 2**53, 10**9, -1, 0, 1, 3))
        case 1:
            return rng.choice((float("nan"), float("inf"), 1e308, 5e-324, -0.0, 0.1, 1.0))
        case 2:
            return rng.choice((None, True, False, "", "\ud800", "\0", "#", "#/$defs/a", "#/a/b/~1"))
        case 3:
            return rng.choice(("string", "object", "array", "integer", "number", "null", "any"))
        case 4:
            return rng.choice(WORDS)
        case 5:
            return regex(rng)
        case 6:
            return rng.choice(([], {}, [[]], [{}], {"": {}}))
        case 7:
            return [junk(rng, depth + 1) for _ in range(rng.randrange(4))]
        case 8:
            return {rng.choice(WORDS): junk(rng, depth + 1) for _ in range(rng.randrange(4))}
        case _:
            return hostile_schema(rng, depth + 1)


def hostile_schema(rng: random.Random, depth: int = 0) -> Any:
    """A schema of which some keywords have any value."""
    schema = random_schema(rng, depth) if rng.random() < 0.6 else {}
    for _ in range(rng.randrange(4)):
        schema[rng.choice(KEYWORDS)] = junk(rng, depth + 1)
    if rng.random() < 0.2:
        return {rng.choice(("anyOf", "oneOf", "allOf")): [schema, junk(rng, depth + 1), schema]}
    return schema


def regex(rng: random.Random) -> str:
    return "".join(rng.choice(REGEX_PARTS) for _ in range(rng.randrange(1, 12)))


def part(rng: random.Random, depth: int = 0) -> Any:
    """A part of a grammar, seldom a good one."""
    kinds = "json_schema const token regex choice text_until sequence or optional star grammar"
    if rng.random() < 0.1:
        return {"type": "text", "max_chars": rng.choice((None, 5, 10**9)), "suffix": "\n"}
    return {
        "type": rng.choice((*kinds.split(), 1, "nothing")),
        "json_schema": hostile_schema(rng, 1),
        "lenient": rng.random() < 0.5,
        "value": rng.choice(("<a>", "", "é", junk(rng, 3))),
        "token": rng.choice((0, 5, -1, 10**9, junk(rng, 3))),
        "pattern": rng.choice((regex(rng), junk(rng, 3))),
        "values": rng.choice((["a", "ab"], junk(rng, 2))),
        "end": rng.choice(("</a>", "", junk(rng, 3))),
        "excludes": rng.choice((None, "</")),
        "max_chars": rng.choice((None, 5, 10**9, junk(rng, 3))),
        "not_before": rng.choice((None, "<a>", junk(rng, 3))),
        "suffix": rng.choice((None, "\n", junk(rng, 3))),
        "grammar": " ".join(rng.choice(EBNF_PARTS) for _ in range(rng.randrange(9))),
        "elements": [part(rng, depth + 1) for _ in range(rng.randrange(3) if depth < 3 else 0)],
        "content": part(rng, depth + 1) if depth < 3 else junk(rng, 3),
    }


def text_of_json(make: Callable[[random.Random], Any], rng: random.Random) -> str:
    """JSON, sometimes cut or with another character in it."""
    text = json.dumps(make(rng))
    if rng.random() < 0.05:
        place = rng.randrange(len(text))
        text = text[:place] + rng.choice(("", "}", "\0", '"', "\ud800"))
    return text


def hostile(rng: random.Random) -> GrammarSpec:
    """A grammar of any kind, seldom a good one."""
    kind: GrammarKind = rng.choice(
        ("json_schema", "json_schema", "json_schema", "regex", "grammar", "choice", "parts")
    )
    match kind:
        case "json_schema":
            text = text_of_json(hostile_schema, rng)
        case "regex":
            text = regex(rng)
        case "grammar":
            text = "root ::= " + " ".join(rng.choice(EBNF_PARTS) for _ in range(rng.randrange(12)))
        case "choice":
            text = text_of_json(junk, rng)
        case _:
            text = text_of_json(part, rng)
    return GrammarSpec(kind=kind, text=text)


def attack(*, num_grammars: int, seed: int) -> tuple[int, list[str]]:
    """Return how many compiled, and the grammars that ended the compiling process.

    Anything but a source or an InvalidGrammarError is raised.
    """
    process = GrammarProcess(VOCABULARY, [0], CompileBounds(compile_wall_s=60.0))
    num_compiled, fatal = 0, []
    rng = random.Random(seed)
    running = process.start()
    try:
        for _ in range(num_grammars):
            spec = hostile(rng)
            with contextlib.suppress(InvalidGrammarError):
                process.prepare(spec)
                num_compiled += 1
            if process.start() is not running:
                running = process.start()
                fatal.append(f"{spec.kind} {spec.text}")
    finally:
        process.close()
    return num_compiled, fatal


def test_hostile_grammars_are_refused_or_compile() -> None:
    num_compiled, fatal = attack(num_grammars=1000, seed=15)
    assert not fatal
    assert 50 < num_compiled < 950  # neither all bad nor all good


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10))
def test_ten_thousand_hostile_grammars(seed: int) -> None:
    """Where llguidance crashes on one, that ends the compiling process and nothing else."""
    num_compiled, fatal = attack(num_grammars=10_000, seed=seed)
    assert len(fatal) < 100
    assert num_compiled > 500
