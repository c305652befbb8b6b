"""A drafter that reads the large model changes no text, whatever it knows of it.

On random weights, where wide trees have right guesses by chance, and on the shipped pair: greedy
and sampled, in batches, under pre-emption, behind prefix hits, with grammars, escalations and
cascades; with a small model beside it or alone. What it computes for a text depends on the text
alone: not on chunks, prefix hits, pre-emption or the steps that led there.
"""

from dataclasses import replace

import pytest
import torch

from draft.budget import TreeBudget
from draft.config import DraftConfig
from engine.config import EngineConfig
from engine.core import Engine
from engine.request import CascadeParams, EngineRequest, SpeculationParams
from tests.engines import (
    FixedTimes,
    assert_idle,
    heldout_prompts,
    make_engine,
    make_request,
    random_prompt,
    serve,
    shipped_pair,
    shipped_tokenizer,
    texts,
)
from tests.grammars import schema_spec, shipped_compiler
from tests.heads import (
    WIDE,
    TextAndPath,
    head_runner,
    make_head_engine,
    random_head,
    random_pair,
    shipped_head,
    watch_head,
)
from tests.laws.mixed import mixed_requests, plainly, total

BLOCK_SIZE = 4
FEWEST = 38  # see test_preemption.py


@pytest.fixture(scope="module")
def right() -> dict[str, list[int]]:
    """The mixed batch's answers: plain decoding, each request alone."""
    return plainly(random_pair(), mixed_requests())


def accepted(engine: Engine, source: str = "head") -> int:
    return sum(engine.stats().accepted_by_source.get(source, ()))  # type: ignore[call-overload]


@pytest.mark.parametrize("has_small", [False, True])
@pytest.mark.parametrize(
    "draft",
    [
        DraftConfig(),
        pytest.param(WIDE, marks=pytest.mark.slow),
        pytest.param(replace(WIDE, max_catch_up_tokens=7), marks=pytest.mark.slow),
    ],
)
def test_a_head_changes_no_text(
    has_small: bool, draft: DraftConfig, right: dict[str, list[int]]
) -> None:
    engine = make_head_engine(random_pair(), random_head(), has_small=has_small, draft=draft)
    answers = serve(engine, mixed_requests())
    assert texts(answers) == right
    assert accepted(engine) > 0
    assert total(answers, "num_steps") < total(answers, "num_output_tokens")
    assert_idle(engine)


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize(
    ("num_blocks", "head_blocks"),
    [(FEWEST + 10, FEWEST)]
    + [
        pytest.param(*each, marks=pytest.mark.slow) for each in [(FEWEST, 999), (999, 20), (999, 3)]
    ],
)
def test_few_blocks_do_not_matter(
    num_blocks: int, head_blocks: int, prefix_caching: bool, right: dict[str, list[int]]
) -> None:
    engine = make_head_engine(
        random_pair(),
        random_head(),
        draft=DraftConfig(min_path_prob=0.0, max_draft_nodes=24),
        num_blocks=num_blocks,
        head_blocks=head_blocks,
        block_size=BLOCK_SIZE,
        prefix_caching=prefix_caching,
        config=EngineConfig(max_tokens_per_step=64),
    )
    answers = serve(engine, mixed_requests())
    assert texts(answers) == right
    assert (total(answers, "num_preemptions") > 0) == (num_blocks < 999)
    assert_idle(engine)


def conversations(num_turns: int) -> list[list[EngineRequest]]:
    """Turns of four conversations, each behind what was said before."""
    said = {name: random_prompt(21 + 9 * name, seed=name) for name in range(4)}
    turns = []
    for turn in range(num_turns):
        requests = [
            make_request(f"{name}-{turn}", prompt, max_tokens=14, seed=turn, temperature=0.7)
            for name, prompt in said.items()
        ]
        turns.append(requests)
        answers = plainly(random_pair(), requests)
        said = {
            name: (*prompt, *answers[f"{name}-{turn}"], *random_prompt(7, seed=turn))
            for name, prompt in said.items()
        }
    return turns


def test_what_a_head_computes_depends_on_the_text_alone() -> None:
    """Acceptance cannot decay over prefix hits: the same logits as in an engine without a cache."""
    turns = conversations(5)
    alone: dict[TextAndPath, torch.Tensor] = {}
    for request in (request for turn in turns for request in turn):
        engine = make_head_engine(random_pair(), random_head(), prefix_caching=False)
        seen = watch_head(engine)
        serve(engine, [request])
        alone |= seen
    # A cache that is too small for all conversations, and chunks that split their prompts.
    engine = make_head_engine(
        random_pair(),
        random_head(),
        num_blocks=60,
        block_size=BLOCK_SIZE,
        config=EngineConfig(max_tokens_per_step=20),
    )
    seen = watch_head(engine)
    num_cached = num_common = 0
    for turn in turns:
        answers = serve(engine, turn)
        num_cached += total(answers, "num_cached_tokens")
    for tokens, logits in seen.items():
        if tokens in alone:
            num_common += 1
            torch.testing.assert_close(logits, alone[tokens], rtol=1e-3, atol=1e-3)
    assert num_cached > 100
    assert num_common > len(seen) / 2
    assert_idle(engine)


def test_a_grammar_is_followed() -> None:
    schema = schema_spec({"type": "object", "properties": {"a": {"type": "integer"}}})
    stop = shipped_tokenizer().eos_token_id
    requests = [
        replace(
            make_request(
                f"g{number}",
                prompt,
                max_tokens=24,
                seed=number,
                temperature=0.8 * (number % 2),
                stop_token_ids=(stop,),
            ),
            grammar=schema if number % 3 else None,
        )
        for number, prompt in enumerate(heldout_prompts(4))
    ]
    compilers = {"large": shipped_compiler()}
    wanted = texts(
        serve(make_engine(shipped_pair(), speculates=False, grammars=compilers), requests)
    )
    engine = make_head_engine(shipped_pair(), shipped_head(), draft=WIDE, grammars=compilers)
    assert texts(serve(engine, requests)) == wanted
    assert accepted(engine) > 0
    assert_idle(engine)


def test_an_escalated_answer_is_the_large_models_own() -> None:
    requests = [
        make_request(
            f"e{number}", prompt, tier="small", max_tokens=16, seed=number, may_escalate=True,
            temperature=0.7 * (number % 2),
        )
        for number, prompt in enumerate(heldout_prompts(4))
    ]  # fmt: skip
    large = [replace(request, tier="large", may_escalate=False) for request in requests]
    wanted = texts(serve(make_engine(shipped_pair(), speculates=False), large))
    engine = make_head_engine(shipped_pair(), shipped_head(), has_small=True)

    def escalate(number: int, answers: object) -> None:
        if number == 3:
            for request in requests:
                engine.switch_tier(request.request_id, "large")

    assert texts(serve(engine, requests, on_step=escalate)) == wanted
    assert_idle(engine)


def test_a_cascade_is_drafted_by_the_small_model() -> None:
    requests = [
        replace(
            make_request(f"c{number}", prompt, max_tokens=20, seed=number, temperature=0.7),
            cascade=CascadeParams(alpha=0.3) if number % 2 else None,
        )
        for number, prompt in enumerate(heldout_prompts(4))
    ]
    wanted = texts(serve(make_engine(shipped_pair()), requests))
    engine = make_head_engine(shipped_pair(), shipped_head(), has_small=True)
    assert texts(serve(engine, requests)) == wanted
    assert_idle(engine)


def test_a_request_may_leave_the_head_out(right: dict[str, list[int]]) -> None:
    engine = make_head_engine(random_pair(), random_head(), draft=WIDE)
    speculation = SpeculationParams(sources=("suffix", "prediction"))
    assert texts(serve(engine, mixed_requests(speculation=speculation))) == right
    assert not engine.stats().drafted_by_source.get("head")
    assert head_runner(engine).times.num_passes == 0


def test_a_head_that_is_never_right_is_switched_off() -> None:
    """Its levels cost a third of a pass and bring nothing; so does reading for it."""
    target, own = FixedTimes(lambda rows: 0.010 + 0.0002 * rows), FixedTimes(lambda rows: 0.003)
    budget = TreeBudget(target_pass_s=target, draft_pass_s=own, head_pass_s=own)
    engine = make_head_engine(random_pair(), random_head(), budget=budget)
    for number in range(3):
        request = make_request(f"r{number}", random_prompt(9, seed=number), max_tokens=150)
        serve(engine, [request])
    begun = head_runner(engine).times.num_passes
    requests = [
        make_request(f"s{number}", random_prompt(9, seed=number), max_tokens=100)
        for number in range(4)
    ]
    answers = serve(engine, requests)
    num_passes = head_runner(engine).times.num_passes - begun
    assert num_passes < 0.15 * total(answers, "num_steps") / len(requests)
