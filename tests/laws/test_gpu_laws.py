"""Laws of speculation on a GPU, all passes and levels recorded: no text differs from the plain one.

In float32 and deterministic mode, where a row's logits do not depend on the rows beside it.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from outrider.draft.budget.budget import TreeBudget
from outrider.draft.config import DraftConfig
from outrider.engine.core import Engine
from outrider.engine.passes.level_graphs import TREE_COUNTS
from outrider.engine.passes.runner import ModelRunner
from outrider.engine.passes.step_times import follow_step_times
from outrider.engine.request import EngineRequest
from outrider.verifier.params import CascadeParams
from tests.engines import (
    Pair,
    assert_idle,
    drafter_of,
    make_engine,
    make_request,
    random_prompt,
    serve,
    texts,
    tiny_pair,
)
from tests.gpu import CAPTURE, DEVICE, on_the_device
from tests.heads import mtp_of, random_pair, read_written
from tests.laws.same_answers import (
    ACCEPTING,
    ALONE,
    ON_DEVICE,
    Way,
    assert_same_answers,
    by,
    plain_answers,
    plainly,
    serve_in,
    with_head,
)
from tests.models import make_hf_model
from tests.recorded_levels import record_levels, watch_levels

pytestmark = pytest.mark.gpu
SMALL = DraftConfig(sources=("model",), max_draft_depth=5, min_path_prob=0.01)
HEAD = DraftConfig(sources=("head",), max_draft_depth=4, min_path_prob=0.0)
# Another program's memory, as far as this one can tell.
SENTINEL_SIZES = (64, 512, 4096, 65536)


@cache
def pair() -> Pair:
    return on_the_device(tiny_pair())


@pytest.fixture(autouse=True)
def _sentinels() -> Iterator[None]:
    """Nothing that is recorded or replayed writes to memory of others."""
    own = [
        torch.full((size,), 0x5A, dtype=torch.uint8, device=DEVICE)
        for size in SENTINEL_SIZES
        for _ in range(32)
    ]
    yield
    assert all(bool((each == 0x5A).all()) for each in own)


def record(engine: Engine) -> ModelRunner:
    """Record what drafts; return the runner whose levels were recorded."""
    counts = TREE_COUNTS if DEVICE.type == "cuda" else (1, 8)
    return record_levels(engine, capture=CAPTURE, kernels="auto", tree_counts=counts)


def requests(count: int = 5, max_tokens: int = 24, **options: object) -> list[EngineRequest]:
    """Greedy, sampled and truncated ones in turn."""
    cuts = ({"temperature": 0.0}, {"temperature": 0.8}, {"temperature": 0.9, "top_k": 20})
    return [
        make_request(
            str(n), random_prompt(9 + 7 * n, seed=n), max_tokens=max_tokens, seed=n,
            **cuts[n % 3], **options,
        )
        for n in range(count)
    ]  # fmt: skip


def recorded(**engine: Any) -> Way:
    """Trees that grow on the device, levels recorded; `Served.watched`: rows of those replayed."""
    watch = Way(watch=lambda made: watch_levels(record(made)))
    return ON_DEVICE | by(draft=SMALL, **engine) | watch


def test_levels_of_the_small_model() -> None:
    """Alone and together, so that levels of one tree and of several are replayed."""
    served = assert_same_answers(requests()[::2], of=pair(), vary=recorded() | ALONE)
    together = [replace(each, cache_salt="again") for each in requests()]
    assert texts(serve(served.engine, together)) == plainly(pair(), requests())
    assert {rows // SMALL.max_frontier for rows in served.watched} >= {1, 8}
    assert_idle(served.engine)


def test_levels_of_an_mtp_head() -> None:
    large = replace(random_pair(), large=on_the_device(random_pair()).large)
    layer = make_hf_model("llama3", seed=7, vocab_size=131, num_hidden_layers=1).model.layers[0]
    head = read_written(*mtp_of(layer, large.large_reference), large.large)
    vary = recorded() | with_head(head=head, draft=HEAD)
    assert len(assert_same_answers(requests(3), of=large, vary=vary).watched) > 3


def test_a_measured_budget() -> None:
    """It learns of passes, of levels and of what a step takes beside them; the text is plain."""
    engine = make_engine(pair(), on_device=True, draft=SMALL)
    runners = engine._runners
    record(engine)
    times = {tier: follow_step_times(runner) for tier, runner in runners.items()}
    budget = TreeBudget(target_pass_s=times["large"], draft_pass_s=times["small"])
    drafter = drafter_of(engine)
    drafter._budget = budget
    assert times["large"](1) > 0
    assert times["small"](4) > 0
    for turn in range(2):
        again = [replace(each, cache_salt=str(turn)) for each in requests()]
        assert texts(serve(engine, again)) == plainly(pair(), requests())
    assert drafter._budgets.host_times.part(8) >= 0
    for runner in runners.values():
        runner.wait()
        assert all(done.seconds > 0 for done in runner.take_finished())
    assert_idle(engine)


def test_resumed_requests() -> None:
    """An answer goes on from any place as it would have done."""
    vary = recorded() | Way(resume=lambda number, length: (1, 7, 23)[number % 3])
    assert_same_answers(requests(), of=pair(), vary=vary)


def test_answers_of_the_small_model_beside_drafts() -> None:
    """A level shares the pass of small answers, and is a graph again without them."""
    small = [
        replace(each, request_id=f"small-{each.request_id}", tier="small")
        for each in requests(3, max_tokens=9)
    ]
    mixed = [*small, *requests(3)]
    assert assert_same_answers(mixed, of=pair(), vary=recorded() | ACCEPTING).watched


def test_cascades_and_rules_beside_drafts() -> None:
    """Their trees need the host between the levels that others replay or share."""
    kinds = requests(count=3, presence_penalty=0.5)
    plain = [replace(each, request_id=f"plain-{each.request_id}") for each in requests(count=3)]
    cascade = make_request("cascade", random_prompt(12), max_tokens=16, temperature=0.8, seed=5)
    cascade = replace(cascade, cascade=CascadeParams(alpha=0.4))
    right = plain_answers(pair(), [*kinds, *plain])
    right |= serve_in(recorded(), [cascade], pair()).answers
    assert_same_answers([*kinds, cascade, *plain], of=pair(), vary=recorded(), right=right)
