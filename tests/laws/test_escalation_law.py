"""An escalated answer is the large tier's own, wherever the small one was given up.

On the shipped pair in float32: greedy and sampled, at every hold-back position and behind a whole
answer, whatever else goes on in the engine. What was retracted only saves passes.
"""

import random
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from functools import cache
from itertools import product

import pytest
import torch

from outrider.draft.training.tasks.families import stream
from outrider.engine.config import EngineConfig
from outrider.engine.core import Engine
from outrider.engine.grammar.grammar import GrammarCompiler
from outrider.engine.request import EngineRequest, GrammarSpec
from outrider.verifier.params import Tier
from tests.engines import (
    Answer,
    assert_idle,
    chat_prompt,
    heldout_prompts,
    make_engine,
    make_request,
    random_prompt,
    serve,
    shipped_pair,
    shipped_tokenizer,
    step_once,
    texts,
    tiny_pair,
    watch_small_rows,
)
from tests.grammars import shipped_compiler
from tests.laws.same_answers import (
    AS_USUAL,
    UNDRAFTED,
    Compare,
    Way,
    assert_same_answers,
    by,
    few_blocks,
    logprobs,
    plain_answers,
    serve_escalating,
    serve_in,
    tokens,
)

MAX_TOKENS = 48
SAMPLING: dict[str, dict[str, float]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "top_p": 0.95},
}
WHOLE = 10**6  # more than any answer has: it is given up when it is held
POSITIONS = (*range(21), WHOLE)
COMPILERS: dict[Tier, GrammarCompiler] = {"large": shipped_compiler(), "small": shipped_compiler()}


def stops() -> tuple[int, ...]:
    return (shipped_tokenizer().eos_token_id,)


@cache
def telling_prompt() -> tuple[int, ...]:
    """One whose answers are long and differ: small and large, greedy and sampled."""
    tasks = stream(5, "heldout", difficulties=(4,))
    prompts = [chat_prompt(next(tasks).prompt) for _ in range(48)]
    settings: dict[str, object] = {"max_tokens": MAX_TOKENS, "seed": 7, "stop_token_ids": stops()}
    requests = [
        make_request(f"{n}-{tier}-{mode}", prompt, tier=tier, **settings, **SAMPLING[mode])
        for n, prompt in enumerate(prompts)
        for tier, mode in product(("small", "large"), ("greedy", "sampled"))
    ]
    found = texts(serve(make_engine(shipped_pair(), small_blocks=999, large_blocks=999), requests))
    for n, prompt in enumerate(prompts):
        small, large = found[f"{n}-small-greedy"], found[f"{n}-large-greedy"]
        shortest = min(len(small), len(found[f"{n}-small-sampled"]))
        if shortest > 32 and small != large != found[f"{n}-large-sampled"]:
            return prompt
    raise AssertionError("the pair answers all prompts alike: look at more of them")


def watched(request_id: str, **options: object) -> EngineRequest:
    settings: dict[str, object] = {"max_tokens": MAX_TOKENS, "seed": 7, "stop_token_ids": stops()}
    settings |= options
    prompt = settings.pop("prompt", None) or telling_prompt()
    grammar = settings.pop("grammar", None)
    request = make_request(request_id, prompt, tier="small", may_escalate=True, **settings)
    return replace(request, grammar=grammar)


def own_answer(request: EngineRequest) -> Answer:
    """Return what the large tier says when it is asked at once, plainly and alone."""
    return plain_answers(shipped_pair(), [request], tier="large")[request.request_id]


def assert_own(
    requests: list[EngineRequest],
    positions: SequenceOf[int],
    ways: Way = AS_USUAL,
    within: Compare = tokens,
) -> None:
    """Handed over behind so many tokens, each answer is the large tier's own."""
    vary = ways | Way(escalate=positions.__getitem__)
    served = assert_same_answers(requests, of=shipped_pair(), vary=vary, within=within)
    for answer in served.answers.values():
        assert answer.finished is not None
        assert answer.finished.tier == "large"


@pytest.mark.slow
@pytest.mark.parametrize("mode", SAMPLING)
@pytest.mark.parametrize(
    ("speculation", "prefix_caching"), [(True, True), (True, False), (False, True)]
)
def test_every_hold_back_position(mode: str, speculation: bool, prefix_caching: bool) -> None:
    """All positions beside each other: every one is a batch neighbour of the others."""
    positions = POSITIONS if speculation and prefix_caching else POSITIONS[::3]
    requests = [watched(str(place), **SAMPLING[mode]) for place in positions]
    roomy = by(prefix_caching=prefix_caching, small_blocks=400, large_blocks=400)
    shown = Way(shows=("num_reused_tokens",)) if speculation else UNDRAFTED
    assert_own(requests, positions, roomy | shown)


@pytest.mark.slow
@pytest.mark.parametrize("mode", SAMPLING)
@pytest.mark.parametrize("position", [1, 16, WHOLE])
def test_alone_with_options(mode: str, position: int) -> None:
    """Penalties, biases and log-probabilities see the large answer and never the small one."""
    request = watched(
        "r", num_logprobs=2, presence_penalty=0.6, frequency_penalty=0.4, min_tokens=5,
        logit_bias=((30, 1.0),), **SAMPLING[mode],
    )  # fmt: skip
    assert_own([request], [position], within=logprobs(1e-3))


@pytest.mark.slow
@pytest.mark.parametrize("position", [3, WHOLE])
def test_under_a_grammar(position: int) -> None:
    spec = GrammarSpec(kind="regex", text=r"Answer: [0-9]{2,9}(, [a-z]{1,12}){1,3}\.")
    requests = [
        watched(str(n), prompt=prompt, grammar=spec, **SAMPLING[mode])
        for n, prompt in enumerate(heldout_prompts(3))
        for mode in list(SAMPLING)[n % 2 : n % 2 + 1]
    ]
    assert_own(requests, [position] * 3, by(grammars=COMPILERS))


@pytest.mark.slow
def test_under_pressure() -> None:
    """Blocks for about one answer and a half: views are taken away, sequences are pre-empted."""
    requests = [
        watched(
            str(n),
            prompt=prompt,
            max_tokens=32,
            stop_token_ids=(),
            **SAMPLING["sampled" if n % 2 else "greedy"],
        )
        for n, prompt in enumerate(heldout_prompts(5))
    ]
    few = few_blocks(requests)
    most = few.engine["large_blocks"] * 3 // 2
    config = EngineConfig(max_tokens_per_step=40, min_prefill_tokens=8)
    pressed = few | by(large_blocks=most, small_blocks=most, config=config)
    assert_own(requests, [2, WHOLE, 9, WHOLE, 14], pressed)


@pytest.mark.parametrize("mode", SAMPLING)
@pytest.mark.parametrize(
    "position", [0, 5, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 16, 30))]
)
def test_a_kept_answer_is_continued_as_the_large_tier_would(mode: str, position: int) -> None:
    engine = make_engine(shipped_pair())
    request = watched("r", **SAMPLING[mode])
    answer = serve_escalating(engine, [request], {"r": position}, keeps_answer=True)["r"]
    kept = [token for event in answer.emitted[:position] for token in event.token_ids]
    assert len(kept) == position
    assert answer.token_ids[:position] == kept
    rest = replace(request.sampling, max_tokens=MAX_TOKENS - position)
    behind = replace(request, prompt_token_ids=(*telling_prompt(), *kept), sampling=rest)
    own = own_answer(behind)
    assert answer.token_ids[position:] == own.token_ids
    assert answer.finish_reason == own.finish_reason
    assert answer.switches[0].keeps_answer
    assert answer.stats.num_output_tokens == len(answer.token_ids)
    assert_idle(engine)


def test_rules_of_a_kept_answer_see_all_of_it() -> None:
    """A repeated token is punished wherever it stands: drafts and plain decoding agree on it."""
    request = watched(
        "r", presence_penalty=2.0, frequency_penalty=2.0, repetition_penalty=1.6, temperature=0.8
    )
    vary = Way(escalate=lambda _: 12, keeps_answer=True)
    like = vary | by(speculates=False)
    (answer,) = assert_same_answers(
        [request], of=shipped_pair(), vary=vary, like=like
    ).answers.values()
    free = serve_in(vary, [watched("r", temperature=0.8)], shipped_pair())
    assert free.answers["r"].token_ids != answer.token_ids


# ---- the probe ------------------------------------------------------------------------------


@torch.inference_mode()
def test_the_hidden_state_is_transformers_own() -> None:
    pair = shipped_pair()
    prompt = telling_prompt()
    expected = pair.small_reference.model(torch.tensor([prompt])).last_hidden_state[0, -1]
    engine = make_engine(pair, block_size=4, small_blocks=64)
    request = watched("cold", return_hidden_state=True, max_tokens=4)
    states = []
    for name in ("cold", "hit"):
        answer = serve(engine, [replace(request, request_id=name)])[name]
        engine.keep_on_tier(name)
        step_once(engine, {name: answer})
        assert (answer.prefills[0].num_cached_tokens > len(prompt) - 5) == (name == "hit")
        states.append(answer.prefills[0].hidden_state)
    # Pre-empted in the middle of its prompt, it begins again.
    short = make_engine(
        pair, block_size=4, config=EngineConfig(max_tokens_per_step=8, min_prefill_tokens=1)
    )
    short.submit(request)
    assert not short.step()
    short.scheduler.preempt(short._sequences["cold"])
    states.append(serve(short, [])["cold"].prefills[0].hidden_state)
    for state in states:
        assert state is not None
        torch.testing.assert_close(torch.tensor(state), expected, atol=1e-4, rtol=1e-4)


def test_being_watched_costs_no_pass_and_no_row() -> None:
    counts, prompt = [], telling_prompt()
    for options in ({}, {"may_escalate": True, "return_hidden_state": True}):
        engine = make_engine(shipped_pair(), prefix_caching=False)
        rows = watch_small_rows(engine)
        request = make_request(
            "r", prompt, tier="small", max_tokens=20, temperature=0.8, seed=3, **options
        )
        serve(engine, [request])
        counts.append(rows)
    assert counts[0] == counts[1]
    assert sum(counts[0]) == len(prompt) + 19


# ---- everything at once -----------------------------------------------------------------------


def interfere(engine: Engine, rng: random.Random, name: str, step: int) -> None:
    match rng.choice(["", "", "switch", "keep", "back", "keep_on_tier", "abort"]):
        case "switch":
            engine.switch_tier(name, "large")
        case "keep":
            engine.switch_tier(name, "large", keeps_answer=True)
        case "back" if step < 30:
            engine.switch_tier(name, "small", keeps_answer=rng.random() < 0.5)
        case "keep_on_tier":
            engine.keep_on_tier(name)
        case "abort" if step > 10:
            engine.abort(name)


@pytest.mark.slow
def test_whatever_is_decided_no_block_stays_held() -> None:
    for number in range(15):
        rng = random.Random(number)
        engine = make_engine(
            tiny_pair(),
            block_size=rng.choice([1, 4]),
            large_blocks=rng.choice([60, 200]),
            small_blocks=rng.choice([60, 200]),
            prefix_caching=rng.random() < 0.7,
            speculates=rng.random() < 0.9,
            config=EngineConfig(
                max_sequences=rng.choice([2, 8]), max_tokens_per_step=rng.choice([5, 64, 2048])
            ),
        )
        requests = [
            make_request(
                str(n),
                random_prompt(rng.randrange(1, 30), seed=rng.randrange(3)),
                tier="small",
                may_escalate=rng.random() < 0.8,
                max_tokens=rng.randrange(1, 20),
                temperature=rng.choice([0.0, 0.9]),
                seed=n,
            )
            for n in range(6)
        ]
        answers: dict[str, Answer] = {request.request_id: Answer() for request in requests}
        for request in requests:
            engine.submit(request)
        for step in range(2000):
            interfere(engine, rng, rng.choice(list(answers)), step)
            step_once(engine, answers)
            if all(answer.finished for answer in answers.values()):
                break
        assert all(answer.finished for answer in answers.values()), number
        for name, answer in answers.items():
            assert len(answer.token_ids) == answer.stats.num_output_tokens, (number, name)
        assert_idle(engine)
