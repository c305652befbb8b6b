"""A cascade's answer is its own mixture's, whatever the tree, the batch and the blocks.

The right answers come from the definition, position by position: transformers' logits of both
models, the rule of the paper, the position's noise.
"""

import itertools
import random
import re
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from outrider.draft.config import DraftConfig
from outrider.engine.config import EngineConfig
from outrider.engine.errors import InvalidRequestError, PromptTooLongError
from outrider.engine.request import EngineRequest, GrammarSpec, SpeculationParams
from outrider.engine.sequences.sequence import Sequence
from outrider.kernels.sampling.gumbel_noise import gumbel_noise, row_key
from outrider.verifier.params import CascadeParams
from outrider.verifier.token_tree import TokenTree
from tests.engines import (
    Answer,
    Pair,
    ScriptedDrafter,
    assert_idle,
    fixed_budget,
    heldout_prompts,
    make_engine,
    make_request,
    random_prompt,
    serve,
    shipped_pair,
    shipped_tokenizer,
    texts,
    tiny_pair,
)
from tests.grammars import shipped_compiler, text_of
from tests.laws.chi_square import NARROW, PROMPT, VOCAB_SIZE, draw, p_value, strangers
from tests.laws.mixed import mixed_requests
from tests.laws.same_answers import (
    ACCEPTING,
    AS_USUAL,
    UNDRAFTED,
    WARM,
    Served,
    Way,
    assert_same_answers,
    by,
    plainly,
    serve_in,
    total,
)
from tests.sizes import slow_but
from tests.verifier.mixtures import mixture, probs_of

CASCADES = (
    CascadeParams(alpha=0.1),
    CascadeParams(alpha=0.3, rule="token_specific"),
    CascadeParams(alpha=0.5),
    CascadeParams(alpha=0.8, rule="token_specific"),
)


MIXED = (CascadeParams(alpha=0.3), CascadeParams(alpha=0.4, rule="token_specific"))


def cascade_requests(
    *, speculation: SpeculationParams | bool = True, prefix: str = "c"
) -> list[EngineRequest]:
    """The mixed batch, each with a cascade; every fifth request is greedy."""
    return [
        replace(
            request,
            request_id=f"{prefix}{number}",
            cascade=CASCADES[number % len(CASCADES)],
            sampling=replace(
                request.sampling,
                temperature=0.0 if number % 5 == 0 else request.sampling.temperature,
            ),
        )
        for number, request in enumerate(mixed_requests(speculation=speculation))
    ]


@dataclass(frozen=True, kw_only=True)
class Right:
    """The answer by the definition, and how many of its tokens the large model did not choose."""

    token_ids: list[int]
    num_unratified: int


@torch.inference_mode()
def by_definition(pair: Pair, request: EngineRequest) -> Right:
    sampling, cascade = request.sampling, request.cascade
    assert cascade is not None
    tokens = list(request.prompt_token_ids)
    num_unratified = 0
    for _ in range(sampling.max_tokens):
        ids = torch.tensor([tokens])
        large = pair.large_reference(ids).logits[0, -1].float()
        small = pair.small_reference(ids).logits[0, -1].float()
        pi = mixture(small, large, sampling, cascade)
        alone, _ = probs_of(large, sampling)
        noise = np.zeros(len(pi))
        if not sampling.is_greedy:
            stream = 2 * sampling.choice_index + 1  # the large tier's
            key = torch.tensor([row_key(sampling.seed, stream, len(tokens))], dtype=torch.int32)
            noise = gumbel_noise(key, len(pi))[0].double().numpy()
        with np.errstate(divide="ignore"):
            token, ratified = (int((np.log(p) + noise).argmax()) for p in (pi, alone))
        num_unratified += token != ratified
        tokens.append(token)
    return Right(token_ids=tokens[len(request.prompt_token_ids) :], num_unratified=num_unratified)


@pytest.fixture(scope="session")
def right_cascades() -> dict[str, Right]:
    """The cascades' answers on the tiny pair."""
    answers = {r.request_id: by_definition(tiny_pair(), r) for r in cascade_requests()}
    num_tokens = sum(len(right.token_ids) for right in answers.values())
    num_unratified = sum(right.num_unratified for right in answers.values())
    assert 0.1 < num_unratified / num_tokens < 0.9  # the cascades are neither model's own answers
    return answers


def assert_right(requests: list[EngineRequest], right: dict[str, Right], vary: Way) -> Served:
    """The answers are the definition's, and so are the counts of what the large model refused."""
    served = assert_same_answers(requests, vary=vary, right=tokens_of(right))
    for answers in served.turns:
        for name, answer in answers.items():
            num_unratified = right[name].num_unratified
            assert answer.stats.num_unratified_tokens == num_unratified
            assert sum(event.num_unratified_tokens for event in answer.emitted) == num_unratified
            assert len(answer.prefills) == 1
    counted = served.engine.stats().num_unratified_tokens
    assert counted == sum(total(answers, "num_unratified_tokens") for answers in served.turns)
    return served


def tokens_of(right: dict[str, Right]) -> dict[str, list[int]]:
    return {name: each.token_ids for name, each in right.items()}


def plain_right(requests: list[EngineRequest]) -> dict[str, Right]:
    """What requests without a cascade are answered: none of it is the small model's choice."""
    plain = plainly(tiny_pair(), requests)
    return {name: Right(token_ids=each, num_unratified=0) for name, each in plain.items()}


# ---- trees ----------------------------------------------------------------------------------

DRAFTS = {
    "default": DraftConfig(),
    "chain": DraftConfig(max_branching=1, max_frontier=1, min_path_prob=0.0),
    "one-node": DraftConfig(max_draft_nodes=1),
    "wide": DraftConfig(max_branching=12, max_frontier=16, max_draft_nodes=120),
    "short-catch-up": DraftConfig(max_catch_up_tokens=7),
}


@pytest.mark.slow
@pytest.mark.parametrize("config", slow_but({"default", "wide"}, DRAFTS))
def test_the_tree_does_not_matter(config: DraftConfig, right_cascades: dict[str, Right]) -> None:
    assert_right(cascade_requests(), right_cascades, ACCEPTING | by(draft=config))


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    "speculation", [SpeculationParams(enabled=False), SpeculationParams(sources=())]
)
def test_without_speculation_it_is_the_same(
    speculation: SpeculationParams, right_cascades: dict[str, Right]
) -> None:
    requests = cascade_requests(speculation=speculation)
    served = assert_right(requests, right_cascades, AS_USUAL)
    assert served.total("num_drafted_tokens") == 0


@pytest.mark.slow
def test_a_budget_for_hardly_anything_does_not_matter(right_cascades: dict[str, Right]) -> None:
    vary = by(budget=fixed_budget(row=100.0, draft=10.0))
    served = assert_right(cascade_requests(), right_cascades, vary)
    assert served.total("num_drafted_tokens") < 0.1 * served.total("num_steps")


class ForgetfulDrafter(ScriptedDrafter):
    """Random trees; the small model, by transformers, has looked at some of their nodes."""

    gives_logits = True

    def __init__(self, right: dict[str, Right], *, chance_known: float, seed: int) -> None:
        super().__init__(self._tree)
        self._right = right
        self._chance_known = chance_known
        self._rng = random.Random(seed)

    @torch.inference_mode()
    def _tree(self, sequence: Sequence) -> TokenTree:
        rng = self._rng
        ahead = self._right[sequence.request_id].token_ids[sequence.num_output_tokens :]
        tokens, parents, here = [sequence.token_ids[-1]], [-1], 0
        for token in ahead[: rng.randrange(6)]:
            siblings = {*rng.sample(range(131), 2), token}
            tokens.extend(siblings)
            parents.extend([here] * len(siblings))
            here = len(tokens) - len(siblings) + list(siblings).index(token)
        tree = TokenTree(token_ids=tokens, parent_index=parents)
        model = tiny_pair().small_reference
        logits = [
            model(torch.tensor([[*sequence.token_ids, *path]])).logits[0, -1].float()
            if rng.random() < self._chance_known
            else None
            for path in tree.paths
        ]
        return replace(tree, draft_logits=logits)


@pytest.mark.parametrize("chance_known", [pytest.param(0.4, marks=pytest.mark.slow), 1.0])
def test_unknown_small_distributions_only_cost_time(
    chance_known: float, right_cascades: dict[str, Right]
) -> None:
    drafter = ForgetfulDrafter(right_cascades, chance_known=chance_known, seed=5)
    served = assert_right(cascade_requests()[::2], right_cascades, by(drafter=drafter))
    answers = served.answers
    if chance_known == 1.0:
        assert served.total("num_steps") < 0.6 * served.total("num_output_tokens")
    # An open verdict has no next token: all that was emitted had been drafted.
    is_open = [
        len(event.token_ids) == event.num_accepted_tokens
        for answer in answers.values()
        for event in answer.emitted[:-1]
    ]
    assert any(is_open) == (chance_known < 1.0)


@pytest.mark.slow
def test_penalties_act_on_both_models() -> None:
    edits = {"frequency_penalty": 1.5, "repetition_penalty": 1.3}
    bias = ((7, 4.0), (8, -100.0))
    requests = [
        replace(request, sampling=replace(request.sampling, logit_bias=bias, **edits))
        for request in cascade_requests()
    ]
    drafted = texts(assert_same_answers(requests, like=UNDRAFTED).answers)
    tokens = list(itertools.chain.from_iterable(drafted.values()))
    assert 7 in tokens
    assert 8 not in tokens


@pytest.mark.slow
def test_a_grammar_binds_both_models() -> None:
    requests = [
        replace(
            make_request(
                f"{kind}{number}", prompt, temperature=1.5, seed=number, max_tokens=40,
                stop_token_ids=(shipped_tokenizer().eos_token_id,),
            ),
            grammar=GrammarSpec(kind="regex", text="(red|green|blue|cyan){6,9}"),
            cascade=cascade,
        )
        for number, prompt in enumerate(heldout_prompts(6))
        for kind, cascade in (("opt", MIXED[0]), ("token", MIXED[1]), ("lossless", None))
    ]  # fmt: skip
    vary = by(grammars={"large": shipped_compiler()})
    served = assert_same_answers(requests, of=shipped_pair(), vary=vary, like=vary | UNDRAFTED)
    drafted = texts(served.answers)
    for tokens in drafted.values():
        text = text_of(tokens).removesuffix(shipped_tokenizer().eos_token)
        assert re.fullmatch("(red|green|blue|cyan){6,9}", text)
    assert any(drafted[f"opt{n}"] != drafted[f"lossless{n}"] for n in range(6))


# ---- company and blocks ---------------------------------------------------------------------


@pytest.mark.slow
def test_lossless_requests_beside_it_stay_lossless(right_cascades: dict[str, Right]) -> None:
    small = [make_request(f"s{n}", random_prompt(9, seed=n), tier="small") for n in range(3)]
    lossless, cascades = mixed_requests(), cascade_requests()
    requests = [r for pair in zip(lossless, cascades, strict=True) for r in pair] + small
    right = right_cascades | plain_right(lossless + small)
    assert_right(requests, right, Way(arrive=lambda number: number // 4))


@pytest.mark.slow
@pytest.mark.parametrize(("block_size", "max_tokens_per_step"), [(1, 2048), (4, 5)])
def test_blocks_chunks_and_the_prefix_cache_do_not_matter(
    block_size: int, max_tokens_per_step: int, right_cascades: dict[str, Right]
) -> None:
    num_blocks = 4096 // block_size
    chunks = EngineConfig(max_tokens_per_step=max_tokens_per_step, min_prefill_tokens=2)
    engine = by(block_size=block_size, large_blocks=num_blocks, small_blocks=num_blocks)
    assert_right(cascade_requests(), right_cascades, engine | by(config=chunks) | WARM)


@pytest.mark.parametrize(
    ("large_blocks", "small_blocks"),
    [
        (38, 1024),
        pytest.param(1024, 38, marks=pytest.mark.slow),
        pytest.param(58, 60, marks=pytest.mark.slow),
        (38, 38),
    ],
)
def test_few_blocks_do_not_matter(
    large_blocks: int, small_blocks: int, right_cascades: dict[str, Right]
) -> None:
    """Pre-emption of the answers, and drafts that have to give way to each other."""
    vary = by(block_size=4, large_blocks=large_blocks, small_blocks=small_blocks)
    served = assert_right(cascade_requests(), right_cascades, vary)
    assert (served.total("num_preemptions") > 0) == (large_blocks < 1024)


@pytest.mark.slow
def test_small_answers_that_fill_the_cache_only_delay_it(
    right_cascades: dict[str, Right],
) -> None:
    small = [
        make_request(f"s{n}", random_prompt(40, seed=n), tier="small", max_tokens=60)
        for n in range(6)
    ]
    requests = [*small, *cascade_requests()[:8]]
    vary = by(block_size=4, small_blocks=60)
    assert_right(requests, right_cascades | plain_right(small), vary)


def test_choices_share_their_prompt() -> None:
    cascade = CascadeParams(alpha=0.4)
    requests = [
        replace(
            make_request(
                f"g{n}", random_prompt(37), temperature=1.0, seed=4, choice_index=n, group_id="g"
            ),
            cascade=cascade,
        )
        for n in range(3)
    ]
    right = {r.request_id: by_definition(tiny_pair(), r) for r in requests}
    assert_right(requests, right, AS_USUAL)
    assert len({tuple(each.token_ids) for each in right.values()}) == 3


def test_stop_tokens_and_logprobs() -> None:
    (request,) = cascade_requests()[3:4]
    right = by_definition(tiny_pair(), request).token_ids
    stop = next(token for number, token in enumerate(right) if number > 6)
    sampling = replace(request.sampling, stop_token_ids=(stop,), num_logprobs=2)
    (answer,) = serve(make_engine(tiny_pair()), [replace(request, sampling=sampling)]).values()
    assert answer.token_ids == right[: right.index(stop) + 1]
    assert answer.finish_reason == "stop"
    assert [entry.token_id for entry in answer.logprobs] == answer.token_ids
    ids = torch.tensor([[*request.prompt_token_ids, *answer.token_ids]])
    with torch.inference_mode():
        logits = tiny_pair().large_reference(ids).logits[0].float().log_softmax(-1)
    for number, entry in enumerate(answer.logprobs):  # the large model's, whoever chose
        row = logits[len(request.prompt_token_ids) - 1 + number]
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-3)


# ---- what it means --------------------------------------------------------------------------


def test_equal_models_are_lossless() -> None:
    pair = replace(
        tiny_pair(), small=tiny_pair().large, small_reference=tiny_pair().large_reference
    )
    requests = [
        replace(request, cascade=CascadeParams(alpha=alpha, rule=rule))
        for request, alpha in zip(mixed_requests(), itertools.cycle((0.0, 0.3, 1.0)), strict=False)
        for rule in ("opt", "token_specific")
        # The token-specific rule sharpens: what is rejected is drawn anew.
        if (rule == "opt") == (request.request_id != "r0")
    ]
    assert {r.cascade.rule for r in requests if r.cascade} == {"opt", "token_specific"}
    plain = [replace(request, cascade=None) for request in requests]
    right = serve_in(AS_USUAL, plain, pair).answers
    served = assert_same_answers(requests, of=pair, right=right)
    assert served.total("num_unratified_tokens") == 0


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_alpha_one_is_the_small_model_with_the_large_ones_noise(temperature: float) -> None:
    swapped = replace(tiny_pair(), large=tiny_pair().small)
    request = make_request("r", random_prompt(20), temperature=temperature, seed=8, max_tokens=30)
    (alone,) = serve(make_engine(swapped, speculates=False), [request]).values()
    for rule in ("opt", "token_specific"):
        cascade = CascadeParams(alpha=1.0, rule=rule)
        (answer,) = serve(make_engine(tiny_pair()), [replace(request, cascade=cascade)]).values()
        assert answer.token_ids == alone.token_ids


@cache
def joint_distribution(cascade: CascadeParams, temperature: float) -> NDArray[np.float64]:
    """P(first, second, third token) under pi, [7, 7, 7], by enumeration."""
    sampling = make_request("r", PROMPT, temperature=temperature).sampling
    joint = np.ones((VOCAB_SIZE,) * 3)
    with torch.inference_mode():
        for depth in range(3):
            for path in itertools.product(range(VOCAB_SIZE), repeat=depth):
                ids = torch.tensor([[*PROMPT, *path]])
                small = strangers().small_reference(ids).logits[0, -1].float()
                large = strangers().large_reference(ids).logits[0, -1].float()
                shape = (-1, *[1] * (2 - depth))
                joint[path] *= mixture(small, large, sampling, cascade).reshape(shape)
    assert joint.sum() == pytest.approx(1.0)
    return joint


def check_distribution(cascade: CascadeParams, temperature: float, num_seeds: int) -> None:
    engine = make_engine(strangers(), draft=NARROW)
    request = make_request("r", PROMPT, max_tokens=3, temperature=temperature)
    drawn = draw(engine, replace(request, cascade=cascade), num_seeds)
    assert p_value(drawn, joint_distribution(cascade, temperature)) > 1e-3
    # Neither model's own distribution would pass: alpha 1 is the small one's.
    assert p_value(drawn, joint_distribution(CascadeParams(alpha=1.0), temperature)) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    "cascade",
    slow_but({"opt"}, dict(zip(("opt", "token_specific"), MIXED, strict=True))),
)
def test_answers_follow_the_mixture(cascade: CascadeParams) -> None:
    check_distribution(cascade, 1.0, 1500)


@pytest.mark.long
@pytest.mark.parametrize("temperature", [0.8, 1.0])
@pytest.mark.parametrize("cascade", MIXED, ids=["opt", "token_specific"])
def test_many_answers_follow_the_mixture(cascade: CascadeParams, temperature: float) -> None:
    check_distribution(cascade, temperature, 20_000)


# ---- requests -------------------------------------------------------------------------------


def test_requests_that_cannot_be_cascades_are_refused() -> None:
    request = replace(make_request("r", (5, 6, 7)), cascade=CascadeParams(alpha=0.1))
    engine = make_engine(tiny_pair())
    with pytest.raises(InvalidRequestError, match="large tier"):
        engine.submit(replace(request, tier="small"))
    with pytest.raises(InvalidRequestError, match="small model that drafts"):
        make_engine(tiny_pair(), speculates=False).submit(request)
    with pytest.raises(PromptTooLongError):  # the small model has to read it all
        make_engine(tiny_pair(), small_blocks=1).submit(request)
    assert not engine.has_work


def test_handed_to_the_small_tier_the_answer_is_the_small_models_own() -> None:
    request = replace(make_request("r", random_prompt(20)), cascade=CascadeParams(alpha=0.2))
    engine = make_engine(tiny_pair())

    def switch(step: int, answers: dict[str, Answer]) -> None:
        if step == 4:
            engine.switch_tier("r", "small")

    (answer,) = serve(engine, [request], on_step=switch).values()
    alone = replace(request, tier="small", cascade=None)
    assert texts({"r": answer}) == plainly(tiny_pair(), [alone])
    assert answer.stats.num_unratified_tokens == 0
    assert_idle(engine)
