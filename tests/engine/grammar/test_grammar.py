"""`GrammarState` against brute force, the compiler, and requests that wait for grammars."""

import itertools
import json
import random
import re
import time
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from outrider.engine.errors import InvalidGrammarError, InvalidRequestError
from outrider.engine.events import EngineEvent, Failed, Finished
from outrider.engine.grammar.grammar import GrammarState, TokenGrammar
from outrider.engine.grammar.json_shape import MAX_DEPTH
from outrider.engine.grammar.llguidance_backend import LLGuidanceCompiler
from outrider.engine.queue.grammar_queue import GrammarQueue
from outrider.engine.request import EngineRequest, GrammarSpec
from tests.engine.grammar.compiling import PERSON, allowed_after, compiled
from tests.engines import (
    assert_idle,
    chat_prompt,
    make_engine,
    make_request,
    serve,
    shipped_pair,
    shipped_tokenizer,
    tiny_pair,
)
from tests.grammars import schema_spec, shipped_compiler, shipped_token_bytes, text_of


def state_of(spec: GrammarSpec, num_prompt_tokens: int = 2) -> GrammarState:
    return GrammarState(compiled(spec), num_prompt_tokens=num_prompt_tokens)


def allowed_in(row: torch.Tensor) -> set[int]:
    return set(torch.nonzero(row > -torch.inf).flatten().tolist())


def random_walk(grammar: TokenGrammar, rng: random.Random, length: int) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < length:
        allowed = allowed_after(grammar, tokens)
        if allowed is None:
            break
        tokens.append(rng.choice(sorted(allowed)))
    return tokens


SPECS = {
    "schema": schema_spec(PERSON),
    "json": GrammarSpec(kind="json"),
    "regex": GrammarSpec(kind="regex", text=r"(ab|[0-9]{2,5}){1,4} é+"),
    "choice": GrammarSpec(kind="choice", text='["yes", "yes, sir", "größe", "no\\n\\"x\\""]'),
    "ebnf": GrammarSpec(kind="grammar", text='root ::= "(" root ")" | [a-z]+'),
}


# ---- masks ----------------------------------------------------------------------------------


@pytest.mark.slow_cases
@pytest.mark.parametrize("name", SPECS)
def test_every_row_allows_what_a_fresh_matcher_allows(name: str) -> None:
    grammar = compiled(SPECS[name])
    rng = random.Random(name)
    state = GrammarState(grammar, num_prompt_tokens=2)
    for _ in range(4):
        answer = random_walk(grammar, rng, rng.randrange(12))
        paths = [random_walk(grammar, rng, 30)[len(answer) :] for _ in range(6)]
        paths += [answer[:0], *([path[: rng.randrange(6)] for path in paths])]
        for cut in range(len(answer) + 1):  # the answer grows: states go along
            text = answer[:cut]
            # Continuations that are possible, beginnings of them, and some that are not.
            own = [random_walk_from(grammar, text, rng, rng.randrange(5)) for _ in range(6)]
            tree = [*own, *[path[: rng.randrange(3)] for path in own], [], *paths[:2]]
            logits = torch.randn(len(tree), grammar.vocab_size)
            before = logits.clone()
            state.apply(logits, [7, 7, *text], tree)
            for row, path in enumerate(tree):
                allowed = allowed_after(grammar, text + path)
                if allowed is not None:
                    assert allowed_in(logits[row]) == allowed
                    kept = sorted(allowed)
                    assert torch.equal(logits[row, kept], before[row, kept])


def random_walk_from(
    grammar: TokenGrammar, text: list[int], rng: random.Random, length: int
) -> list[int]:
    path: list[int] = []
    while len(path) < length:
        allowed = allowed_after(grammar, text + path)
        if not allowed:
            break
        path.append(rng.choice(sorted(allowed)))
    return path


def test_an_answer_that_starts_over_is_read_anew() -> None:
    grammar = compiled(SPECS["schema"])
    rng = random.Random(3)
    state = GrammarState(grammar, num_prompt_tokens=1)
    for _ in range(20):
        tokens = random_walk(grammar, rng, rng.randrange(9))
        logits = torch.zeros(1, grammar.vocab_size)
        state.apply(logits, [5, *tokens], [[]])
        allowed = allowed_after(grammar, tokens)
        if allowed is not None:
            assert allowed_in(logits[0]) == allowed


def test_rows_behind_the_end_and_refused_rows_do_not_raise() -> None:
    state = state_of(SPECS["choice"])
    stop = shipped_tokenizer().eos_token_id
    yes = [shipped_token_bytes().index(bytes([byte])) for byte in b"yes"]
    logits = torch.zeros(4, len(shipped_token_bytes()))
    paths = [[*yes, stop], [*yes, stop, 9, 9], [yes[1]], [999_999]]
    state.apply(logits, [1, 1], paths)
    assert allowed_in(logits[0]) == set(range(logits.shape[1]))
    state.apply(logits[:1], [1, 1, *yes, stop], [[]])
    state.apply(logits[:1], [1, 1, *yes, stop, 12], [[3]])
    assert not torch.isnan(logits).any()


@pytest.mark.parametrize("width", [1900, 2048, 2100])
def test_vocabularies_may_be_narrower_or_wider(width: int) -> None:
    grammar = compiled(SPECS["regex"])
    logits = torch.zeros(1, width)
    state_of(SPECS["regex"]).apply(logits, [1, 1], [[]])
    expected = allowed_after(grammar, [])
    assert expected is not None
    assert allowed_in(logits[0]) == {token for token in expected if token < width}


def test_a_vocabulary_that_is_no_multiple_of_a_word() -> None:
    texts = [bytes([byte]) for byte in range(97, 122)] + [b"", b""]  # 27 ids
    compiler = LLGuidanceCompiler(texts, vocab_size=27, stop_token_ids=[26])
    state = GrammarState(
        compiler.compile(GrammarSpec(kind="regex", text="a?")).result(60), num_prompt_tokens=0
    )
    logits = torch.zeros(2, 40)
    state.apply(logits, [], [[], [0]])
    assert allowed_in(logits[0]) == {0, 26}
    assert allowed_in(logits[1]) == {26}
    assert state.forced_tokens([], [0], 5) == [26]


def test_the_grammar_wins_over_rules_that_forbid_all_it_allows() -> None:
    state = state_of(GrammarSpec(kind="regex", text="x"))
    x = shipped_token_bytes().index(b"x")
    stop = shipped_tokenizer().eos_token_id
    logits = torch.zeros(2, len(shipped_token_bytes()))
    logits[:, stop] = -torch.inf  # what min_tokens does
    state.apply(logits, [1, 1], [[x], []])
    assert allowed_in(logits[0]) == {stop}
    assert allowed_in(logits[1]) == {x}


def test_where_a_grammar_gets_stuck_only_the_end_is_possible() -> None:
    state = state_of(GrammarSpec(kind="grammar", text='root ::= "a" x\nx ::= "b" x'))
    a, b = (shipped_token_bytes().index(text) for text in (b"a", b"b"))
    assert state.forced_tokens([1, 1], [a], 3) == [b, b, b]
    stuck = state_of(GrammarSpec(kind="grammar", text='root ::= "a" x\nx ::= x'))
    assert stuck.forced_tokens([1, 1], [a], 3) == [shipped_tokenizer().eos_token_id]


# ---- what the drafter asks ------------------------------------------------------------------


@pytest.mark.slow_cases
@pytest.mark.parametrize("name", SPECS)
def test_forced_tokens_and_valid_tokens_are_those_of_brute_force(name: str) -> None:
    grammar = compiled(SPECS[name])
    state = GrammarState(grammar, num_prompt_tokens=1)
    rng = random.Random(name)
    for _ in range(25):
        walk = random_walk(grammar, rng, 14)
        start = rng.randrange(len(walk) + 1)
        middle = rng.randrange(start, len(walk) + 1)
        text, path, rest = walk[:start], walk[start:middle], walk[middle:]
        wrong = [*rest[: rng.randrange(len(rest) + 1)], rng.randrange(grammar.vocab_size)]
        for tokens in (rest, wrong):
            expected = 0
            while expected < len(tokens):
                allowed = allowed_after(grammar, text + path + tokens[:expected])
                if allowed is None or tokens[expected] not in allowed:
                    break
                expected += 1
            assert state.num_valid([3, *text], path, tokens) == expected
        forced: list[int] = []
        while len(forced) < 6:
            allowed = allowed_after(grammar, text + path + forced)
            if allowed is None or len(allowed) != 1:
                break
            forced += allowed
        assert state.forced_tokens([3, *text], path, 6) == forced
        assert state.forced_tokens([3, *text], path, 2) == forced[:2]


def test_keys_and_constants_are_forced() -> None:
    schema = {"type": "object", "properties": {"kind": {"const": "zzz"}}, "required": ["kind"]}
    state = state_of(schema_spec(schema))
    opening = [shipped_token_bytes().index(text) for text in (b"{", b'"', b"k", b"i")]
    assert state.num_valid([1, 1], [], opening) == 4
    # "n", or a longer token: the text is forced, its tokens need not be.
    assert state.num_valid([1, 1], opening, [shipped_token_bytes().index(b"x")]) == 0


def test_a_tree_costs_one_step_and_one_mask_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = compiled(SPECS["json"])
    rng = random.Random(1)
    paths: list[list[int]] = [[]]
    while len(paths) < 64:
        path = rng.choice(paths[-12:])
        allowed = allowed_after(grammar, path)
        if allowed:
            paths.append([*path, rng.choice(sorted(allowed))])
    paths = [list(path) for path in dict.fromkeys(map(tuple, paths))]
    rng.shuffle(paths)
    counts = {"accept": 0, "fill_mask": 0}
    kind = type(grammar.matcher())
    for name in counts:
        original = getattr(kind, name)

        def counted(self: object, argument: object, _name: str = name, _call=original) -> object:  # type: ignore[no-untyped-def]
            counts[_name] += 1
            return _call(self, argument)

        monkeypatch.setattr(kind, name, counted)
    state = GrammarState(grammar, num_prompt_tokens=1)
    for path in paths:
        state.num_valid([1], [], path)
    drafting = dict(counts)
    logits = torch.zeros(len(paths), grammar.vocab_size)
    state.apply(logits, [1], paths)  # the verifier asks for what the drafter has asked
    assert counts["fill_mask"] <= 2 * len(paths)  # another one behind each way back
    assert counts["accept"] - drafting["accept"] <= len(paths)
    fresh = GrammarState(grammar, num_prompt_tokens=1)
    counts.update(accept=0, fill_mask=0)
    fresh.apply(logits, [1], paths)
    assert counts["fill_mask"] <= 2 * len(paths)  # another one behind each way back
    assert counts["accept"] <= len(paths)


# ---- text -----------------------------------------------------------------------------------


def test_masked_tokens_are_well_formed_text() -> None:
    """Surrogates and overlong forms are in no text."""
    state = state_of(GrammarSpec(kind="json"), num_prompt_tokens=0)
    token = {text: index for index, text in enumerate(shipped_token_bytes()) if len(text) == 1}
    opening = [token[b"{"], token[b'"']]
    for first, good, bad in ((0xED, 0x9F, 0xA0), (0xE0, 0xA0, 0x9F), (0xF4, 0x8F, 0x90)):
        path = [*opening, token[bytes([first])]]
        assert state.num_valid([], path, [token[bytes([good])]]) == 1
        assert state.num_valid([], path, [token[bytes([bad])]]) == 0
    assert bytes([0xC0]) not in token or state.num_valid([], opening, [token[b"\xc0"]]) == 0


def test_special_tokens_are_no_text() -> None:
    tokenizer = shipped_tokenizer()
    state = state_of(GrammarSpec(kind="regex", text=".*"), num_prompt_tokens=0)
    logits = torch.zeros(1, len(shipped_token_bytes()))
    state.apply(logits, [], [[]])
    allowed = allowed_in(logits[0])
    assert tokenizer.eos_token_id in allowed
    others = set(tokenizer.all_special_ids) - {tokenizer.eos_token_id}
    assert others
    assert not allowed & others


@pytest.mark.parametrize(("first", "second"), ["ab", "ba"])
def test_a_mask_behind_what_was_taken_back_is_that_of_a_new_matcher(
    first: str, second: str
) -> None:
    """llguidance takes the last mask for that of another text of the same length."""
    grammar = compiled(
        schema_spec({"properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", 1]}}})
    )
    token = {text: index for index, text in enumerate(shipped_token_bytes()) if len(text) == 1}
    matcher = grammar.matcher()
    mask = np.zeros(-(-grammar.vocab_size // 32), dtype=np.int32)
    for name in (first, second):
        tokens = [token[bytes([byte])] for byte in f'{{"{name}": '.encode()]
        assert all(map(matcher.accept, tokens))
        matcher.fill_mask(mask)
        assert set_bits(mask) == allowed_after(grammar, tokens)
        matcher.rollback(len(tokens))


def set_bits(mask: NDArray[np.int32]) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


# ---- the compiler ---------------------------------------------------------------------------

NESTED_ARRAYS = '{"type":"array","items":' * 10_000 + "{}" + "}" * 10_000

CHAIN = "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(4000)) + 'r4000: "a"\n'

INVALID = {
    "type": (schema_spec({"type": "banana"}), "banana"),
    "not JSON": (GrammarSpec(kind="json_schema", text="{"), "not valid JSON"),
    "no schema": (GrammarSpec(kind="json_schema", text="3"), "an object or a boolean"),
    "dangling": (schema_spec({"$ref": "#/$defs/x"}), "does not exist"),
    "remote": (schema_spec({"$ref": "http://x/y"}), "not present"),
    "itself": (schema_spec({"$ref": "#"}), "no text conforms"),
    "circle": (
        schema_spec({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
        "no text",
    ),
    "not": (schema_spec({"not": {"type": "string"}}), 'not supported in structured output: "not"'),
    "unique": (schema_spec({"type": "array", "uniqueItems": True}), "uniqueItems"),
    "if": (schema_spec({"if": {"const": 1}, "then": {"const": 2}}), '"if"'),
    "allOf": (schema_spec({"allOf": [{"type": "string"}, {"type": "null"}]}), "incompatible"),
    "oneOf": (schema_spec({"oneOf": [{"type": "integer"}, {"type": "number"}]}), "use anyOf"),
    "lengths": (
        schema_spec({"type": "string", "pattern": "^abc$", "maxLength": 2}),
        "no text",
    ),
    "bounds": (
        schema_spec({"type": "integer", "minimum": 5, "maximum": 3}),
        "greater than",
    ),
    "pattern": (schema_spec({"type": "string", "pattern": "("}), "unclosed"),
    "multiple": (schema_spec({"type": "integer", "multipleOf": 10**6}), "at most 1000"),
    "enum": (schema_spec({"type": "string", "enum": [1]}), "incompatible types"),
    "regex": (GrammarSpec(kind="regex", text="(a"), "unclosed group"),
    "backreference": (GrammarSpec(kind="regex", text=r"(a)\1"), "backreferences are not"),
    "ebnf": (GrammarSpec(kind="grammar", text='root ::= "a" b'), "Rule 'b' not found"),
    "loop": (GrammarSpec(kind="grammar", text="root ::= root"), "no text conforms"),
    "no choice": (GrammarSpec(kind="choice", text="[]"), "at least one"),
    "parts": (GrammarSpec(kind="parts", text='{"type":"nothing"}'), "is no type"),
    "no part": (GrammarSpec(kind="parts", text='{"type":"sequence"}'), "no grammar: KeyError"),
    "deep": (
        GrammarSpec(kind="grammar", text="root ::= " + "(" * 9000 + '"a"' + ")" * 9000),
        "recursion",
    ),
    "deep Lark": (
        GrammarSpec(kind="grammar", text="start: " + "(" * 999 + '"a"' + ")" * 999),
        "deep",
    ),
    "deep regex": (
        GrammarSpec(kind="regex", text="(" * 9000 + "a" + ")" * 9000),
        "over 200",
    ),
    "chain": (GrammarSpec(kind="grammar", text=CHAIN), "the compiler failed on it"),
    "surrogate": (GrammarSpec(kind="regex", text="\ud800"), "surrogates"),
    "beyond depth": (
        GrammarSpec(kind="json_schema", text=NESTED_ARRAYS[24 * 8000 : -8000]),
        "nested",
    ),
}


@pytest.mark.parametrize("name", INVALID)
def test_unenforceable_grammars_are_refused_with_the_reason(name: str) -> None:
    spec, reason = INVALID[name]
    with pytest.raises(InvalidGrammarError, match=reason) as caught:
        shipped_compiler().compile(spec).result(20)
    assert "no_forcing" not in str(caught.value)


def test_ten_thousand_levels_do_no_harm() -> None:
    """Over the size limit as a request; past it the compiler stands it too."""
    with pytest.raises(ValueError, match="over the limit"):
        GrammarSpec(kind="json_schema", text=NESTED_ARRAYS)
    spec = GrammarSpec(kind="json_schema")
    object.__setattr__(spec, "text", NESTED_ARRAYS)
    with pytest.raises(InvalidGrammarError, match="nested"):
        shipped_compiler().compile(spec).result(20)


@pytest.mark.parametrize(
    "spec",
    [
        GrammarSpec(kind="regex", text="(a*)*(a*)*(a+)+b"),
        GrammarSpec(kind="regex", text="(((a{100}){100}){100}){100}"),
        GrammarSpec(kind="grammar", text='root ::= root root | "a" | ""'),
        schema_spec({"type": "array", "minItems": 100_000, "items": {"type": "null"}}),
        schema_spec({"type": "string", "maxLength": 1_000_000}),
        schema_spec({"type": "object", "properties": {"a": {"$ref": "#"}}}),
        GrammarSpec(
            kind="json_schema",
            text='{"type":"array","items":' * (MAX_DEPTH - 1) + "{}" + "}" * (MAX_DEPTH - 1),
        ),
    ],
)
def test_grammars_that_explode_in_other_backends_compile_and_answer_quickly(
    spec: GrammarSpec,
) -> None:
    state = state_of(spec)
    path: list[int] = []
    started_s = time.monotonic()
    for _ in range(40):
        logits = torch.zeros(1, len(shipped_token_bytes()))
        state.apply(logits, [1, 1, *path], [[]])
        path.append(max(allowed_in(logits[0])))
    assert time.monotonic() - started_s < 5


@pytest.mark.slow
def test_compiled_grammars_are_kept_and_failures_too() -> None:
    compiler = LLGuidanceCompiler(
        shipped_token_bytes(), vocab_size=2048, stop_token_ids=[shipped_tokenizer().eos_token_id]
    )
    spec = GrammarSpec(kind="regex", text="abc")
    first = compiler.compile(spec)
    assert compiler.compile(GrammarSpec(kind="regex", text="abc")) is first
    first.result(20)
    for number in range(300):
        compiler.compile(GrammarSpec(kind="regex", text=f"a{number}")).result(20)
    assert compiler.compile(spec) is not first  # the least recently used went
    assert len(compiler._cache) <= 128


# ---- requests that wait for their grammar ---------------------------------------------------


class SlowCompiler:
    """Hands out futures that the test resolves."""

    def __init__(self) -> None:
        self.futures: list[Future[TokenGrammar]] = []

    def compile(
        self, spec: GrammarSpec, *, salt: str = "", tenant: str = ""
    ) -> "Future[TokenGrammar]":
        self.futures.append(Future())
        return self.futures[-1]


def with_grammar(request: EngineRequest, spec: GrammarSpec = SPECS["choice"]) -> EngineRequest:
    return replace(request, grammar=spec)


@pytest.fixture
def slow() -> SlowCompiler:
    return SlowCompiler()


@pytest.mark.slow
def test_without_a_compiler_a_grammar_is_refused() -> None:
    engine = make_engine(tiny_pair())
    with pytest.raises(InvalidRequestError, match="structured output is not available"):
        engine.submit(with_grammar(make_request("a", [3, 4])))
    assert_idle(engine)


def test_other_requests_continue_while_a_grammar_compiles(slow: SlowCompiler) -> None:
    engine = make_engine(shipped_pair(), grammars={"large": slow})
    engine.submit(with_grammar(make_request("slow", chat_prompt("hi"), max_tokens=30)))
    assert engine.has_work
    answers = serve_some(engine, [make_request("free", chat_prompt("hi"), max_tokens=9)])
    assert [type(event) for event in answers if event.request_id == "free"][-1] is Finished
    assert engine.has_work
    assert engine.stats().tiers["large"].num_waiting == 1
    slow.futures[0].set_result(compiled(SPECS["choice"]))
    answers = serve(engine, [])
    text = text_of(answers["slow"].token_ids)
    assert text in json.loads(SPECS["choice"].text)
    assert_idle(engine)


def serve_some(engine: object, requests: list[EngineRequest]) -> list[EngineEvent]:
    events: list[EngineEvent] = []
    for request in requests:
        engine.submit(request)  # type: ignore[attr-defined]
    wanted = {request.request_id for request in requests}
    while wanted:
        for event in engine.step():  # type: ignore[attr-defined]
            events.append(event)
            if isinstance(event, Finished | Failed):
                wanted.discard(event.request_id)
    return events


def test_an_engine_that_only_waits_does_not_spin(slow: SlowCompiler) -> None:
    engine = make_engine(tiny_pair(), grammars={"large": slow})
    engine.submit(with_grammar(make_request("a", [3, 4])))
    engine.step()
    started_s = time.monotonic()
    num_steps = 0
    while time.monotonic() - started_s < 0.2:
        assert engine.step() == []
        num_steps += 1
    assert num_steps < 100
    engine.abort("a")
    engine.step()
    assert_idle(engine)


def test_an_abort_while_compiling_leaves_nothing(slow: SlowCompiler) -> None:
    engine = make_engine(tiny_pair(), grammars={"large": slow})
    engine.submit(with_grammar(make_request("a", [3, 4])))
    engine.step()
    engine.abort("a")
    events = engine.step()
    assert [(type(e), e.request_id) for e in events] == [(Finished, "a")]
    assert slow.futures[0].cancelled()  # nothing is compiled for it any more
    assert engine.step() == []
    assert_idle(engine)
    engine.submit(make_request("a", [3, 4], max_tokens=2))  # the id is free again
    serve(engine, [])


def test_a_switch_while_compiling_waits_on_the_other_tier(slow: SlowCompiler) -> None:
    engine = make_engine(shipped_pair(), grammars={"small": slow, "large": slow})
    engine.submit(with_grammar(make_request("a", chat_prompt("hi"), tier="small")))
    engine.switch_tier("a", "large")
    slow.futures[0].set_result(compiled(SPECS["choice"]))
    answers = serve(engine, [])
    assert answers["a"].finished is not None
    assert answers["a"].finished.tier == "large"
    assert text_of(answers["a"].token_ids) in json.loads(SPECS["choice"].text)
    assert_idle(engine)


def test_an_invalid_grammar_ends_the_request_with_the_reason() -> None:
    engine = make_engine(tiny_pair(vocab_size=2048), grammars={"large": shipped_compiler()})
    request = make_request("a", [3, 4])
    events = serve_some(engine, [with_grammar(request, INVALID["ebnf"][0])])
    (failed,) = events
    assert isinstance(failed, Failed)
    assert failed.code == "invalid_grammar"
    assert "Rule 'b' not found" in failed.message
    assert_idle(engine)


def test_compiling_for_too_long_ends_the_request(slow: SlowCompiler) -> None:
    now_s = 0.0
    queue = GrammarQueue({"large": slow}, timeout_s=20.0, clock=lambda: now_s)
    engine = make_engine(tiny_pair(), grammars={"large": slow})
    engine._preparation.grammars = queue
    engine.submit(with_grammar(make_request("a", [3, 4])))
    now_s = 19.0
    assert engine.step() == []
    now_s = 21.0
    (failed,) = engine.step()
    assert isinstance(failed, Failed)
    assert "took more than 20 s" in failed.message
    assert_idle(engine)


# ---- patterns -------------------------------------------------------------------------------

PATTERNS = (
    "^(ab+)?$",
    "^(b|b{0,2})$",
    "^((a){1,2}|a)b$",
    "^(a-)?b+$",
    '^[^a"]{1,2}$',
    r'^a"\\$',
    "^(aa+){1,2}([ab]{1,2}|[ab])$",
    "a|b",
)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_matches_what_it_says(pattern: str) -> None:
    state = state_of(schema_spec({"type": "string", "pattern": pattern}), num_prompt_tokens=0)
    token = {text: index for index, text in enumerate(shipped_token_bytes()) if len(text) == 1}
    stop = shipped_tokenizer().eos_token_id
    num_matching = 0
    for length in range(6):
        for letters in itertools.product('ab-"\\', repeat=min(length, 6)):
            text = "".join(letters)
            if length > 3 and set(text) - {"a", "b"}:
                continue
            tokens = [token[bytes([byte])] for byte in json.dumps(text).encode()] + [stop]
            does = state.num_valid([], [], tokens) == len(tokens)
            assert does == bool(re.search(pattern, text)), text
            num_matching += does
    assert num_matching


def test_names_beside_patterns_keep_their_letters() -> None:
    """Others than ASCII, and digits behind them."""
    schema = {
        "type": "object",
        "properties": {
            "größe": {"enum": ["漢ß1", "ßa"]},
            "x": {"type": "string", "pattern": "^é1$"},
        },
        "required": ["größe", "x"],
    }
    state = state_of(schema_spec(schema), num_prompt_tokens=0)
    token = {text: index for index, text in enumerate(shipped_token_bytes()) if len(text) == 1}
    for value in ("漢ß1", "ßa"):
        text = json.dumps({"größe": value, "x": "é1"}, ensure_ascii=False)
        tokens = [token[bytes([byte])] for byte in text.encode()]
        assert state.num_valid([], [], tokens) == len(tokens)
