"""Two models that have nothing in common, and a test of what they are sampled from.

The first token of an answer comes from the prefill; the three after it are judged in trees that a
*different* random model drafts. Their joint distribution is compared with the exact one, which
transformers' model and logits processors give, with options applied by dense counts.
"""

import itertools
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import chi2
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from outrider.draft.config import DraftConfig
from outrider.engine.core import Engine
from outrider.engine.request import EngineRequest
from outrider.verifier.params import SamplingParams
from tests.engines import Pair, engine_model, make_engine, make_request, serve
from tests.laws.options import changed_logits
from tests.models import make_hf_model

Options = dict[str, Any]
"""Fields of `SamplingParams`."""

VOCAB_SIZE = 7
PROMPT = (3, 1, 4, 1, 5)
NARROW = DraftConfig(max_branching=2, max_frontier=2, max_draft_depth=3)


@cache
def strangers() -> Pair:
    """Two models that have nothing in common, of moderate opinions."""
    shape = {"vocab_size": VOCAB_SIZE, "num_hidden_layers": 1, "initializer_range": 0.12}
    large = make_hf_model("llama2", seed=1, **shape)
    small = make_hf_model("llama2", seed=2, **shape)
    return Pair(
        large=engine_model(large),
        small=engine_model(small),
        large_reference=large,
        small_reference=small,
    )


def drafting(draft: DraftConfig = NARROW, **options: Any) -> Engine:
    """An engine in which one of these models drafts for the other."""
    return make_engine(strangers(), draft=draft, large_blocks=128, small_blocks=128, **options)


def request_with(options: Options) -> EngineRequest:
    """A request whose answer is four tokens, three of them judged in trees."""
    return make_request("r", PROMPT, max_tokens=4, **options)


def draw(engine: Engine, request: EngineRequest, num_seeds: int) -> NDArray[np.int64]:
    """Counts of the last three tokens of the answers to so many seeds, [7, 7, 7]."""
    counts = np.zeros((VOCAB_SIZE,) * 3, dtype=np.int64)
    for start in range(0, num_seeds, 64):
        requests = [
            replace(request, request_id=str(seed), sampling=replace(request.sampling, seed=seed))
            for seed in range(start, min(start + 64, num_seeds))
        ]
        for answer in serve(engine, requests).values():
            counts[tuple(answer.token_ids[-3:])] += 1
    accepted = engine.stats().num_accepted_tokens / num_seeds
    assert accepted > 0.5, "plain decoding, not trees, made these sequences"
    return counts


def _truncations(s: SamplingParams) -> LogitsProcessorList:
    steps = LogitsProcessorList([TemperatureLogitsWarper(s.temperature)])
    if s.top_k:
        steps.append(TopKLogitsWarper(s.top_k))
    if s.top_p < 1.0:
        steps.append(TopPLogitsWarper(s.top_p))
    if s.min_p:
        steps.append(MinPLogitsWarper(s.min_p))
    return steps


@torch.inference_mode()
def exact_distribution(options: Options) -> NDArray[np.float64]:
    """P(second, third, fourth token), [7, 7, 7], by enumeration of all contexts."""
    sampling = SamplingParams(max_tokens=4, **options)
    steps = _truncations(sampling)
    contexts = list(itertools.product(range(VOCAB_SIZE), repeat=3))
    batch = torch.tensor([[*PROMPT, *context] for context in contexts])
    logits = strangers().large_reference(batch).logits.float()[:, -4:]  # [343, 4, 7]
    known: dict[tuple[int, ...], NDArray[np.float64]] = {}
    joint = np.zeros((VOCAB_SIZE,) * 4)
    for row, context in enumerate(contexts):
        chance = 1.0
        for length in range(4):
            before = context[:length]
            if before not in known:
                changed = changed_logits(
                    logits[row, length].clone(), list(PROMPT), list(before), sampling
                )
                cut = steps(torch.zeros(1, 1, dtype=torch.int64), changed[None])
                known[before] = cut.softmax(-1)[0].double().numpy()
            if length < 3:
                chance *= known[before][context[length]]
        joint[context] = chance * known[context]
    return joint.sum(0)


def p_value(drawn: NDArray[np.int64], exact: NDArray[np.float64]) -> float:
    """Chi-square goodness of fit; cells with fewer than five expected counts share one cell."""
    expected = (exact * drawn.sum()).ravel()
    observed = drawn.ravel()
    assert not observed[expected == 0].any(), "a token that was cut off has been emitted"
    often = expected >= 5
    assert often.sum() > 50
    observed_cells = np.append(observed[often], observed[~often].sum())
    expected_cells = np.append(expected[often], expected[~often].sum())
    keep = expected_cells > 0
    observed_cells, expected_cells = observed_cells[keep], expected_cells[keep]
    statistic = ((observed_cells - expected_cells) ** 2 / expected_cells).sum()
    return float(chi2.sf(statistic, len(expected_cells) - 1))
