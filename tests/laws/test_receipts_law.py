"""A verification agrees with what was written, wherever and however, and finds what was not.

The bundled pair. Honest answers match to the last token: greedy and sampled, with and without
guesses, under penalties and biases, behind cached prefixes, in chunks. An answer of another seed,
of another temperature, of other weights, or with an edited token does not.
"""

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

import pytest

from outrider.engine.config import MAX_SCORED_ROWS, EngineConfig
from outrider.engine.core import Engine
from outrider.engine.grammar.grammar import GrammarCompiler
from outrider.engine.model.decoder import DecoderModel
from outrider.engine.model.quantised.formats import Rounding
from outrider.engine.request import EngineRequest, Verification
from outrider.verifier.params import Hypothesis, SamplingParams, Tier
from outrider.verifier.token_logprobs import Judgement
from tests.engines import (
    PAIR_FOLDER,
    Answer,
    heldout_prompts,
    make_engine,
    make_request,
    serve,
    shipped_pair,
)
from tests.grammars import schema_spec, shipped_compiler

SETTINGS: tuple[dict[str, object], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.5, "top_p": 0.9, "seed": 2**63 + 5},
    {"temperature": 1.3, "top_k": 20, "seed": 3},
    {"temperature": 0.8, "min_p": 0.05, "choice_index": 2, "seed": 4},
    {"temperature": 1.0, "presence_penalty": 0.7, "frequency_penalty": 0.3, "seed": 5},
    {"temperature": 0.0, "repetition_penalty": 1.2, "logit_bias": ((7, 2.0), (11, -3.0))},
)


def requests_of(tier: Tier = "large", *, max_tokens: int = 40) -> list[EngineRequest]:
    """One of each setting."""
    prompts = heldout_prompts(len(SETTINGS), seed=8)
    return [
        make_request(f"{number}", prompt, tier=tier, max_tokens=max_tokens, **setting)
        for number, (prompt, setting) in enumerate(zip(prompts, SETTINGS, strict=True))
    ]


def verification_of(
    request: EngineRequest,
    token_ids: SequenceOf[int],
    *others: SamplingParams,
    tier: Tier | None = None,
) -> EngineRequest:
    """Ask whether the request's answer is this one, under its own parameters and under others."""
    samplings = (request.sampling, *others)
    return EngineRequest(
        request_id=f"verify-{request.request_id}",
        prompt_token_ids=(*request.prompt_token_ids, *token_ids),
        tier=tier or request.tier,
        sampling=SamplingParams(max_tokens=0),
        verification=Verification(
            num_tokens=len(token_ids),
            hypotheses=tuple(
                Hypothesis(sampling=each, noise_tier=request.tier) for each in samplings
            ),
        ),
    )


def judged(engine: Engine, requests: SequenceOf[EngineRequest]) -> list[tuple[Judgement, ...]]:
    """Return the judgements of each request."""
    answers: Mapping[str, Answer] = serve(engine, requests)
    for request in requests:
        assert answers[request.request_id].token_ids == []
    return [answers[request.request_id].prefills[-1].judgements for request in requests]


def written(requests: SequenceOf[EngineRequest], **engine: object) -> list[list[int]]:
    answers = serve(make_engine(shipped_pair(), **engine), requests)
    return [answers[request.request_id].token_ids for request in requests]


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["large", "small"])
@pytest.mark.parametrize("speculates", [True, False])
def test_an_honest_answer_matches_to_the_last_token(tier: Tier, *, speculates: bool) -> None:
    requests = requests_of(tier)
    texts = written(requests, speculates=speculates)
    asked = [verification_of(*pair) for pair in zip(requests, texts, strict=True)]
    for text, (found,) in zip(texts, judged(make_engine(shipped_pair()), asked), strict=True):
        assert (found.num_tokens, found.num_same) == (len(text), len(text))
        assert (found.total_gap, found.differences) == (0.0, ())


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [7, 16])
def test_chunks_prefixes_and_neighbours_change_no_judgement(num_rows: int) -> None:
    requests = requests_of()
    texts = written(requests)
    config = EngineConfig(max_tokens_per_step=num_rows, min_prefill_tokens=num_rows)
    engine = make_engine(shipped_pair(), config=config)
    serve(engine, requests)  # their prefixes, answers among them, are in the cache
    asked = [
        verification_of(request, text, replace(request.sampling, seed=77))
        for request, text in zip(requests, texts, strict=True)
    ]
    for text, (own, other) in zip(texts, judged(engine, asked), strict=True):
        assert own.num_same == own.num_tokens == len(text) == other.num_tokens


@pytest.mark.slow
def test_another_seed_or_temperature_explains_a_sampled_answer_worse() -> None:
    requests = [
        make_request(f"{number}", prompt, max_tokens=60, temperature=1.0, seed=number)
        for number, prompt in enumerate(heldout_prompts(8, seed=3))
    ]
    texts = written(requests)
    asked = [
        verification_of(
            request,
            text,
            replace(request.sampling, seed=1000 + request.sampling.seed),
            replace(request.sampling, temperature=0.3),
        )
        for request, text in zip(requests, texts, strict=True)
    ]
    found = judged(make_engine(shipped_pair()), asked)
    for own, _, _ in found:
        assert own.num_same == own.num_tokens
    for wrong in (1, 2):
        assert sum(each[wrong].num_same for each in found) < sum(
            each[wrong].num_tokens for each in found
        )
        assert sum(each[wrong].total_gap for each in found) > 1.0


@pytest.mark.slow
def test_an_edited_token_is_found_where_it_stands() -> None:
    requests = requests_of()
    texts = written(requests)
    for request, text in zip(requests, texts, strict=True):
        place = len(text) // 2
        edited = [*text]
        edited[place] = 7 if text[place] != 7 else 8
        (found,) = judged(make_engine(shipped_pair()), [verification_of(request, edited)])[0]
        first = found.differences[0]
        assert (first.index, first.token_id, first.chosen_id) == (
            place, edited[place], text[place],
        )  # fmt: skip
        assert 0.0 < first.gap <= found.total_gap


@pytest.mark.slow
def test_an_answer_of_other_weights_is_found() -> None:
    """The small model's answers, under the large one's name and with its noise."""
    requests = requests_of("small", max_tokens=60)
    texts = written(requests)
    asked = [
        verification_of(replace(request, tier="small"), text, tier="large")
        for request, text in zip(requests, texts, strict=True)
    ]
    found = [own for (own,) in judged(make_engine(shipped_pair()), asked)]
    assert sum(own.num_same for own in found) < sum(own.num_tokens for own in found)


@pytest.mark.slow
def test_four_bit_weights_under_the_name_of_sixteen_bits_are_found() -> None:
    folder = str(PAIR_FOLDER / "large")
    honest = DecoderModel.load(folder, dtype="bfloat16", deterministic=True)
    cheap = DecoderModel.load(
        folder, dtype="bfloat16", deterministic=True, rounding=Rounding(scheme="int4")
    )
    requests = [
        make_request(f"{number}", prompt, max_tokens=60, temperature=1.0, seed=number)
        for number, prompt in enumerate(heldout_prompts(12, seed=6))
    ]
    pair = shipped_pair("bfloat16")
    by_honest, by_cheap = (
        judged(
            make_engine(replace(pair, large=honest)),
            [
                verification_of(request, answers[request.request_id].token_ids)
                for request in requests
            ],
        )
        for answers in (
            serve(make_engine(replace(pair, large=model)), requests) for model in (honest, cheap)
        )
    )
    assert all(own.num_same == own.num_tokens for (own,) in by_honest)
    assert any(own.num_same < own.num_tokens for (own,) in by_cheap)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_answer_under_a_grammar_matches(temperature: float) -> None:
    spec = schema_spec({"type": "object", "properties": {"sum": {"type": "integer"}}})
    compilers: dict[Tier, GrammarCompiler] = {"large": shipped_compiler()}
    requests = [
        replace(
            make_request(f"{number}", prompt, temperature=temperature, seed=number), grammar=spec
        )
        for number, prompt in enumerate(heldout_prompts(3, seed=6))
    ]
    texts = written(requests, grammars=compilers)
    asked = [verification_of(*pair) for pair in zip(requests, texts, strict=True)]
    free = judged(make_engine(shipped_pair()), asked)
    bound = [replace(each, grammar=spec, request_id=f"{each.request_id}-bound") for each in asked]
    for text, (own,), (unbound,) in zip(
        texts, judged(make_engine(shipped_pair(), grammars=compilers), bound), free, strict=True
    ):
        assert own.num_same == own.num_tokens == len(text)
        assert unbound.num_same < len(text)


@pytest.mark.slow
def test_a_long_text_is_judged_in_passes_that_each_judge_a_few_rows() -> None:
    prompt = heldout_prompts(1, seed=4)[0]
    text = (prompt * (MAX_SCORED_ROWS // len(prompt) + 2))[: MAX_SCORED_ROWS + 20]
    request = make_request("long", prompt, temperature=1.0, seed=9)
    (found,) = judged(make_engine(shipped_pair()), [verification_of(request, text)])[0]
    assert found.num_tokens == len(text)
    assert 0 < found.num_same < len(text)
    assert len(found.differences) == 8


def test_a_verification_that_also_writes_is_refused() -> None:
    request = make_request("a", [1, 2, 3, 4])
    asked = verification_of(request, [5, 6])
    with pytest.raises(ValueError, match="stands alone"):
        replace(asked, sampling=SamplingParams(max_tokens=1))
    with pytest.raises(ValueError, match="in front"):
        replace(asked, prompt_token_ids=(5, 6))
    with pytest.raises(ValueError, match="hypotheses"):
        replace(asked, verification=Verification(num_tokens=1, hypotheses=()))
