"""The reader of JSON schemas: any value of any keyword is read or refused, in linear time."""

import json
import random
from copy import deepcopy
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import outrider.engine.grammar.json_disjoint as json_disjoint
from benchmarks.chaos.fuzzed_schemas import random_schema
from outrider.engine.errors import InvalidGrammarError
from outrider.engine.grammar.json_disjoint import MAX_DESCRIBED, are_disjoint, types_of
from outrider.engine.grammar.json_schema import prepare_schema
from outrider.engine.grammar.json_shape import MAX_VALUES
from outrider.engine.request import GrammarSpec
from tests.engine.grammar.test_schema_texts import allows
from tests.grammars import schema_spec, shipped_compiler
from tests.sizes import repeats

TYPES = ("string", "integer", "number", "array", "object", "boolean", "null")
ENGINE_KILLER = {"type": "object", "properties": [], "required": ["a"]}
KEYWORDS = (
    "minLength", "maxLength", "pattern", "format", "minimum", "maximum", "exclusiveMinimum",
    "exclusiveMaximum", "items", "prefixItems", "minItems", "maxItems", "unevaluatedItems",
    "uniqueItems", "properties", "required", "additionalProperties", "patternProperties",
    "propertyNames", "minProperties", "maxProperties", "unevaluatedProperties", "const",
    "anyOf", "oneOf", "allOf", "$ref", "$defs", "definitions", "not", "if", "$id",
    "dependentRequired", "dependentSchemas", "$dynamicRef", "additionalItems", "x-guidance",
    "type", "multipleOf", "enum", "contains",
)  # fmt: skip
ODD_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 3, 2.5, 10**400, -(10**400), 1e308, float("inf"), float("nan"),
    "", "a", "string", "#", "#/$defs/a", "[" * 50, "a$b", "\ud800", [], {}, [1], ["a"], [[]], [{}],
    ["string", "nonsense"], ["string", 3], {"a": 1}, {"a": {"type": "string"}}, {"a": None},
    [{"type": "string"}, {"const": 1}], [ENGINE_KILLER, ENGINE_KILLER], {"a": ENGINE_KILLER},
)  # fmt: skip


def refusal_of(schema: Any) -> str | None:
    """Why a schema is refused; None where it is read. Anything else that is raised fails a test."""
    try:
        prepare_schema(schema)
    except InvalidGrammarError as error:
        return str(error)
    return None


def compile_refusal(schema: Any) -> str:
    error = shipped_compiler().compile(schema_spec(schema)).exception(60)
    assert isinstance(error, InvalidGrammarError)
    return str(error)


@pytest.mark.parametrize("name", ["oneOf", "anyOf"])
def test_the_schema_that_killed_the_engine_names_the_keyword(name: str) -> None:
    for schema in (
        {name: [ENGINE_KILLER, ENGINE_KILLER]},
        {name: [{"$ref": "#/$defs/x"}, {"const": 1}], "$defs": {"x": ENGINE_KILLER}},
    ):
        assert "properties must be an object" in compile_refusal(schema)


@pytest.mark.parametrize("keyword", ["minimum", "maximum", "exclusiveMinimum", "multipleOf"])
@pytest.mark.parametrize("kind", ["integer", "number"])
def test_numbers_of_400_digits_are_refused(keyword: str, kind: str) -> None:
    refusal = refusal_of({"type": kind, keyword: 10**400})
    assert refusal == f"#/{keyword}: numbers must be below 2**53"


def test_what_is_left_out_of_a_lenient_schema_is_all_that_cannot_be_enforced() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"not": {"const": 1}, "type": "integer"}, "b": {"format": "x"}},
        "dependentRequired": {"a": ["b"]},
    }
    assert "not supported" in compile_refusal(schema)
    tool = {"type": "json_schema", "json_schema": schema, "lenient": True}
    spec = GrammarSpec(kind="parts", text=json.dumps(tool))
    assert allows(shipped_compiler().compile(spec).result(60), '{"a":1}')
    assert not allows(shipped_compiler().compile(spec).result(60), '{"a":"x"}')


@pytest.mark.slow_cases
@pytest.mark.parametrize("keyword", KEYWORDS)
def test_every_odd_value_of_a_keyword_is_read_or_refused(keyword: str) -> None:
    for value in ODD_VALUES:
        for kind in (None, *TYPES):
            schema = {keyword: value} if kind is None else {"type": kind, keyword: value}
            refusal_of(schema)
            refusal_of({"oneOf": [schema, {"const": 1}], "$defs": {"a": schema}})


def fuzz_schemas(count: int, seed: int) -> None:
    """Break right schemas in random places; what is read also compiles or is refused."""
    rng = random.Random(seed)
    num_refused = 0
    for number in range(count):
        schema = random_schema(rng)
        for _ in range(rng.randint(1, 3)):
            place: Any = schema
            while rng.random() < 0.7:
                inside = place.values() if isinstance(place, dict) else place
                nested = [value for value in inside if isinstance(value, dict | list) and value]
                if not nested:
                    break
                place = rng.choice(nested)
            if isinstance(place, dict):
                place[rng.choice(KEYWORDS)] = deepcopy(rng.choice(ODD_VALUES))
            else:
                place[rng.randrange(len(place))] = deepcopy(rng.choice(ODD_VALUES))
        num_refused += refusal_of(schema) is not None
        if number % 20 == 0 and _is_text(schema):
            shipped_compiler().compile(schema_spec(schema)).exception(20)
    assert count / 30 < num_refused < count


def _is_text(schema: Any) -> bool:
    """Return whether a request could bring it: JSON in UTF-8."""
    try:
        return len(json.dumps(schema, ensure_ascii=False).encode()) < 60_000
    except UnicodeEncodeError:
        return False


def test_broken_schemas_are_read_or_refused() -> None:
    fuzz_schemas(repeats(1000, 300), seed=1)


@pytest.mark.long
def test_many_broken_schemas_are_read_or_refused() -> None:
    fuzz_schemas(100_000, seed=2)


# ---- work that grows with the text only -------------------------------------------------------


def test_constants_are_compared_by_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    num_frozen = 0
    frozen = json_disjoint._frozen

    def counted(value: Any) -> Any:
        nonlocal num_frozen
        num_frozen += 1
        return frozen(value)

    monkeypatch.setattr(json_disjoint, "_frozen", counted)
    assert refusal_of({"oneOf": [{"const": number} for number in range(3000)]}) is None
    assert num_frozen == 3000
    prepared = prepare_schema({"oneOf": [{"const": n} for n in (*range(3000), 7)]})
    assert isinstance(prepared, dict)
    assert "oneOf" in prepared


def test_bounds_are_said_with_their_numbers() -> None:
    tagged = [
        {"type": "object", "properties": {"k": {"const": n}}, "required": ["k"]}
        for n in range(MAX_DESCRIBED + 1)
    ]
    assert refusal_of({"oneOf": tagged[:-1]}) is None
    assert f"{MAX_DESCRIBED + 1} branches" in str(refusal_of({"oneOf": tagged}))
    assert f"more than {MAX_VALUES} values" in str(refusal_of({"enum": [1] * MAX_VALUES}))


# ---- the same verdicts as before --------------------------------------------------------------


def differ_pairwise(one: Any, other: Any) -> bool:
    """The plain definition: no common value, no common type, or a tag that both require."""
    left, right = (branch_values(branch) for branch in (one, other))
    if left is not None and right is not None:
        return not any(value == item for value in left for item in right)
    types = [branch_types(branch) for branch in (one, other)]
    if types[0] and types[1] and not types[0] & types[1]:
        return True
    for name in set(one.get("required", ())) & set(other.get("required", ())):
        tags = [branch_values(b.get("properties", {}).get(name) or {}) for b in (one, other)]
        if tags[0] is not None and tags[1] is not None and not any(t in tags[1] for t in tags[0]):
            return types[0] == types[1] == {"object"}
    return False


def branch_values(branch: Any) -> list[Any] | None:
    return [branch["const"]] if "const" in branch else branch.get("enum")


def branch_types(branch: Any) -> set[str]:
    values = branch_values(branch)
    if values is not None:
        return {kind for value in values for kind in types_of(value)}
    kinds = branch.get("type", [])
    types = {kinds} if isinstance(kinds, str) else set(kinds)
    return types | {"number"} if "integer" in types else types


values = st.sampled_from([0, 1, 1.0, True, "a", "b", None, [1], [True], [2], {"k": 1}, {"k": 2}])
constants = st.one_of(
    st.builds(lambda value: {"const": value}, values),
    st.builds(lambda listed: {"enum": listed}, st.lists(values, min_size=1, max_size=3)),
)
described = st.one_of(
    st.builds(lambda kinds: {"type": kinds}, st.lists(st.sampled_from(sorted(TYPES)))),
    st.builds(lambda kind: {"type": kind}, st.sampled_from(sorted(TYPES))),
    st.builds(
        lambda tags, names: {"type": "object", "properties": tags, "required": names},
        st.dictionaries(st.sampled_from("kt"), constants),
        st.lists(st.sampled_from("kt"), unique=True),
    ),
)


@given(st.lists(st.one_of(constants, described), min_size=1, max_size=4))
def test_branches_are_disjoint_where_every_pair_is(branches: list[Any]) -> None:
    expected = all(differ_pairwise(one, other) for one, other in combinations(branches, 2))
    assert are_disjoint(branches, lambda branch: branch or {}, "#") == expected
