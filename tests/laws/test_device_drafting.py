"""Trees that grow on the device never change the text, whatever grows and runs beside them."""

from dataclasses import replace
from typing import Any

import pytest

from outrider.draft.budget.budget import TreeBudget
from outrider.draft.config import DraftConfig
from outrider.draft.device.device_trees import DeviceTrees
from outrider.engine.config import EngineConfig
from outrider.engine.core import Engine
from outrider.engine.grammar.grammar import GrammarCompiler
from outrider.engine.protocols import Trees
from outrider.engine.request import EngineRequest, GrammarSpec, SpeculationParams
from outrider.kernels.triton_support import use_kernels
from outrider.verifier.params import CascadeParams, Tier
from tests.engines import (
    assert_idle,
    fixed_budget,
    heldout_prompts,
    make_engine,
    make_request,
    random_prompt,
    serve,
    shipped_pair,
    texts,
    tiny_pair,
)
from tests.grammars import shipped_compiler
from tests.laws.cached_text import BUSHY, assert_caches_always_hold_the_text
from tests.laws.mixed import mixed_requests
from tests.laws.predicted import requests_with_predictions
from tests.laws.same_answers import (
    AS_USUAL,
    ON_DEVICE,
    WARM,
    Way,
    assert_same_answers,
    by,
    few_blocks,
    logprobs,
    plain_answers,
    plainly,
    serve_in,
    total,
)
from tests.recorded_levels import record_levels, watch_levels
from tests.sizes import slow_but

COMPILERS: dict[Tier, GrammarCompiler] = {"large": shipped_compiler(), "small": shipped_compiler()}


def watch_forests(engine: Engine) -> list[int]:
    """A list that gets the number of trees of every forest that is launched from now on."""
    launch = engine._large.launch
    sizes: list[int] = []

    def watched(plan: Any, trees: Trees) -> object:
        sizes.append(trees.forest.num_trees if trees.forest is not None else 0)
        return launch(plan, trees)

    engine._large.launch = watched  # type: ignore[assignment, method-assign]
    return sizes


# ---- the shipped pair ------------------------------------------------------------------------


def pair_requests(count: int, tier: Tier = "large") -> list[EngineRequest]:
    """Every other one sampled, each with another truncation."""
    cuts: tuple[dict[str, float], ...] = ({}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.02})
    return [
        make_request(
            f"{tier}{n}", prompt, tier=tier, max_tokens=40, temperature=0.8 * (n % 2), seed=n,
            **(cuts[n // 2 % 4] if n % 2 else {}),
        )
        for n, prompt in enumerate(heldout_prompts(count))
    ]  # fmt: skip


def on_device(**engine: Any) -> Way:
    """Trees that grow on the device; `Served.watched` has how many grew in each step."""
    return ON_DEVICE | by(**engine) | Way(watch=watch_forests)


@pytest.mark.slow
def test_the_shipped_pair_says_the_same_alone() -> None:
    for request in pair_requests(2):
        served = assert_same_answers([request], of=shipped_pair(), vary=on_device())
        assert max(served.watched) == 1
        assert served.total("num_accepted_tokens") > 15


@pytest.mark.slow
def test_the_shipped_pair_says_the_same_together_and_again() -> None:
    """The second time all prompts are in the prefix cache, and all answers are remembered."""
    served = assert_same_answers(pair_requests(8), of=shipped_pair(), vary=on_device() | WARM)
    assert max(served.watched) == 8
    first, again = served.turns
    assert total(again, "num_cached_tokens") >= 4 * 16
    assert total(again, "num_steps") < total(first, "num_steps")


@pytest.mark.slow
def test_beside_small_answers() -> None:
    both = zip(pair_requests(8), pair_requests(8, "small"), strict=True)
    vary = on_device() | Way(arrive=lambda number: number // 4, streams=True)
    requests = [request for pair in both for request in pair]
    assert max(assert_same_answers(requests, of=shipped_pair(), vary=vary).watched) > 2


def awkward_requests() -> list[EngineRequest]:
    """Between plain requests, those whose trees need the host."""
    prompts = heldout_prompts(10)
    plain = [
        make_request(f"plain{n}", prompts[n], max_tokens=40, temperature=0.8 * (n % 2), seed=n)
        for n in range(4)
    ]
    grammar = GrammarSpec(kind="regex", text=r"The answer is -?\d{1,4}( or \d{1,4}){0,5}\.")
    awkward = [
        make_request("penalties", prompts[4], max_tokens=40, presence_penalty=0.8),
        make_request("bias", prompts[5], max_tokens=40, temperature=0.7, logit_bias=((30, 2.0),)),
        replace(make_request("grammar", prompts[6], max_tokens=30), grammar=grammar),
        replace(
            make_request("cascade", prompts[7], max_tokens=40, temperature=0.9, seed=3),
            cascade=CascadeParams(alpha=0.3),
        ),
        make_request("no-drafts", prompts[8], max_tokens=20, speculation=False),
        make_request("logprobs", prompts[9], max_tokens=30, num_logprobs=3),
    ]
    return [request for pair in zip(awkward, plain, strict=False) for request in pair] + awkward[4:]


@pytest.mark.slow
def test_beside_sequences_that_need_the_host() -> None:
    requests = awkward_requests()
    # A cascade without the small model's passes is another answer; everything else is plain.
    (cascade,) = (request for request in requests if request.cascade)
    right = plain_answers(shipped_pair(), [each for each in requests if each is not cascade])
    right |= serve_in(AS_USUAL, [cascade], shipped_pair()).answers
    vary = on_device(grammars=COMPILERS)
    served = assert_same_answers(
        requests, of=shipped_pair(), vary=vary, right=right, within=logprobs(1e-3)
    )
    assert max(served.watched) == 5  # plain ones, and the one that asks for log-probabilities
    for name in ("penalties", "bias", "cascade"):
        assert served.answers[name].stats.num_accepted_tokens > 0, name


# ---- trees of all kinds ------------------------------------------------------------------------

DRAFTS = {
    "default": DraftConfig(),
    "chain": DraftConfig(max_branching=1, max_frontier=1, min_path_prob=0.0),
    "bushy": BUSHY,
    "wide": DraftConfig(
        max_branching=12, max_frontier=9, max_draft_depth=4, max_draft_nodes=200, min_path_prob=0.0
    ),
    "one-node": DraftConfig(max_draft_nodes=1),
    "one-level": DraftConfig(max_draft_depth=1),
    "no-level": DraftConfig(max_draft_depth=0),
    "short-catch-up": DraftConfig(max_catch_up_tokens=7),
    "model-only": DraftConfig(sources=("model",)),
}
BUDGETS = {
    "none": None,
    "cheap": fixed_budget(row=0.0, draft=0.0001),
    "fair": fixed_budget(),
    "dear-rows": fixed_budget(row=1.0),
    "dear-drafts": fixed_budget(draft=10.0),
    "dear-reading": fixed_budget(draft=0.04, draft_row=0.01),
}


@pytest.mark.slow
@pytest.mark.parametrize("config", slow_but({"default", "bushy", "short-catch-up"}, DRAFTS))
def test_every_shape_of_tree(config: DraftConfig) -> None:
    served = assert_same_answers(mixed_requests(), vary=on_device(draft=config))
    assert (max(served.watched) > 1) == (config.max_draft_depth > 0)


@pytest.mark.slow
@pytest.mark.parametrize("budget", slow_but({"none", "dear-reading"}, BUDGETS))
def test_every_budget(budget: TreeBudget | None) -> None:
    served = assert_same_answers(mixed_requests(), vary=on_device(budget=budget))
    if budget is BUDGETS["cheap"] or budget is None:
        assert served.total("num_drafted_tokens") > 400


LIMITS = {
    "off": SpeculationParams(enabled=False),
    "no-node": SpeculationParams(max_draft_nodes=0),
    "one-node": SpeculationParams(max_draft_nodes=1),
    "few-nodes": SpeculationParams(max_draft_nodes=3, max_draft_depth=2),
    "no-level": SpeculationParams(max_draft_depth=0),
    "suffix": SpeculationParams(sources=("suffix",)),
    "in-a-hurry": SpeculationParams(inter_token_s=1e-6),
}


@pytest.mark.slow
@pytest.mark.parametrize("speculation", slow_but({"off", "few-nodes", "in-a-hurry"}, LIMITS))
def test_limits_of_requests(speculation: SpeculationParams) -> None:
    requests = mixed_requests()
    requests[::2] = mixed_requests(speculation=speculation)[::2]
    served = assert_same_answers(requests, vary=on_device())
    assert max(served.watched) > 0
    limit = speculation.max_draft_nodes if speculation.enabled else 0
    for request in requests[::2] if limit is not None else []:
        events = served.answers[request.request_id].emitted
        assert max(event.num_drafted_tokens for event in events) <= limit


@pytest.mark.parametrize("max_tokens", [1, 3])
def test_short_answers(max_tokens: int) -> None:
    requests = [
        replace(request, sampling=replace(request.sampling, max_tokens=max_tokens))
        for request in mixed_requests()
    ]
    right = plainly(tiny_pair(), mixed_requests())
    right = {name: tokens[:max_tokens] for name, tokens in right.items()}
    assert_same_answers(requests, vary=on_device(), right=right)


@pytest.mark.slow
def test_predictions_and_repeated_text() -> None:
    requests = requests_with_predictions(None)
    served = assert_same_answers(requests, vary=on_device())
    engine, answers = served.engine, served.answers
    assert set(engine.stats().accepted_by_source) >= {"model", "prediction"}
    assert served.total("num_accepted_tokens") > 60
    assert sum(e.num_predicted_tokens for a in answers.values() for e in a.emitted) > 20
    # Asked again without a prediction, the answers are text that repeats.
    again = [replace(request, prediction_token_ids=()) for request in requests]
    assert texts(serve(engine, again)) == texts(answers)
    assert sum(engine.stats().accepted_by_source["suffix"]) > 20
    assert_idle(engine)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of what padding holds, interpreted
def test_with_triton_kernels_in_their_interpreter() -> None:
    """The whole path of a GPU, recorded levels included, as far as a CPU can go it."""
    requests = [
        make_request(str(n), random_prompt(9 + n, seed=n), max_tokens=5, temperature=0.8 * n)
        for n in range(2)
    ]
    expected = plainly(tiny_pair(), requests)
    config = DraftConfig(max_draft_depth=3, max_draft_nodes=8, max_frontier=2)
    with use_kernels("triton"):
        engine = make_engine(tiny_pair(), on_device=True, draft=config)
        runner = record_levels(engine, kernels="triton", tree_counts=(1, 2))
        replayed = watch_levels(runner)
        sizes = watch_forests(engine)
        answers = serve(engine, requests)
    assert texts(answers) == expected
    assert set(replayed) == {2, 4}
    assert max(sizes) == 2
    assert total(answers, "num_accepted_tokens") > 0
    assert_idle(engine)


# ---- blocks --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spare_blocks", "small_blocks", "prefix_caching"),
    [(0, 1024, False), (None, 5, True), (0, 38, True), (0, 38, False), (10, 20, True)],
)
def test_few_blocks_do_not_matter(
    spare_blocks: int | None, small_blocks: int, prefix_caching: bool
) -> None:
    """As in test_preemption."""
    large = by(block_size=4, large_blocks=1024)
    if spare_blocks is not None:
        large = few_blocks(mixed_requests(), spare=spare_blocks)
    vary = large | on_device(small_blocks=small_blocks, prefix_caching=prefix_caching, draft=BUSHY)
    assert_same_answers(mixed_requests(), vary=vary)


@pytest.mark.slow
def test_drafts_on_the_device_give_way_to_small_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Views are reclaimed between the passes of a step, while trees are growing in them."""
    small = [
        make_request(
            f"small{n}", random_prompt(30 + 7 * n, seed=70 + n), tier="small",
            temperature=0.8 * (n % 2), seed=n, max_tokens=40,
        )
        for n in range(8)
    ]  # fmt: skip
    lost: list[bool] = []
    next_level = DeviceTrees.next_level

    def watched(trees: DeviceTrees) -> bool:
        lost.append(any(draft.state.view is None for draft in trees.drafts))
        return next_level(trees)

    monkeypatch.setattr(DeviceTrees, "next_level", watched)
    requests = [r for pair in zip(mixed_requests(), small, strict=False) for r in pair]
    requests += mixed_requests()[len(small) :]
    chunks = EngineConfig(max_tokens_per_step=24, min_prefill_tokens=1)
    engine = ON_DEVICE | by(block_size=4, small_blocks=60, config=chunks)
    assert_same_answers(requests, vary=engine | Way(arrive=lambda number: number))
    assert any(lost), "no view was reclaimed while its tree grew"


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_both_caches_hold_the_text(temperature: float) -> None:
    """Accepted paths of branching trees are moved into place on the device, in both caches."""
    engine = make_engine(tiny_pair(), on_device=True, block_size=4, draft=BUSHY)
    moved = {"large": 0, "small": 0}
    for tier, runner in engine._runners.items():

        def compact(sources, destinations, tier=tier, runner=runner, move=runner.compact):  # type: ignore[no-untyped-def]
            moved[tier] += int((sources >= 0).sum())
            move(sources, destinations)

        runner.compact = compact  # type: ignore[method-assign]
    assert_caches_always_hold_the_text(engine, temperature)
    assert moved["large"] > 10, "no accepted path had to be moved"
    assert moved["small"] > 10


# ---- from tier to tier ---------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("keeps_answer", [False, True])
def test_an_escalated_answer_goes_on_as_a_draft_on_the_device(keeps_answer: bool) -> None:
    requests = [
        make_request(
            f"r{n}", prompt, tier="small", may_escalate=True, max_tokens=40, seed=n,
            temperature=0.8 * (n % 2),
        )
        for n, prompt in enumerate(heldout_prompts(4, seed=9))
    ]  # fmt: skip
    vary = Way(escalate=lambda n: 6 + 4 * n, keeps_answer=keeps_answer)
    served = assert_same_answers(requests, of=shipped_pair(), vary=vary | on_device(), like=vary)
    assert max(served.watched) > 0
    if not keeps_answer:
        assert served.total("num_reused_tokens") > 0
