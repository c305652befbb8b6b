"""A cascade's answer is verified by one reading of each model, and found where the claim is false.

Honest answers match to the last token, for both rules, greedy and sampled, whatever the guesses,
the chunks, the caches and the blocks were. Another alpha, another rule, and another small or large
model do not lead to them.
"""

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from functools import cache

import pytest

from outrider.engine.config import EngineConfig
from outrider.engine.core import Engine
from outrider.engine.errors import InvalidRequestError, PromptTooLongError
from outrider.engine.model.decoder import DecoderModel
from outrider.engine.model.quantised.formats import Rounding
from outrider.engine.request import EngineRequest, Verification
from outrider.verifier.params import (
    CascadeParams,
    CascadeRule,
    Hypothesis,
    SamplingParams,
    Tier,
)
from outrider.verifier.token_logprobs import Judgement
from tests.engines import (
    PAIR_FOLDER,
    Pair,
    assert_idle,
    heldout_prompts,
    make_engine,
    make_request,
    random_prompt,
    serve,
    shipped_pair,
    tiny_pair,
)
from tests.grammars import schema_spec, shipped_compiler
from tests.laws.test_cascade_law import cascade_requests
from tests.sizes import slow_but

RULES: tuple[CascadeRule, ...] = ("opt", "token_specific")


def judging(
    request: EngineRequest, token_ids: SequenceOf[int], *others: CascadeParams | None
) -> EngineRequest:
    """Ask whether an answer is the request's, by its own cascade and by others (None: by none)."""
    return EngineRequest(
        request_id=f"judge-{request.request_id}",
        prompt_token_ids=(*request.prompt_token_ids, *token_ids),
        tier="large",
        sampling=SamplingParams(max_tokens=0),
        grammar=request.grammar,
        verification=Verification(
            num_tokens=len(token_ids),
            hypotheses=tuple(
                Hypothesis(sampling=request.sampling, noise_tier="large", cascade=cascade)
                for cascade in (request.cascade, *others)
            ),
        ),
    )


def judged(engine: Engine, requests: SequenceOf[EngineRequest]) -> list[tuple[Judgement, ...]]:
    answers = serve(engine, requests)
    return [answers[request.request_id].prefills[-1].judgements for request in requests]


def written(engine: Engine, requests: SequenceOf[EngineRequest]) -> list[list[int]]:
    answers = serve(engine, requests)
    return [answers[request.request_id].token_ids for request in requests]


def all_judged(
    requests: SequenceOf[EngineRequest],
    texts: SequenceOf[SequenceOf[int]],
    engine: Engine,
    *others: CascadeParams | None,
) -> list[tuple[Judgement, ...]]:
    asked = [judging(request, text, *others) for request, text in zip(requests, texts, strict=True)]
    return judged(engine, asked)


def shares(found: SequenceOf[tuple[Judgement, ...]]) -> list[float]:
    """Return the share of all tokens that each hypothesis explains."""
    return [
        sum(one.num_same for one in by_hypothesis) / sum(one.num_tokens for one in by_hypothesis)
        for by_hypothesis in zip(*found, strict=True)
    ]


@cache
def tiny_texts() -> list[list[int]]:
    return written(make_engine(tiny_pair()), cascade_requests())


WAYS: Mapping[str, dict[str, object]] = {
    "as usual": {},
    "chunks": {"config": EngineConfig(max_tokens_per_step=7, min_prefill_tokens=1)},
    "few large blocks": {"block_size": 4, "large_blocks": 48},
    "few small blocks": {"block_size": 4, "small_blocks": 48},
    "few blocks": {"block_size": 4, "large_blocks": 48, "small_blocks": 48},
    "no prefix cache": {"prefix_caching": False},
}


@pytest.mark.parametrize("way", slow_but({"few small blocks", "few large blocks"}, WAYS))
def test_honest_answers_match_to_the_last_token(way: Mapping[str, object]) -> None:
    engine = make_engine(tiny_pair(), **way)
    for _ in range(2):  # the second time their texts are in both caches
        found = all_judged(cascade_requests(), tiny_texts(), engine)
        for text, (own,) in zip(tiny_texts(), found, strict=True):
            assert (own.num_tokens, own.num_same, own.total_gap) == (len(text), len(text), 0.0)
        assert_idle(engine)


@pytest.mark.slow
def test_small_answers_and_drafts_beside_it_change_no_judgement() -> None:
    small = [
        make_request(f"s{n}", random_prompt(40, seed=n), tier="small", max_tokens=60)
        for n in range(6)
    ]
    asked = [
        judging(request, text)
        for request, text in zip(cascade_requests(), tiny_texts(), strict=True)
    ]
    beside = cascade_requests(prefix="beside")
    engine = make_engine(tiny_pair(), block_size=4, small_blocks=60)
    answers = serve(engine, [*small, *asked, *beside])
    for request, text in zip(asked, tiny_texts(), strict=True):
        (own,) = answers[request.request_id].prefills[-1].judgements
        assert own.num_same == own.num_tokens == len(text)
    assert [answers[request.request_id].token_ids for request in beside] == tiny_texts()
    assert_idle(engine)


def test_another_alpha_rule_or_no_cascade_does_not_lead_to_the_answers() -> None:
    others = (CascadeParams(alpha=1.0), CascadeParams(alpha=0.9, rule="token_specific"), None)
    found = all_judged(cascade_requests(), tiny_texts(), make_engine(tiny_pair()), *others)
    own, *wrong = shares(found)
    assert own == 1.0
    assert max(wrong) < 0.9


def open_requests(cascade: CascadeParams) -> list[EngineRequest]:
    """Tasks of the demo, so hot that they have many answers."""
    return [
        replace(
            make_request(f"{n}", prompt, max_tokens=80, temperature=1.5, top_p=0.98, seed=n),
            cascade=cascade,
        )
        for n, prompt in enumerate(heldout_prompts(12, seed=6))
    ]


def with_another(tier: Tier) -> Pair:
    """The demo pair with the large model in four bits, or in the small one's place as well."""
    pair = shipped_pair("bfloat16")
    if tier == "small":
        return replace(pair, small=pair.large)
    four_bits = DecoderModel.load(
        str(PAIR_FOLDER / "large"),
        dtype="bfloat16",
        deterministic=True,
        rounding=Rounding(scheme="int4"),
    )
    return replace(pair, large=four_bits)


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["small", "large"])
@pytest.mark.parametrize("rule", RULES)
def test_another_model_under_the_name_of_either_is_found(rule: CascadeRule, tier: Tier) -> None:
    requests = open_requests(CascadeParams(alpha=0.4, rule=rule))
    texts = written(make_engine(with_another(tier)), requests)
    honest = make_engine(shipped_pair("bfloat16"))
    (share,) = shares(all_judged(requests, texts, honest))
    assert share < 1.0
    assert shares(all_judged(requests, written(honest, requests), honest)) == [1.0]


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_a_wrong_alpha_of_the_demo_pair_is_found(rule: CascadeRule) -> None:
    engine = make_engine(shipped_pair("bfloat16"))
    requests = open_requests(CascadeParams(alpha=0.2, rule=rule))
    others = (CascadeParams(alpha=0.8, rule=rule), None)
    own, other, none = shares(all_judged(requests, written(engine, requests), engine, *others))
    assert own == 1.0
    assert max(other, none) < 1.0


@pytest.mark.slow
def test_an_answer_under_a_grammar_and_penalties_matches() -> None:
    spec = schema_spec({"type": "object", "properties": {"sum": {"type": "integer"}}})
    compilers = {"large": shipped_compiler(), "small": shipped_compiler()}
    requests = [
        replace(
            request,
            grammar=spec if number % 2 else None,
            sampling=replace(request.sampling, presence_penalty=0.6, logit_bias=((7, 2.0),)),
        )
        for number, request in enumerate(open_requests(CascadeParams(alpha=0.4)))
    ]
    texts = written(make_engine(shipped_pair(), grammars=compilers), requests)
    judges = make_engine(shipped_pair(), grammars=compilers)
    assert shares(all_judged(requests, texts, judges)) == [1.0]
    unbound = [replace(request, grammar=None) for request in requests]
    assert shares(all_judged(unbound, texts, judges))[0] < 1.0


def test_judging_costs_one_reading_of_each_model() -> None:
    (request,) = cascade_requests()[9:10]
    (text,) = written(make_engine(tiny_pair()), [request])
    engine = make_engine(tiny_pair())
    (answer,) = serve(engine, [judging(request, text)]).values()
    work = {own.tier: own for own in answer.stats.work}
    num_tokens = len(request.prompt_token_ids) + len(text)
    assert work["large"].num_computed_tokens == num_tokens
    assert work["small"].num_draft_rows == num_tokens - 1  # nothing is written behind the last


def test_cascades_that_cannot_be_judged_are_refused() -> None:
    (request,) = cascade_requests()[3:4]
    asked = judging(request, (5, 6, 7))
    with pytest.raises(InvalidRequestError, match="large tier"):
        make_engine(tiny_pair()).submit(replace(asked, tier="small"))
    with pytest.raises(InvalidRequestError, match="small model that drafts"):
        make_engine(tiny_pair(), speculates=False).submit(asked)
    with pytest.raises(PromptTooLongError):
        make_engine(tiny_pair(), small_blocks=1).submit(asked)
