"""The drafter inside an engine: what it asks of the small model, and when it holds back."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from outrider.draft.budget.budget import TreeBudget
from outrider.draft.config import DraftConfig
from outrider.draft.tree_drafter import TreeDrafter
from outrider.engine.config import EngineConfig
from outrider.engine.passes.runner import ForwardSlice, ModelRunner
from outrider.engine.protocols import DraftLogits, LargeWork, Proposal
from outrider.engine.request import SpeculationParams
from outrider.engine.sequences.sequence import Sequence
from outrider.verifier.noise import SequenceNoise
from outrider.verifier.params import CascadeParams, Source
from tests.engines import (
    Answer,
    FixedTimes,
    Pair,
    assert_idle,
    drafter_of,
    engine_model,
    finish,
    fixed_budget,
    make_engine,
    make_request,
    random_prompt,
    serve,
    step_once,
    texts,
    tiny_pair,
    twins,
    watch_small_rows,
)
from tests.laws.same_answers import Way, assert_same_answers, by, plainly
from tests.models import make_hf_model

MODEL: tuple[Source, ...] = ("model",)


# ---- what is drafted -----------------------------------------------------------------------


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"temperature": 1.3},
        {"temperature": 0.9, "top_k": 12, "top_p": 0.8, "min_p": 0.02},
    ],
)
def test_a_drafter_as_good_as_the_target_is_always_right(sampling: dict[str, float]) -> None:
    """Same weights, same noise, same positions, same truncation: every first guess is accepted."""
    chain = DraftConfig(
        sources=MODEL, max_branching=1, max_frontier=1, max_draft_depth=5, min_path_prob=0.0
    )
    engine = make_engine(twins(), draft=chain)
    requests = [
        make_request(str(n), random_prompt(7 * n + 1, seed=n), max_tokens=37, seed=n, **sampling)
        for n in range(3)
    ]
    for answer in serve(engine, requests).values():
        assert [len(event.token_ids) for event in answer.emitted] == [1, *[6] * 6]
        assert answer.stats.num_accepted_tokens == answer.stats.num_drafted_tokens == 30


def test_the_likeliest_paths_fill_the_nodes() -> None:
    config = DraftConfig(
        sources=MODEL, max_draft_nodes=11, max_branching=5, max_frontier=5, min_path_prob=0.0
    )
    engine = make_engine(tiny_pair(), draft=config)
    answer = serve(engine, [make_request("r", random_prompt(9), max_tokens=40)])["r"]
    drafted = [event.num_drafted_tokens for event in answer.emitted]
    assert drafted[0] == 0  # the prefill's own token
    assert set(drafted[1:-1]) == {11}


@pytest.mark.slow_cases
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_a_step_has_at_most_as_many_draft_passes_as_levels(depth: int) -> None:
    config = DraftConfig(sources=MODEL, max_draft_depth=depth, max_frontier=1, min_path_prob=0.0)
    engine = make_engine(tiny_pair(), draft=config)
    passes, target = engine._runners["small"].times, engine._runners["large"].times
    serve(engine, [make_request("r", random_prompt(9), max_tokens=40)])
    assert 0 < passes.num_passes <= depth * (target.num_passes - 1)


def test_nothing_is_drafted_for_the_last_token() -> None:
    """It comes from the target itself, so its draft would be thrown away."""
    engine = make_engine(tiny_pair())
    rows = watch_small_rows(engine)
    answers = serve(engine, [make_request(str(n), random_prompt(9), max_tokens=n) for n in (1, 2)])
    assert rows == []
    assert [len(answers[str(n)].token_ids) for n in (1, 2)] == [1, 2]


@pytest.mark.parametrize(
    "speculation",
    [SpeculationParams(max_draft_nodes=0), SpeculationParams(max_draft_depth=0),
     SpeculationParams(enabled=False)],
)  # fmt: skip
def test_a_request_without_drafts_costs_no_small_pass(speculation: SpeculationParams) -> None:
    engine = make_engine(tiny_pair())
    rows = watch_small_rows(engine)
    serve(engine, [make_request("r", random_prompt(9), speculation=speculation)])
    assert rows == []


@pytest.mark.parametrize(
    "config",
    [DraftConfig(sources=MODEL, max_draft_nodes=0), DraftConfig(sources=MODEL, max_draft_depth=0)],
)
def test_a_drafter_can_be_set_to_nothing(config: DraftConfig) -> None:
    engine = make_engine(tiny_pair(), draft=config)
    rows = watch_small_rows(engine)
    assert len(serve(engine, [make_request("r", random_prompt(9))])["r"].token_ids) == 24
    assert rows == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_draft_nodes", 256), ("max_draft_nodes", -1), ("max_draft_depth", 256),
        ("max_branching", 0), ("max_frontier", 65), ("min_path_prob", 1.0), ("min_path_prob", -0.1),
    ],
)  # fmt: skip
def test_a_config_out_of_range_names_the_field(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name}={value}"):
        DraftConfig(**{name: value})


# ---- catching up ---------------------------------------------------------------------------


@pytest.mark.slow
def test_a_long_prompt_is_taken_in_by_chunks() -> None:
    engine = make_engine(tiny_pair(), draft=DraftConfig(sources=MODEL, max_catch_up_tokens=20))
    rows = watch_small_rows(engine)
    request = make_request("r", random_prompt(90), max_tokens=60, temperature=0.8)
    answer = serve(engine, [request])["r"]
    assert rows[:4] == [20] * 4  # no tree yet, a chunk a step
    assert max(rows) <= 20
    drafted = [event.num_drafted_tokens for event in answer.emitted]
    assert drafted[:5] == [0] * 5
    assert min(drafted[5:-1]) > 0
    assert texts({"r": answer}) == texts(serve(make_engine(tiny_pair()), [request]))


def test_the_small_model_computes_nothing_twice() -> None:
    """Rows of small passes: the prompt, then per step the root and what the tree expanded."""
    chain = DraftConfig(
        sources=MODEL, max_branching=1, max_frontier=1, max_draft_depth=3, min_path_prob=0.0
    )
    engine = make_engine(twins(), draft=chain)
    rows = watch_small_rows(engine)
    serve(engine, [make_request("r", random_prompt(30), max_tokens=41)])
    # The chain's last node is accepted but was never computed, so two rows catch up.
    assert rows == [31, 1, 1, *[2, 1, 1] * 9]


# ---- blocks --------------------------------------------------------------------------------


@pytest.mark.slow
def test_reclaiming_takes_the_latest_views_and_no_more_than_needed() -> None:
    engine = make_engine(tiny_pair(), block_size=4, prefix_caching=False)
    drafter, pool = drafter_of(engine), engine._runners["small"].pool
    for number in range(3):
        engine.submit(make_request(str(number), random_prompt(20, seed=number), max_tokens=60))
    answers: dict[str, Answer] = {}
    for _ in range(3):
        step_once(engine, answers)
    free = pool.num_available
    drafter.reclaim(0)
    assert pool.num_available == free
    drafter.reclaim(1)
    assert [state.view is None for state in drafter._states.values()] == [False, False, True]
    drafter.reclaim(5)
    assert [state.view is None for state in drafter._states.values()] == [False, True, True]
    drafter.reclaim(10_000)
    assert pool.num_used == 0
    finish(engine, answers)
    assert_idle(engine)
    assert all(answer.emitted[-2].num_drafted_tokens > 0 for answer in answers.values())


def test_releasing_an_unknown_sequence_does_nothing() -> None:
    engine = make_engine(tiny_pair())
    engine.submit(make_request("r", random_prompt(9)))
    (sequence,) = engine._sequences.values()
    drafter_of(engine).release(sequence)
    engine.abort("r")


@pytest.mark.slow
def test_too_few_small_blocks_mean_no_drafts_and_no_harm() -> None:
    request = make_request("r", random_prompt(40), max_tokens=30, temperature=0.8)
    for small_blocks, drafts in ((1, False), (9, False), (13, True), (18, True)):
        served = assert_same_answers([request], vary=by(block_size=4, small_blocks=small_blocks))
        assert (served.total("num_drafted_tokens") > 0) == drafts


# ---- models that do not match -----------------------------------------------------------------


def mismatched(**small: Any) -> Pair:
    """The tiny pair's large model and a small one of another shape and with nothing in common."""
    large = tiny_pair()
    small_reference = make_hf_model("llama3", seed=2, num_hidden_layers=1, **small)
    return Pair(
        large=large.large,
        small=engine_model(small_reference),
        large_reference=large.large_reference,
        small_reference=small_reference,
    )


@pytest.mark.slow_cases
@pytest.mark.parametrize("num_prompt", [20, 63, 64, 65, 100])
def test_beyond_the_small_models_context_nothing_is_drafted(num_prompt: int) -> None:
    pair = mismatched(max_position_embeddings=64)
    request = make_request("r", random_prompt(num_prompt), max_tokens=80, temperature=0.8)
    vary = by(draft=DraftConfig(sources=MODEL))
    answer = assert_same_answers([request], of=pair, vary=vary).answers["r"]
    place = num_prompt
    for event in answer.emitted:
        if place > 64:
            assert event.num_drafted_tokens == 0
        place += len(event.token_ids)
    assert (answer.stats.num_drafted_tokens > 0) == (num_prompt < 63)


@pytest.mark.slow
@pytest.mark.parametrize("vocab_size", [90, 129, 140, 300])
def test_vocabularies_of_different_width_do_no_harm(vocab_size: int) -> None:
    """Padded to different multiples, as in families whose sizes share a tokenizer."""
    pair = mismatched(vocab_size=vocab_size)
    requests = [
        make_request(
            str(n), random_prompt(20, seed=n, vocab_size=80), max_tokens=40, temperature=1.3, seed=n
        )
        for n in range(4)
    ]
    answers = assert_same_answers(requests, of=pair).answers
    if vocab_size < 131:  # the target says what the drafter cannot read
        assert any(max(answer.token_ids) >= vocab_size for answer in answers.values())
    escalated = [replace(each, tier="small", may_escalate=True) for each in requests]
    assert_same_answers(escalated, of=pair, vary=Way(escalate=lambda _: 20))


# ---- the budget -----------------------------------------------------------------------------


@pytest.mark.slow
def test_a_spell_of_bad_guesses_does_not_end_drafting_for_good() -> None:
    """The estimate of acceptance is learnt from drafts, so some have to be made."""
    pair = mismatched()  # a stranger's guesses are wrong at temperature 0
    # A clock that stands still: steps are not compared by it.
    engine = make_engine(pair, budget=fixed_budget(draft=0.2), drafter_clock=lambda: 0.0)
    requests = [make_request(str(n), random_prompt(9, seed=n), max_tokens=120) for n in range(3)]
    drafted = [
        event.num_drafted_tokens > 0
        for request in requests
        for event in serve(engine, [request])[request.request_id].emitted
    ]
    last = drafted[-100:]
    assert 0 < sum(last) < 30  # now and then, and seldom


# ---- urgency --------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_request_behind_its_pace_gets_more_of_the_nodes() -> None:
    """Two like sequences, rows for few nodes: the one in a hurry has most of them."""
    pair = tiny_pair()
    budget = TreeBudget(
        target_pass_s=FixedTimes(lambda rows: 1.0 if rows <= 8 else float(rows)),
        draft_pass_s=FixedTimes(lambda rows: 0.01),
    )
    engine = make_engine(pair, budget=budget, draft=DraftConfig(sources=MODEL))
    requests = [
        make_request(
            name,
            random_prompt(20, seed=seed),
            max_tokens=80,
            speculation=SpeculationParams(inter_token_s=inter_token_s),
        )
        for name, seed, inter_token_s in (("hurried", 1, 1e-9), ("patient", 2, 1e9))
    ]
    answers = serve(engine, requests)
    assert texts(answers) == plainly(pair, requests)
    steps = {name: answer.stats.num_steps for name, answer in answers.items()}
    hurried = answers["hurried"].emitted[1 : steps["hurried"] - 1]
    patient = answers["patient"].emitted[1 : len(hurried) + 1]
    drafted = [sum(event.num_drafted_tokens for event in own) for own in (hurried, patient)]
    assert drafted[0] > 2 * drafted[1]


# ---- cascades -------------------------------------------------------------------------------


@pytest.mark.parametrize("enabled", [True, False])
def test_a_cascade_always_knows_the_small_models_view_of_the_root(enabled: bool) -> None:
    """Whatever the budget and the request say about drafting."""
    pair = tiny_pair()
    runner = ModelRunner(model=pair.small, num_blocks=128)
    never = fixed_budget(target=0.0, row=1.0, draft=100.0)
    drafter = TreeDrafter(runner=runner, budget=never)
    large = ModelRunner(model=pair.large, num_blocks=128)
    prompt = random_prompt(20)
    request = replace(
        make_request("r", prompt, speculation=SpeculationParams(enabled=enabled)),
        cascade=CascadeParams(alpha=0.1),
    )
    sequence = Sequence(
        request=request,
        tier="large",
        view=large.new_view(""),
        noise=SequenceNoise(request.sampling, "large", vocab_size=131),
        submitted_s=0.0,
        token_ids=[*prompt, 5, 6],
    )
    proposal = drafter.propose([sequence])
    slices = next(proposal).slices
    assert sum(len(piece.token_ids) for piece in slices) == 22
    output = runner.forward(slices)
    with pytest.raises(StopIteration) as stopped:
        proposal.send(DraftLogits(of_slices=output.logits))
    (tree,) = stopped.value.value.host.values()
    assert torch.equal(tree.draft_logits[0], output.logits[0])
    assert len(tree.draft_logits) == tree.num_nodes
    assert tree.num_draft_nodes == 0 or enabled


def run(proposal: Proposal, runner: ModelRunner) -> tuple[int, int]:
    """Run the passes that a proposal wants; return how many, and the guesses of its trees."""
    number = 0
    try:
        wanted = next(proposal)
        while True:
            number += 1
            logits = runner.forward(wanted.slices).logits
            wanted = proposal.send(DraftLogits(of_slices=logits))
    except StopIteration as end:
        return number, sum(tree.num_draft_nodes for tree in end.value.host.values())


def test_a_request_that_waited_enough_for_the_guesses_of_others_gets_plain_steps() -> None:
    """It wants none of its own, so nothing pays it for a step that lasts longer."""
    pair = tiny_pair()
    budget = fixed_budget()
    large = ModelRunner(model=pair.large, num_blocks=128)
    small = ModelRunner(model=pair.small, num_blocks=128)
    drafter = TreeDrafter(runner=small, budget=budget)
    first, other = (
        Sequence(
            request=make_request(name, random_prompt(20)),
            tier="large",
            view=large.new_view(name),
            noise=SequenceNoise(make_request(name, ()).sampling, "large", vocab_size=131),
            submitted_s=0.0,
            token_ids=[*random_prompt(20), 5],
        )
        for name in ("first", "other")
    )
    large_work = LargeWork(streams=[other])
    plain_s = budget.target_pass_s(2)
    waits = []  # beyond plain steps, in plain steps
    for _ in range(12):
        passes, guesses = run(drafter.propose([first], large_work=large_work), small)
        step_s = budget.target_pass_s(2 + guesses) + passes * budget.draft_pass_s(1)
        waits.append(step_s / plain_s - 1.0)
        for sequence in (first, other):
            sequence.token_ids.append(6)
            sequence.num_steps += 1
    assert waits[0] > 0
    # 1.5 % and one and a quarter plain steps, and no more than the step that crosses it.
    assert sum(waits) <= 0.015 * 12 + 1.25 + max(waits)


def test_every_node_that_the_small_model_computed_keeps_its_logits() -> None:
    pair = tiny_pair()
    runner = ModelRunner(model=pair.small, num_blocks=128)
    drafter = TreeDrafter(runner=runner)
    prompt = random_prompt(20)
    request = replace(make_request("r", prompt), cascade=CascadeParams(alpha=0.1))
    sequence = Sequence(
        request=request,
        tier="large",
        view=ModelRunner(model=pair.large, num_blocks=8).new_view(""),
        noise=SequenceNoise(request.sampling, "large", vocab_size=131),
        submitted_s=0.0,
        token_ids=[*prompt, 5],
    )
    proposal = drafter.propose([sequence])
    wanted = next(proposal)
    try:
        while True:
            logits = runner.forward(wanted.slices).logits
            wanted = proposal.send(DraftLogits(of_slices=logits))
    except StopIteration as stopped:
        (tree,) = stopped.value.host.values()
    known = [logits is not None for logits in tree.draft_logits]
    assert known[0]
    assert 5 < sum(known) < tree.num_nodes
    for node, path in enumerate(tree.paths):
        kept = tree.draft_logits[node]
        if kept is not None:
            view = runner.new_view("alone")
            tokens = [*prompt, 5, *path]
            view.reserve(len(tokens))
            alone = ForwardSlice(view=view, token_ids=tokens, start_slot=0, num_logit_rows=1)
            expected = runner.forward([alone]).logits[0]
            torch.testing.assert_close(kept, expected, atol=1e-4, rtol=1e-4)
            view.release()


@pytest.mark.slow
def test_nothing_is_drafted_while_several_prompts_are_read() -> None:
    """Guesses would make every one of them wait longer for its first token."""
    engine = make_engine(tiny_pair(), config=EngineConfig(max_tokens_per_step=24))
    first = make_request("first", random_prompt(12), max_tokens=200)
    crowd = [make_request(f"c{n}", random_prompt(11, seed=n), max_tokens=2) for n in range(8)]
    rushed: list[int] = []

    def watch(number: int, answers: dict[str, Answer]) -> None:
        busy = [answers[r.request_id] for r in crowd if r.request_id in answers]
        if number > 6 and 0 < sum(bool(answer.emitted) for answer in busy) < 8:
            rushed.append(answers["first"].emitted[-1].num_drafted_tokens)

    answers = serve(
        engine, [first, *crowd], arrivals={r.request_id: 6 for r in crowd}, on_step=watch
    )
    assert texts(answers) == texts(
        serve(make_engine(tiny_pair(), speculates=False), [first, *crowd])
    )
    assert rushed
    assert sum(rushed) == 0
    assert answers["first"].emitted[-2].num_drafted_tokens > 0
