"""Under a grammar every finished answer conforms; speculation, batch and blocks change nothing.

The shipped pair answers under random schemas. Most prompts have nothing to do with the schema, so
the grammar has to steer nearly every token.
"""

import json
import random
from dataclasses import replace

import jsonschema_rs
import pytest

from benchmarks.chaos.fuzzed_schemas import random_schema
from outrider.engine.grammar.grammar import GrammarCompiler
from outrider.engine.request import EngineRequest, GrammarSpec
from outrider.verifier.params import Tier
from tests.engines import (
    Answer,
    assert_idle,
    heldout_prompts,
    make_engine,
    make_request,
    scripted_drafter,
    serve,
    shipped_pair,
    shipped_tokenizer,
)
from tests.grammars import schema_spec, shipped_compiler, text_of
from tests.laws.same_answers import (
    ACCEPTING,
    Served,
    Way,
    assert_same_answers,
    by,
    plainly,
)
from tests.sizes import repeats

COMPILERS: dict[Tier, GrammarCompiler] = {"large": shipped_compiler(), "small": shipped_compiler()}
SAMPLINGS: tuple[dict[str, float], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.5, "top_k": 30},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.02, "presence_penalty": 1.0},
    {"temperature": 0.0, "frequency_penalty": 0.7},
)
BATCH = 10


def answer_text(answer: Answer) -> str:
    stop = shipped_tokenizer().eos_token_id
    assert answer.token_ids[-1] == stop
    return text_of(answer.token_ids[:-1])


# ---- conformance ----------------------------------------------------------------------------


def conforming_share(count: int, seed: int) -> float:
    """Runs `count` schemas in batches; returns the share that ended within their tokens."""
    rng = random.Random(seed)
    prompts = heldout_prompts(40)
    schemas = [random_schema(rng) for _ in range(count)]
    num_finished = num_drafted = num_accepted = 0
    for start in range(0, count, BATCH):
        engine = make_engine(shipped_pair(), grammars=COMPILERS)
        requests = [
            replace(
                make_request(
                    str(number),
                    prompts[number % len(prompts)],
                    max_tokens=140,
                    seed=number,
                    tier="small" if number % 7 == 3 else "large",
                    **SAMPLINGS[number % len(SAMPLINGS)],
                ),
                grammar=schema_spec(schemas[number]),
            )
            for number in range(start, min(start + BATCH, count))
        ]
        answers = serve(engine, requests)
        assert_idle(engine)
        for request_id, answer in answers.items():
            num_drafted += answer.stats.num_drafted_tokens
            num_accepted += answer.stats.num_accepted_tokens
            if answer.finish_reason != "stop":
                continue
            num_finished += 1
            schema, text = schemas[int(request_id)], answer_text(answer)
            found = list(jsonschema_rs.validator_for(schema).iter_errors(json.loads(text)))
            assert not found, (schema, text, found[0].message)
    assert 0 < num_accepted <= num_drafted  # speculation stayed on
    return num_finished / count


@pytest.mark.slow
def test_answers_conform_to_random_schemas() -> None:
    assert conforming_share(repeats(30, 12), seed=11) > 0.6


@pytest.mark.long
def test_answers_conform_to_300_random_schemas() -> None:
    assert conforming_share(300, seed=12) > 0.6


# ---- the same text --------------------------------------------------------------------------


SPECS = (
    GrammarSpec(kind="json"),
    schema_spec(
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 12},
                "tags": {"type": "array", "items": {"enum": ["red", "größe"]}, "maxItems": 2},
                "age": {"anyOf": [{"type": "integer", "maximum": 99}, {"type": "null"}]},
            },
            "required": ["name", "tags", "age"],
        }
    ),
    GrammarSpec(kind="regex", text=r"The answer is -?\d{1,4}( or \d{1,4}){0,2}\."),
    GrammarSpec(kind="choice", text='["yes", "no", "I do not know."]'),
    GrammarSpec(kind="grammar", text='root ::= item ("; " item){0,4}\nitem ::= [A-Z] [a-z ]{3,12}'),
)


def requests_under_grammars() -> list[EngineRequest]:
    return [
        replace(
            make_request(
                f"g{number}",
                prompt,
                max_tokens=30,
                seed=number,
                **SAMPLINGS[number % len(SAMPLINGS)],
            ),
            grammar=SPECS[number % len(SPECS)],
        )
        for number, prompt in enumerate(heldout_prompts(len(SPECS) * 3))
    ]


def assert_same(vary: Way) -> Served:
    """Each request alone, token by token, is right."""
    vary = by(grammars=COMPILERS) | vary
    return assert_same_answers(requests_under_grammars(), of=shipped_pair(), vary=vary)


@pytest.mark.slow
def test_speculation_and_the_batch_change_nothing() -> None:
    served = assert_same(ACCEPTING)
    assert len({tuple(answer.token_ids) for answer in served.answers.values()}) > 10
    assert served.total("num_steps") < served.total("num_output_tokens")


@pytest.mark.slow
def test_pre_emption_changes_nothing() -> None:
    few = by(block_size=4, large_blocks=32, small_blocks=32)
    assert_same(few | Way(shows=("num_preemptions",)))


@pytest.mark.slow
@pytest.mark.parametrize("chance_right", [0.0, 0.6])
def test_trees_of_any_tokens_change_nothing(chance_right: float) -> None:
    """Nodes that the grammar refuses are in these trees too."""
    right = plainly(shipped_pair(), requests_under_grammars())
    drafter = scripted_drafter(right, chance_right=chance_right, vocab_size=2048, num_levels=5)
    accepted = assert_same(by(drafter=drafter)).total("num_accepted_tokens")
    assert accepted > 0 if chance_right else accepted < 20


def test_a_switch_of_tiers_starts_the_grammar_over() -> None:
    (request,) = [r for r in requests_under_grammars() if r.request_id == "g0"]  # greedy
    small = replace(request, tier="small", may_escalate=True)
    vary = by(grammars=COMPILERS) | Way(escalate=lambda _: 2)
    served = assert_same_answers([small], of=shipped_pair(), vary=vary)
    assert served.answers["g0"].switches
