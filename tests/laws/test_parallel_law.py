"""A model on several ranks says what it says on one; one set of ranks serves all of this file."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
from torch import Tensor

from outrider.engine.parallel.collectives import TorchCollectives
from outrider.engine.parallel.runner import RankRunner
from outrider.engine.passes.pass_memory import LargestPass, measure_pass_bytes
from tests.engines import (
    PAIR_FOLDER,
    heldout_prompts,
    make_engine,
    make_request,
    serve,
    shipped_pair,
    texts,
)
from tests.laws.same_answers import ON_DEVICE, UNDRAFTED, WARM, Way, assert_same_answers
from tests.ranks import Parted, parted, requests

COUNTS = [2, pytest.param(4, marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=COUNTS)
def shipped(request: pytest.FixtureRequest) -> Iterator[Parted]:
    """The shipped large model: two key-value heads, shared out to two ranks, copied for four."""
    with parted(PAIR_FOLDER / "large", request.param, dtype="float32") as found:
        yield found


@pytest.mark.slow
def test_ranks_say_what_one_says(shipped: Parted) -> None:
    pair = shipped_pair()
    undrafted = WARM | UNDRAFTED | Way(make=shipped.engine)
    engine = assert_same_answers(requests(), of=pair, vary=undrafted).engine
    assert engine.stats().tiers["large"].prefix_cache_hits > 0
    assert_same_answers(requests(), of=pair, vary=ON_DEVICE | Way(make=shipped.engine))
    assert shipped.model.num_parameters == pair.large.num_parameters
    assert shipped.model.weight_bytes < 0.6 * pair.large.weight_bytes


@pytest.mark.slow
def test_ranks_score_a_prompt_as_one_does(shipped: Parted) -> None:
    asked = [
        make_request(f"{n}", prompt, max_tokens=3, num_prompt_logprobs=n)
        for n, prompt in enumerate(heldout_prompts(3))
    ]
    right = serve(make_engine(shipped_pair()), asked)
    answers = serve(shipped.engine(shipped_pair()), asked)
    for name, answer in answers.items():
        found, wanted = (each.prefills[0].prompt_logprobs for each in (answer, right[name]))
        assert [each.logprob for each in found] == pytest.approx(
            [each.logprob for each in wanted], abs=1e-4
        )
        assert [len(each.top) for each in found] == [int(name)] * len(wanted)


@pytest.mark.parametrize("on_device", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_whole_rows_are_gathered_only_where_they_are_wanted(
    shipped: Parted, on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that looks at a row, beside what does not: alone, and in one batch."""
    sent: list[tuple[int, int]] = []  # of each exchange: rows, and bytes of each
    gather = TorchCollectives.gather

    def counted(collectives: TorchCollectives, rows: Tensor) -> list[Tensor] | None:
        sent.append((len(rows), rows.nbytes // len(rows)))
        return gather(collectives, rows)

    monkeypatch.setattr(TorchCollectives, "gather", counted)
    few_bytes = 4 * 8  # four candidates: a token and its logit each
    all_bytes = 4 * -(-shipped_pair().large.config.vocab_size // shipped.model.config.num_ranks)
    wanted = {
        "greedy": ({}, {few_bytes}),
        "sampled": ({"temperature": 0.9}, {few_bytes}),
        "truncated": ({"temperature": 0.9, "top_p": 0.8}, {all_bytes}),
        "penalised": ({"frequency_penalty": 0.5}, {all_bytes}),
        "reported": ({"temperature": 0.7, "num_logprobs": 3}, {all_bytes}),
        "scored": ({"num_prompt_logprobs": 2}, {all_bytes, few_bytes}),
    }
    prompt = heldout_prompts(1)[0]
    asked = {
        name: make_request(name, prompt, seed=9, max_tokens=8, **options)
        for name, (options, _) in wanted.items()
    }
    right = serve(make_engine(shipped_pair()), list(asked.values()))
    engine = shipped.engine(shipped_pair(), on_device=on_device)
    for name, (_, sizes) in wanted.items():
        sent.clear()
        assert texts(serve(engine, [asked[name]])) == {name: right[name].token_ids}
        assert {size for _, size in sent} == sizes
    sent.clear()
    together = [replace(each, request_id=f"{name}+") for name, each in asked.items()]
    said = serve(engine, together)
    assert {f"{name}+": each.token_ids for name, each in right.items()} == texts(said)
    assert {size for _, size in sent} == {few_bytes, all_bytes}
    for ours, others in zip(said["reported+"].logprobs, right["reported"].logprobs, strict=True):
        assert [token for token, _ in ours.top] == [token for token, _ in others.top]
        assert ours.logprob == pytest.approx(others.logprob, abs=1e-4)


@pytest.mark.slow
def test_all_ranks_run_the_largest_pass(shipped: Parted) -> None:
    """For the size of the cache, before there is one; afterwards they serve as ever."""

    class Memory:
        def reset_peak(self) -> None:
            """Nothing is kept."""

        def used_bytes(self) -> int:
            return 0

        def peak_bytes(self) -> int:
            return 77

    model = shipped.model
    largest = LargestPass(max_rows=40, max_sequences=1, block_size=16, kv_dtype=model.dtype)
    measure = partial(measure_pass_bytes, model, largest, memory=Memory(), make_runner=RankRunner)
    measured, rooms = shipped.ranks.room(measure, largest)
    assert measured == 77 + 3 * 40 * model.config.vocab_size * 4
    assert rooms == []  # on a CPU all share the machine's memory
    request = make_request("a", heldout_prompts(1)[0], max_tokens=6)
    assert_same_answers([request], of=shipped_pair(), vary=Way(make=shipped.engine))
