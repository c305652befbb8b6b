"""Log-probabilities of a prompt are those of transformers, however its tokens are computed.

The bundled pair in float32, both tiers: in chunks, beside other requests, behind a prefix that is
cached, with guesses, after pre-emption, after a change of tier, and resumed.
"""

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from functools import cache
from typing import ClassVar

import pytest
from torch import Tensor

from outrider.engine.config import MAX_SCORED_ROWS, EngineConfig
from outrider.engine.core import Engine
from outrider.engine.model.shared_vocabulary import PickedRows
from outrider.engine.passes.device_rows import DeviceRows
from outrider.engine.passes.runner import ForwardSlice, ModelRunner, PassOutput
from outrider.engine.request import EngineRequest
from outrider.verifier.params import Tier
from tests.engines import (
    Answer,
    Pair,
    heldout_prompts,
    make_engine,
    make_request,
    random_prompt,
    serve,
    shipped_pair,
    tiny_pair,
)
from tests.laws.references import forced_logits
from tests.laws.same_answers import (
    ACCEPTING,
    ALONE,
    AS_USUAL,
    UNDRAFTED,
    WARM,
    Way,
    assert_same_answers,
    by,
    few_blocks,
    total,
)

# Different sums of the same numbers.
ERROR = 1e-4


def requests_of(tier: Tier = "large", *, max_tokens: int = 12) -> list[EngineRequest]:
    """Prompts of several lengths, each with another number of alternatives, or none at all."""
    prompts = heldout_prompts(6, seed=6)
    texts = [*prompts, sum(prompts, ()), prompts[0]]
    counts = (0, 1, 5, 20, 3, None, 2, 1)
    return [
        make_request(
            f"{number}", prompt, tier=tier, max_tokens=max_tokens,
            num_prompt_logprobs=count, num_logprobs=0, seed=number,
        )
        for number, (prompt, count) in enumerate(zip(texts, counts, strict=True))
    ]  # fmt: skip


@cache
def expected(pair: Pair, tier: Tier, prompt: tuple[int, ...]) -> list[list[float]]:
    """Transformers' log-probabilities of all tokens at each place behind the first."""
    reference = pair.large_reference if tier == "large" else pair.small_reference
    logits = forced_logits(reference, [list(prompt)])[0]
    rows: list[list[float]] = logits[:-1].log_softmax(-1).tolist()
    return rows


def assert_scores(
    requests: SequenceOf[EngineRequest], answers: Mapping[str, Answer], pair: Pair | None = None
) -> None:
    """Compare what each request was told of its prompt, on the tier that answered it."""
    pair = pair or shipped_pair()
    for request in requests:
        prefill = answers[request.request_id].prefills[-1]
        num_top = request.sampling.num_prompt_logprobs
        if num_top is None:
            assert prefill.prompt_logprobs == ()
            continue
        prompt = request.prompt_token_ids
        entries = prefill.prompt_logprobs
        assert [entry.token_id for entry in entries] == list(prompt[1:])
        for entry, row in zip(entries, expected(pair, prefill.tier, prompt), strict=True):
            assert entry.logprob == pytest.approx(row[entry.token_id], abs=ERROR)
            best = sorted(row, reverse=True)[:num_top]
            assert [value for _, value in entry.top] == pytest.approx(best, abs=ERROR)
            assert all(abs(row[token] - value) < ERROR for token, value in entry.top)
            assert row[entry.token_id] == pytest.approx(
                sorted(row, reverse=True)[entry.rank - 1], abs=ERROR
            )


def check(requests: list[EngineRequest], vary: Way) -> None:
    """The answers are those without scores, and each turn's scores are right."""
    served = assert_same_answers(requests, of=shipped_pair(), vary=vary)
    for answers in served.turns:
        assert_scores(requests, answers)


def in_chunks(num_rows: int) -> Way:
    """Passes of few rows."""
    return by(config=EngineConfig(max_tokens_per_step=num_rows, min_prefill_tokens=num_rows))


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["small", "large"])
@pytest.mark.parametrize(
    "way",
    [ALONE, AS_USUAL, UNDRAFTED, in_chunks(16), in_chunks(7) | UNDRAFTED, WARM, ALONE | WARM],
    ids=["alone", "together", "undrafted", "chunks", "small-chunks", "warm", "alone-warm"],
)
def test_a_prompts_log_probabilities_are_transformers(tier: Tier, way: Way) -> None:
    check(requests_of(tier), way)


@pytest.mark.slow
def test_guesses_beside_them_are_accepted_as_ever() -> None:
    check(requests_of(max_tokens=30), ACCEPTING)


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [16, 2048])
def test_a_pre_emption_neither_loses_nor_doubles_them(num_rows: int) -> None:
    requests = requests_of(max_tokens=30)
    check(requests, few_blocks(requests, spare=4) | in_chunks(num_rows))


@pytest.mark.slow
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_pre_emption_within_a_prompt_does_not_either(prefix_caching: bool) -> None:
    config = EngineConfig(max_tokens_per_step=16, min_prefill_tokens=16)
    engine = make_engine(shipped_pair(), config=config, prefix_caching=prefix_caching)

    def interrupt(number: int, answers: Mapping[str, Answer]) -> None:
        for sequence in list(engine.scheduler.running["large"]):
            if number in (2, 4) or (number == 20 and sequence.num_unscored_tokens):
                engine.scheduler.preempt(sequence)

    requests = requests_of()
    answers = serve(engine, requests, on_step=interrupt)
    assert_scores(requests, answers)
    assert total(answers, "num_preemptions") > 2


@pytest.mark.slow
def test_a_change_of_tier_gives_those_of_the_answering_model() -> None:
    requests = requests_of("small")
    check(requests, Way(escalate=lambda number: number))


@pytest.mark.slow
def test_a_resumed_request_without_text_gets_them_again() -> None:
    check(requests_of(), Way(resume=lambda number, length: 0))


@pytest.mark.slow
def test_without_tokens_to_write_they_are_the_whole_answer() -> None:
    requests = requests_of(max_tokens=0)
    right: dict[str, list[int]] = {each.request_id: [] for each in requests}
    served = assert_same_answers(requests, of=shipped_pair(), right=right)
    assert_scores(requests, served.answers)
    assert {answer.finish_reason for answer in served.answers.values()} == {"length"}


class CountingRunner(ModelRunner):
    """Counts the rows of each pass that get logits."""

    counts: ClassVar[list[int]] = []

    def forward(
        self,
        slices: SequenceOf[ForwardSlice],
        device_rows: DeviceRows | None = None,
        features: Tensor | None = None,
        picked: PickedRows | None = None,
    ) -> PassOutput:
        output = super().forward(slices, device_rows, features, picked)
        self.counts.append(len(output.logits))
        return output


@pytest.mark.slow
def test_a_pass_has_a_bounded_number_of_scored_rows() -> None:
    """Whatever the prompts' number and length: each row takes a vocabulary of float32."""
    text: tuple[int, ...] = sum(heldout_prompts(6, seed=6), ())
    long = (text * (MAX_SCORED_ROWS // len(text) + 1))[: MAX_SCORED_ROWS + 20]
    requests = [
        make_request(f"{number}", long[number:], max_tokens=1, num_prompt_logprobs=1)
        for number in range(3)
    ]
    runner = CountingRunner(model=shipped_pair().large, num_blocks=256)
    config = EngineConfig(min_prefill_tokens=2048)
    answers = serve(Engine(runners={"large": runner}, config=config), requests)
    assert_scores(requests, answers)
    assert MAX_SCORED_ROWS <= max(runner.counts) <= MAX_SCORED_ROWS + len(requests)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["gemma3", "qwen3-next", "gpt-oss"])
def test_windows_and_recurrent_layers_keep_the_law(architecture: str) -> None:
    pair = tiny_pair(architecture)
    requests = [
        make_request(f"{n}", random_prompt(20 + 13 * n), max_tokens=8, num_prompt_logprobs=n)
        for n in range(3)
    ]
    served = assert_same_answers(requests, of=pair, vary=in_chunks(16) | Way(turns=2))
    for answers in served.turns:
        assert_scores(requests, answers, pair)
