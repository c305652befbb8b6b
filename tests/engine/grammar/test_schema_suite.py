"""JSON-Schema-Test-Suite: what it calls invalid is never an answer, what it calls valid may be one.

The suite is in the folder that JSON_SCHEMA_TEST_SUITE names (the one with `tests/draft2020-12`), or
is taken from the source distribution of the package jsonschema, which ships it.
"""

import json
import os
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice, permutations, product
from pathlib import Path
from typing import Any, Final

import jsonschema_rs
import pytest

from outrider.engine.errors import InvalidGrammarError
from outrider.engine.grammar.grammar import TokenGrammar
from outrider.engine.grammar.json_schema import _OF_TYPE as OF_TYPE
from outrider.engine.request import GrammarSpec
from outrider.gateway.answering.text.answer_schema import AnswerSchema
from tests.engine.grammar.compiling import compiled
from tests.engine.grammar.test_schema_texts import allows, grammar_of

pytestmark = pytest.mark.long

VARIABLE: Final = "JSON_SCHEMA_TEST_SUITE"
DISTRIBUTION: Final = "jsonschema==4.26.0"
FORMATS: Final = (
    "date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uuid",
)  # fmt: skip
ASSERTED: Final = ("format-assertion", "vocabulary")  # their schemas lie elsewhere
UNESCAPED: Final = r'^[^\u0000-\u001f"\\]*$'
MAX_SPELLINGS: Final = 500


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the draft's files."""
    if VARIABLE in os.environ:
        return Path(os.environ[VARIABLE]) / "tests" / "draft2020-12"
    folder = tmp_path_factory.mktemp("suite")
    asked = ["download", "--no-deps", "--no-binary", "jsonschema", "--dest", str(folder)]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--quiet", *asked, DISTRIBUTION], check=False, timeout=300
    )
    if done.returncode != 0:
        pytest.skip(f"pip cannot download {DISTRIBUTION}; set {VARIABLE} to the suite's folder")
    with tarfile.open(next(folder.glob("*.tar.gz"))) as packed:
        packed.extractall(folder, filter="data")
    return next(folder.glob("*/json/tests/draft2020-12"))


def cases(files: list[Path]) -> Iterator[tuple[str, Any, Any, bool]]:
    """Return each test's name, schema, value, and whether the value is valid."""
    for file in files:
        for group in json.loads(file.read_text()):
            for test in group["tests"]:
                name = f"{file.stem}: {group['description']}: {test['description']}"
                yield name, group["schema"], test["data"], test["valid"]


def spellings(value: Any) -> Iterator[Any]:
    """Return a value with its objects' fields in every order, and whole floats as integers."""
    match value:
        case dict():
            for order in permutations(value):
                for items in product(*(list(spellings(value[name])) for name in order)):
                    yield dict(zip(order, items, strict=True))
        case list():
            yield from map(list, product(*(list(spellings(item)) for item in value)))
        case float() if value.is_integer():
            yield from (value, int(value))
        case _:
            yield value


def may_be_written(grammar: TokenGrammar, value: Any) -> bool:
    """True if the grammar allows a text of the value."""
    return any(
        allows(grammar, text)
        for spelling in islice(spellings(value), MAX_SPELLINGS)
        for separators in ((",", ":"), (", ", ": "))
        for text in (json.dumps(spelling, ensure_ascii=False, separators=separators),)
    )


def promised(schema: Any) -> Any:
    """Narrow a schema as docs/api.md says: types from keywords, closed objects, whole patterns."""
    if isinstance(schema, list):
        return [promised(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    narrow = {name: promised_within(name, value) for name, value in schema.items()}
    kinds = [kind for kind, names in OF_TYPE.items() if not narrow.keys().isdisjoint(names)]
    if kinds and kinds != ["string"] * ("format" in narrow):
        narrow.setdefault("type", "number" if "number" in kinds else kinds[0])
    if narrow.keys() & {"properties", "required", "patternProperties"}:
        rest = narrow.get("additionalProperties", narrow.get("unevaluatedProperties"))
        named = dict.fromkeys(narrow.get("required", ()), True if rest is None else rest)
        narrow["properties"] = named | narrow.get("properties", {})
        narrow["additionalProperties"] = False if rest is None else rest
    if "prefixItems" in narrow and "unevaluatedItems" not in narrow:
        narrow.setdefault("items", False)
    if "pattern" in narrow:
        narrow["allOf"] = [{"pattern": UNESCAPED}]
    return narrow


def promised_within(name: str, value: Any) -> Any:
    """Narrow the value of a keyword."""
    match name:
        case "const" | "enum":
            return value
        case "pattern":
            return f"^(?:{value})$"
        case "patternProperties":
            return {f"^(?:{key})$": promised(item) for key, item in value.items()}
        case "properties" | "$defs":
            return {key: promised(item) for key, item in value.items()}
        case _:
            return promised(value)


def judged(schema: Any, value: Any, is_valid: bool, promise: Any) -> str:
    """Return "right", "refused" (the schema), "narrow" (valid, not promised), or what is wrong."""
    try:
        grammar = grammar_of(schema)
    except InvalidGrammarError:
        return "refused"
    if may_be_written(grammar, value) == is_valid:
        return "right"
    if not is_valid:
        return "allowed although it is invalid"
    is_promised = jsonschema_rs.validator_for(promise).is_valid(value)
    return "not allowed although it is promised" if is_promised else "narrow"


def judge_all(
    cases: Iterator[tuple[str, Any, Any, bool]], promise: Callable[[Any], Any]
) -> Counter[str]:
    """Count the verdicts; fail where one is wrong. `promise`: a schema of what is to be allowed."""
    found: Counter[str] = Counter()
    wrong = []
    for name, schema, value, is_valid in cases:
        verdict = judged(schema, value, is_valid, promise(schema))
        found[verdict] += 1
        if verdict not in ("right", "refused", "narrow"):
            wrong.append(
                f"{name}: {verdict}: {json.dumps(schema)[:300]}: {json.dumps(value)[:100]}"
            )
    assert not wrong, "\n".join(wrong)
    return found


def test_keywords(suite: Path) -> None:
    files = sorted(suite.glob("*.json")) + sorted((suite / "optional").glob("*.json"))
    found = judge_all(cases([file for file in files if file.stem not in ASSERTED]), promised)
    assert found["right"] > 600 > found["narrow"]


def test_formats(suite: Path) -> None:
    """Each format has its type beside it. Some texts that are valid are not allowed."""
    folder = suite / "optional" / "format"
    for name in FORMATS:
        texts = (
            (case, {"type": "string", "format": name}, value, is_valid)
            for case, _, value, is_valid in cases([folder / f"{name}.json"])
            if isinstance(value, str)
        )
        found = judge_all(texts, lambda _: False)
        assert found["right"]
        assert not found["refused"]


# ---- schemas that are not strict ----------------------------------------------------------------


def lenient_grammar(schema: Any) -> TokenGrammar:
    part = {"type": "json_schema", "json_schema": schema, "lenient": True, "place": "p"}
    return compiled(GrammarSpec(kind="parts", text=json.dumps(part)))


def judged_leniently(schema: Any, value: Any, is_valid: bool) -> str:
    """Return "right", "narrow", "left out" (an invalid value, by what is named), or what is wrong.

    What the grammar names is taken out of the schema, and that is what must hold of all it allows.
    """
    grammar = lenient_grammar(schema)
    if may_be_written(grammar, value) == is_valid:
        return "right"
    rest = AnswerSchema(content=json.dumps(schema), place="p").enforced(grammar.left_out)
    if rest.verdict(json.dumps(value), ()) == "differs":
        return "allowed, and refused by the check behind it" if not is_valid else "narrow"
    if is_valid:
        return "narrow"
    has_kept = jsonschema_rs.validator_for(json.loads(rest.content or "true")).is_valid(value)
    return "left out" if grammar.left_out and has_kept else "allowed although it is invalid"


def test_no_schema_that_is_not_strict_is_refused(suite: Path) -> None:
    files = sorted(suite.glob("*.json")) + sorted((suite / "optional").glob("*.json"))
    found: Counter[str] = Counter()
    wrong = []
    for name, schema, value, is_valid in cases(
        [file for file in files if file.stem not in ASSERTED]
    ):
        verdict = judged_leniently(schema, value, is_valid)
        found[verdict] += 1
        if verdict not in ("right", "left out", "narrow"):
            left_out = lenient_grammar(schema).left_out
            wrong.append(f"{name}: {verdict}: {schema}: {value!r}: {left_out}"[:500])
    assert not wrong, "\n".join(wrong)
    assert found["right"] > 900
