"""JSON schemas and texts: which texts an answer under a schema may be, and which never.

Nothing here knows how a grammar is written. Texts are spelled byte by byte; answers are drawn at
random from all that may follow, in whole tokens, and checked by another library.
"""

import json
import random
from functools import cache
from typing import Any, Final

import jsonschema_rs
import numpy as np
import pytest

from outrider.engine.errors import InvalidGrammarError
from outrider.engine.grammar.grammar import TokenGrammar
from tests.grammars import schema_spec, shipped_compiler, shipped_token_bytes, shipped_tokenizer
from tests.sizes import repeats

STOP: Final = shipped_tokenizer().eos_token_id
LONG: Final = 20_000
WORKFLOW: Final = {
    "type": "object",
    "properties": {
        "script": {"type": "string", "maxLength": 524_288},
        "run": {"type": "string", "pattern": "^wf_[a-z0-9-]{6,}$"},
        "note": {"type": "string"},
    },
    "additionalProperties": False,
}


@cache
def token_of_byte() -> dict[int, int]:
    return {text[0]: i for i, text in enumerate(shipped_token_bytes()) if len(text) == 1}


def grammar_of(schema: Any) -> TokenGrammar:
    return shipped_compiler().compile(schema_spec(schema)).result(30)


def allows(grammar: TokenGrammar, text: str) -> bool:
    """Whether a text may be a whole answer."""
    matcher = grammar.matcher()
    return all(matcher.accept(token_of_byte()[byte]) for byte in text.encode()) and matcher.accept(
        STOP
    )


def string(**keywords: Any) -> dict[str, Any]:
    return {"type": "string", **keywords}


def number(**keywords: Any) -> dict[str, Any]:
    return {"type": "number", **keywords}


def written(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


RAW_LINE = '"a\nb"'
RAW_QUOTE = '"a"b"'
X = {"type": "object", "required": ["x"]}
UUID = "01234567-89ab-cdef-0123-456789abcdef"
# A schema, values that an answer may be, and texts that it may not.
CASES: tuple[tuple[dict[str, Any], list[Any], list[str]], ...] = (
    *[
        (string(maxLength=n), ["", "a" * n, "é" * n], [written("a" * (n + 1)), RAW_LINE, RAW_QUOTE])
        for n in (1, 128, 129, 200, 255, 2500, LONG)
    ],
    (string(maxLength=200), ["a\nb", '"' * 100], [written("\n" * 201)]),
    *[
        (string(minLength=n), ["a" * n, "a" * (n + 99)], [written("a" * (n - 1)), '"\n"'])
        for n in (1, 128, 129, 200)
    ],
    (string(minLength=150, maxLength=150), ["漢" * 150], [written("a" * 149), written("a" * 151)]),
    (string(minLength=3, maxLength=150), ["a" * 150], [written("a" * 151), '"ab"', '"a\tbc"']),
    (string(pattern=r"^[\s\S]{1,255}$"), ["a" * 255], [written("a" * 256), RAW_LINE, RAW_QUOTE]),
    (
        {"type": "array", "items": string(maxLength=150)},
        [["a" * 150, "b"]],
        ['["' + "a" * 151 + '"]', "[" + RAW_LINE + "]"],
    ),
    (
        {"propertyNames": {"maxLength": 150}, "additionalProperties": {"type": "integer"}},
        [{"a" * 150: 1}],
        ['{"' + "a" * 151 + '":1}', '{"a\nb":1}'],
    ),
    (
        {
            "type": "object",
            "properties": {"label": string(maxLength=200)},
            "required": ["label"],
            "additionalProperties": False,
        },
        [{"label": "abc"}],
        ['{"label": "abc", "evil": "z"}'],
    ),
    (string(maxLength=2**40), ["a\n"], [RAW_LINE]),
    # ---- patterns
    (string(pattern="^.+$"), ["abc", "fü", "😀"], ['""', '"a\nb"', '"\u2028"', '"a"b"']),
    (string(pattern="^a.c$"), ["abc", "a😀c"], ['"ac"', '"abbc"']),
    (string(pattern="^😀$"), ["😀"], ['"\\u0001f600"', '"f"', '"😁"']),
    (string(pattern="^[😀😂]+$"), ["😀😂"], ['"😁"', '"f"', '"0"']),
    (string(pattern="^[😀-😂]$"), ["😀", "😁"], ['"😃"', '"0"']),
    (string(pattern=r"^[\u{1F600}-\u{1F602}]$"), ["😁"], ['"😃"', '"f"']),
    (
        {"patternProperties": {"^😀[a-z]$": {"type": "null"}}, "additionalProperties": False},
        [{"😀a": None}],
        ['{"fa":null}', '{"a":null}'],
    ),
    (string(pattern=r"^[^\D]+$"), ["12"], ['"a"', '"1a"']),
    (string(pattern=r"^[^\W]+$"), ["a_1"], ['"é"', '" "']),
    (string(pattern=r"^[^\S]$"), [" ", "\u2003"], ['"a"', '"_"']),
    (string(pattern=r"^\s+$"), ["\u2003\ufeff \u2029"], ['"a"']),
    (string(pattern=r"^[\s\S]$"), ["\u2003", "a"], ['""']),
    (string(pattern=r"^[^\Da]+$"), ["12"], ['"a"', '"b"']),
    (string(pattern=r"^[\D]$"), ["a", "é", "漢", "😀"], ['"1"']),
    (string(pattern=r"^[\W]$"), ["é", "漢", "-"], ['"a"', '"_"']),
    (string(pattern=r"^[\S]$"), ["a", "é", "漢"], ['" "', '"\u2003"', '"\ufeff"']),
    (WORKFLOW, [{"script": "a\nb", "run": "wf_ab-123"}, {}], ['{"run":"wf_A"}', '{"z":1}']),
    # ---- a length beside a pattern
    (
        string(pattern="^[a-z0-9-]+$", minLength=2, maxLength=8),
        ["ab", "a" * 8],
        ['"a"', '"aaaaaaaaa"'],
    ),
    (
        string(pattern="^wf_[a-z0-9-]{6,}$", maxLength=12),
        ["wf_abcdefghi"],
        ['"wf_abcde"', '"wf_abcdefghij"'],
    ),
    (string(pattern="^[a-z]+:[0-9]*$", maxLength=6), ["ab:12", "a:"], ['"abcdef:"', '"a:123456"']),
    (string(pattern=r"^\d{5}(-\d{4})?$"), ["12345", "12345-6789"], ['"1234"']),
    (string(pattern=r"^\d{3,}$", minLength=5), ["12345"], ['"1234"']),
    # ---- a format beside a length
    (
        string(format="email", maxLength=60),
        ["john.smith@example.co.uk"],
        ['"tdolphin"', '"a..b@c.de"'],
    ),
    (string(format="email", minLength=3, maxLength=320), ["a@b.de"], ['"ab.de"']),
    (string(format="date", maxLength=30), ["2026-11-27"], ['"x"', '"2026-11-27x"']),
    (string(format="uuid", minLength=36, maxLength=36), [UUID], [written("x" * 36)]),
    (string(format="ipv4", minLength=1), ["1.2.3.4", "255.10.0.99"], ['"1"', '"1.2.3.04"']),
    (
        string(format="date"),
        ["2024-02-29", "2000-02-29", "2026-12-31"],
        ['"2023-02-29"', '"1900-02-29"', '"2026-09-31"', '"2026-13-01"'],
    ),
    (string(format="date-time"), ["2026-11-27T03:04:05+01:00"], ['"2026-11-31T03:04:05Z"']),
    (string(format="time"), ["23:59:59.5Z"], ['"22:58:60Z"', '"23:59:59"']),
    (string(format="hostname", maxLength=253), ["a.b-c.de"], ['"a..b"', '"-a"']),
    (string(format="date-time", maxLength=30), ["2026-11-27T03:04:05Z"], ['"x"']),
    (string(format="date-time", maxLength=64), ["2026-11-27T03:04:05.25+01:00"], ['"x"']),
    # ---- numbers
    (number(minimum=1e-6, maximum=2e-6), [], ["0", "1", "0.000003"]),
    (number(minimum=0.1234567, maximum=0.2), [0.15, 0.123457], ["0.1", "0.123456", "0.3"]),
    (number(exclusiveMinimum=0.3, exclusiveMaximum=0.300002), [0.300001], ["0.3", "0.300002"]),
    # ---- references
    (
        {
            "oneOf": [{"$ref": "#/$defs/a~1b"}, {"$ref": "#/$defs/c%25"}],
            "$defs": {"a/b": {"type": "integer"}, "c%": {"type": "null"}},
        },
        [1, None],
        ["true", '"a"'],
    ),
    (
        {
            "type": "array",
            "prefixItems": [
                {"$ref": "#/$defs/x~1y"},
                {"$ref": "#/prefixItems/0"},
                {"$ref": "#/$defs/a%20b"},
            ],
            "items": False,
            "minItems": 3,
            "$defs": {
                "x/y": {"type": "integer"},
                "a b": {"anyOf": [{"$ref": "#/$defs/a%20b/anyOf/1"}, {"type": "null"}]},
            },
        },
        [[1, 2, None]],
        ['[1,"a",null]', "[1,2,3]", "[1,2]"],
    ),
    (
        {
            "type": "object",
            "properties": {"n/x": {"type": "array", "items": {"$ref": "#/properties/n~1x"}}},
            "required": ["n/x"],
        },
        [{"n/x": [[], [[]]]}],
        ['{"n/x":[1]}'],
    ),
    # ---- keywords without a type, and alone
    ({"uniqueItems": False}, [[1, 1], []], ["1", "{}"]),
    ({"maxProperties": 2}, [{}, {"a": 1, "b": [2]}], ['{"a":1,"b":2,"c":3}', "1"]),
    (
        {
            "type": ["string", "integer", "number", "array", "object", "boolean", "null"],
            "minLength": 3,
        },
        ["abc", 1],
        ['"ab"'],
    ),
    # ---- what stands side by side
    (string(format="uuid", pattern="^a"), ["a" + UUID[1:]], [written("b" + UUID[1:]), '"a"']),
    (string(format="date", pattern="-01$"), ["2024-02-01"], ['"2024-02-02"', '"x-01"']),
    (string(pattern="^(ab|c)+$", maxLength=5), ["abcc", "cabab"], ['"cccccc"', '"ababab"', '"a"']),
    *[
        (string(pattern=f"^{one}$"), good, [*bad, '"a"'])
        for one, good, bad in (
            ('[^"a]', ["b", "\\"], ['"\\""']),
            (r"[^\\a]", ["b", '"'], [r'"\\"']),
            (r"[^\x22\u0061]", ["b", "\\"], ['"\\""']),
            ("[^!-~]", ["é"], ['"\\""', r'"\\"', '"b"']),
            (r'[^\n"\\a]', ["b"], ['"\\""', r'"\\"', r'"\n"']),
            (r"[\x00-!]", ["!", " "], ['"\\""', r'"\\"']),
            (r"[^a-z]", ['"', "\\", "\n", "A"], ['"b"']),
            (r"[^\]a]", ["b"], ['"]"']),
            ("[a&&b&]{2}", ["&b"], ['"cc"']),
        )
    ],
    (string(pattern="b"), ["abc", "b"], ['"a"', '""']),
    ({"allOf": [string(), {"minLength": 2}]}, ["ab"], ['"a"', "1"]),
    (
        {"allOf": [{"properties": {"a": {"type": "null"}}}, {"required": ["a", "b"]}]}
        | {"type": "object"},
        [{"a": None, "b": 1}, {"a": None, "b": 1, "c": 2}],
        ['{"a":1,"b":1}', '{"a":null}'],
    ),
    (
        {"$ref": "#/$defs/a", "minLength": 2, "$defs": {"a": string()}},
        ["ab"],
        ['"a"', "1"],
    ),
    (
        {"oneOf": [{"$ref": "#/$defs/a"}, {"type": "null"}], "$defs": {"a": X}},
        [None, {"x": 1}],
        ["1", "{}"],
    ),
    ({"type": "object", "minProperties": 1}, [{"a": 1}], ["{}"]),
    (
        {"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "integer"}},
        [{}, {"a": 1}, {"a": 1, "b": 2}],
        ['{"c":1}', '{"a":"x"}'],
    ),
    ({"propertyNames": string(), "type": "object"}, [{"a": 1}], ["1"]),
    (
        {"propertyNames": {"maxLength": 1}, "unevaluatedProperties": {"type": "number"}},
        [{"a": 1}],
        ['{"a":"b"}', '{"ab":1}'],
    ),
    ({"format": "email"}, ["no mail", 1], []),
    # ---- numbers
    (number(minimum=1e-7, maximum=2e-7), [], ["0.0000003", "0", "1"]),
    (number(minimum=3, exclusiveMinimum=True), [3.5, 4], ["3", "2"]),
    (number(exclusiveMaximum=1.4600000000000002, minimum=1), [1], ["1.4600000000000001"]),
    (number(maximum=1.1927825699999999, minimum=1), [1], ["1.19278257"]),
    (number(exclusiveMinimum=0, exclusiveMaximum=1), [0.5, 0.99], ["0", "1"]),
    (number(maximum=-5), [-5, -7.25], ["-4", "0", "5"]),
    (number(exclusiveMaximum=-0.5), [-0.6, -3], ["-0.5", "0.1"]),
    (number(multipleOf=0.5), [0.5, 3, -1.5], ["0.3", "1.25"]),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: json.dumps(case[0])[:60])
def test_a_schema_allows_what_conforms_and_nothing_else(
    case: tuple[dict[str, Any], list[Any], list[str]],
) -> None:
    schema, values, refused = case
    grammar = grammar_of(schema)
    for value in values:
        assert allows(grammar, written(value)), written(value)[:80]
    for text in refused:
        assert not allows(grammar, text), text[:80]


REFUSED = (
    ({"uniqueItems": True}, "uniqueItems"),
    (string(format="date", maxLength=9), "no text fits pattern, format and length"),
    (string(pattern=r"^\d{3}$", maxLength=2), "no text fits pattern, format and length"),
    ({"$ref": "#/$defs/a~1c", "$defs": {"a/b": {}}}, "does not exist"),
    ({"items": {"$ref": "#/prefixItems/2"}, "prefixItems": [{}, {}]}, "does not exist"),
    ({"type": "integer", "maximum": 2**53}, r"below 2\*\*53"),
    ({"const": [{"a": 10**400}]}, r"below 2\*\*53"),
    ({"type": "object", "minProperties": 2}, "minProperties over the number"),
    ({"propertyNames": {"not": {}}}, "schema of propertyNames"),
    ({"required": ["a"], "additionalProperties": False}, "required property 'a'"),
    (
        {"properties": {"b": {}}, "required": ["a"], "unevaluatedProperties": False},
        "required property 'a'",
    ),
    (number(minimum=1.0000000000001, maximum=1.0000000000002), "no number of twelve decimals"),
    ({"properties": {"a": {}}, "propertyNames": {"maxLength": 2}}, "propertyNames beside"),
    ({"patternProperties": {f"^a{i}$": {} for i in range(65)}}, "over 64 patterns"),
)


@pytest.mark.parametrize(("schema", "reason"), REFUSED)
def test_what_cannot_be_enforced_is_refused_by_name(schema: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidGrammarError, match=reason):
        grammar_of(schema)


# ---- answers at random -------------------------------------------------------------------------

PATTERNS = (
    "^[a-z]+$",
    "^.*$",
    "^[A-Z][a-z]*$",
    r"^\d+$",
    r"^[^\W]{2,}$",
    "^[😀-😂]+$",
    r"^\S+$",
    "^[a-z]+-[0-9]+$",
    "^x?y*$",
    r"^[\s\S]+$",
    r"^[\D]{1,9}$",
    "^ü[é漢]{0,200}$",
)
FORMATS = ("email", "hostname", "date", "uuid", "ipv4", "ipv6", "date-time", "time", "nonsense")


def random_string(rng: random.Random) -> dict[str, Any]:
    """A string with one or several of its keywords, each of any size."""
    schema = string()
    if rng.random() < 0.4:
        schema["pattern"] = rng.choice(PATTERNS)
    if rng.random() < 0.3:
        schema["format"] = rng.choice(FORMATS)
    longest = rng.choice((1, 5, 36, 64, 128, 129, 130, 255, 256, 2500, 4096, LONG))
    if rng.random() < 0.7:
        schema["maxLength"] = longest
    if rng.random() < 0.5:
        schema["minLength"] = rng.choice((0, 1, 2, 30, 129, 150)) % (longest + 1)
    return schema


def random_number(rng: random.Random) -> dict[str, Any]:
    low = round(rng.uniform(-2, 2), rng.randrange(10))
    high = low + 10.0 ** -rng.randrange(9)
    lower = rng.choice(("minimum", "exclusiveMinimum"))
    return number(**{lower: low, rng.choice(("maximum", "exclusiveMaximum")): high})


def random_answer(grammar: TokenGrammar, rng: random.Random) -> str | None:
    """A whole answer, drawn token by token; None where it does not end within 300.

    It ends as soon as it may behind some tokens.
    """
    matcher = grammar.matcher()
    mask = np.zeros(-(-grammar.vocab_size // 32), dtype=np.int32)
    tokens: list[int] = []
    for _ in range(300):
        matcher.fill_mask(mask)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little", count=grammar.vocab_size)
        allowed = set(np.flatnonzero(bits).tolist())
        assert allowed, "an answer that may go on by no token"
        if STOP in allowed and (len(allowed) == 1 or len(tokens) > 3):
            return b"".join(shipped_token_bytes()[token] for token in tokens).decode()
        allowed -= {STOP}
        ends = {token for token in allowed if shipped_token_bytes()[token][:1] in {b'"', b"@"}}
        tokens.append(rng.choice(sorted(ends if ends and len(tokens) > 9 else allowed)))
        assert matcher.accept(tokens[-1])
    return None


def fuzz(count: int, seed: int) -> None:
    rng = random.Random(seed)
    num_answers = 0
    for _ in range(count):
        schema = random_string(rng) if rng.random() < 0.8 else random_number(rng)
        try:
            grammar = grammar_of(schema)
        except InvalidGrammarError:
            continue
        text = random_answer(grammar, rng)
        if text is None:
            continue
        value = json.loads(text)
        found = list(jsonschema_rs.validator_for(schema, validate_formats=True).iter_errors(value))
        assert not found, (schema, text, found[0].message)
        num_answers += 1
    assert num_answers > count / 3


def test_random_answers_conform() -> None:
    fuzz(repeats(20, 8), seed=5)


@pytest.mark.long
def test_many_random_answers_conform() -> None:
    fuzz(2000, seed=6)
