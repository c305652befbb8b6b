"""Pre-emption, escalation and cascades keep the law on other kinds of models, too.

Mixtures of experts, sinks, soft-capped scores, and a model that runs through transformers.
"""

import shutil
from collections.abc import Iterator
from dataclasses import replace

import pytest

from outrider.draft.config import DraftConfig
from outrider.verifier.params import CascadeParams
from tests.engines import (
    PAIR_FOLDER,
    Answer,
    Pair,
    assert_idle,
    make_engine,
    make_request,
    random_prompt,
    step_once,
    texts,
    tiny_pair,
)
from tests.laws.gateways import Gateway, gateway
from tests.laws.mixed import mixed_requests
from tests.laws.same_answers import (
    UNDRAFTED,
    WARM,
    Way,
    assert_same_answers,
    by,
    few_blocks,
    plainly,
    total,
)
from tests.models import save_hf_model

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
HOLD_BACKS = (0, 1, 2, 3, 5, 8, 14, 19)


@pytest.fixture(
    scope="module",
    params=[
        "gpt_neox",
        "qwen3-moe",
        pytest.param("gemma2", marks=pytest.mark.slow),
        pytest.param("gpt-oss", marks=pytest.mark.slow),
    ],
)
def pair(request: pytest.FixtureRequest) -> Pair:
    return tiny_pair(request.param, max_positions=256, drift=0.03)


@pytest.mark.slow
def test_preemption_and_cached_prefixes_do_not_matter(pair: Pair) -> None:
    requests = mixed_requests()[::2]
    wide = by(draft=DraftConfig(max_branching=4))
    few = few_blocks(mixed_requests()) | Way(turns=2)
    assert_same_answers(requests, of=pair, vary=wide | few)
    assert_same_answers(requests[::2], of=pair, vary=wide | by(block_size=4) | WARM)


@pytest.mark.slow
def test_an_escalated_answer_is_the_large_models_own(pair: Pair) -> None:
    requests = [
        make_request(
            str(number),
            random_prompt(11 + 7 * number, seed=number),
            tier="small",
            may_escalate=True,
            max_tokens=20,
            **({"temperature": 0.9, "seed": number} if number % 2 else {}),
        )
        for number in range(len(HOLD_BACKS))
    ]
    vary = Way(escalate=HOLD_BACKS.__getitem__, shows=("num_reused_tokens",))
    assert_same_answers(requests, of=pair, vary=vary)


@pytest.mark.slow
def test_a_cascade_is_the_same_without_drafting(pair: Pair) -> None:
    cascade = CascadeParams(alpha=0.3)
    requests = [replace(request, cascade=cascade) for request in mixed_requests()[::2]]
    served = assert_same_answers(requests, of=pair, like=UNDRAFTED)
    assert 0 < served.total("num_unratified_tokens") < served.total("num_output_tokens")


def test_drafts_keep_to_the_positions_that_a_model_has() -> None:
    """One row beyond a table of learned positions would end the engine for all tenants."""
    pair = tiny_pair("gpt2", max_positions=64, drift=0.03)
    requests = [
        make_request(
            f"{tier}-{length}",
            (random_prompt(5) * 20)[:length],
            tier=tier,
            may_escalate=tier == "small",
            max_tokens=64 - length,
            min_tokens=64 - length,
        )
        for tier in ("large", "small")
        for length in (20, 47, 55, 62, 63)
    ]
    engine = make_engine(pair, block_size=4)
    answers = {request.request_id: Answer() for request in requests}
    for request in requests:
        engine.submit(request)
    while not all(answer.finished for answer in answers.values()):
        for name, answer in answers.items():
            if name.startswith("small") and not answer.switches and answer.token_ids:
                engine.switch_tier(name, "large", keeps_answer=name == "small-20")
        step_once(engine, answers)
    own = [request for request in requests if request.tier == "large"]
    right = plainly(pair, own)
    assert {name: texts(answers)[name] for name in right} == right
    assert total(answers, "num_accepted_tokens") > 0
    assert_idle(engine)


# ---- over HTTP ------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["qwen3-moe", "gpt_neox"])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gateway]:
    """A random large model with the shipped pair's tokenizer, small model and router."""
    folder = tmp_path_factory.mktemp(request.param)
    save_hf_model(request.param, folder, vocab_size=2048, max_position_embeddings=512)
    for name in TOKENIZER_FILES:
        shutil.copy(PAIR_FOLDER / "large" / name, folder)
    flags = {
        "models.large": str(folder),
        "models.small": str(PAIR_FOLDER / "small"),
        "models.router": str(PAIR_FOLDER / "router"),
        "routing.force_router": True,
    }
    with gateway(flags) as running:
        yield running


def question(model: str, **options: object) -> dict[str, object]:
    content = "What is 3 + 4?"
    return {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 24,
        "seed": 3,
        **options,
    }


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_such_a_large_model_is_served_drafted_for_and_routed_to(
    served: Gateway, temperature: float
) -> None:
    ask = {"temperature": temperature}
    large = served.ask(**question("large", **ask))
    plain = served.ask(**question("large", **ask, outrider={"speculation": "off"}))
    assert large.text == plain.text
    assert large.num_tokens == plain.num_tokens
    # A small model that is never sure enough hands over before the first token is sent.
    escalated = served.ask(**question("auto", **ask, outrider={"threshold": 1.0}))
    assert escalated.report["tier"] == "large"
    assert escalated.text == large.text
    assert (
        served.ask(**question("auto", **ask, outrider={"threshold": 0.0})).report["tier"] == "small"
    )
    cascade = {"quality": {"cascade": 0.3}}
    drafted = served.ask(**question("large", **ask, outrider=cascade))
    undrafted = served.ask(**question("large", **ask, outrider={**cascade, "speculation": "off"}))
    assert drafted.text == undrafted.text != large.text
