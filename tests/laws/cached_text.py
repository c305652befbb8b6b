"""The contents of the caches after an answer."""

import torch
from torch import Tensor

from outrider.draft.config import DraftConfig
from outrider.engine.cache.kv_view import KVView
from outrider.engine.core import Engine
from outrider.engine.model.decoder import DecoderModel
from outrider.engine.passes.runner import ForwardSlice, ModelRunner
from tests.engines import (
    Answer,
    drafter_of,
    make_request,
    random_prompt,
    step_once,
    texts,
    tiny_pair,
)
from tests.laws.same_answers import plainly

# Many branches, so that the accepted path is seldom the first one.
BUSHY = DraftConfig(max_branching=6, max_frontier=8, max_draft_nodes=60, min_path_prob=0.005)


def cached_kv(runner: ModelRunner, view: KVView, num_tokens: int) -> Tensor:
    """[num_layers, 2, num_tokens, num_kv_heads, head_dim] of a view's first tokens."""
    cache = runner.kv_cache.groups[0].tensor
    slots = torch.tensor([view.slot(logical) for logical in range(num_tokens)])
    return cache.flatten(2, 3)[:, :, slots]


@torch.inference_mode()
def fresh_kv(model: DecoderModel, token_ids: list[int]) -> Tensor:
    """The same from one prefill into an empty cache."""
    runner = ModelRunner(model=model, num_blocks=len(token_ids) // 16 + 1)
    view = runner.new_view("")
    view.reserve(len(token_ids))
    runner.forward([ForwardSlice(view=view, token_ids=token_ids, start_slot=0, num_logit_rows=1)])
    return cached_kv(runner, view, len(token_ids))


def assert_caches_hold_the_text(engine: Engine, *, at_least: int = 0) -> None:
    """Both caches of every live large sequence equal a fresh prefill's."""
    pair = tiny_pair()
    drafter = drafter_of(engine)
    num_checked = 0
    for sequence in engine._sequences.values():
        state = drafter._states.get(sequence.request_id)
        views = [(engine._runners["large"], pair.large, sequence.view)]
        if state is not None and state.view is not None:
            views.append((engine._runners["small"], pair.small, state.view))
        for runner, model, view in views:
            count = view.num_computed_tokens
            expected = fresh_kv(model, sequence.token_ids)[:, :, :count]
            torch.testing.assert_close(
                cached_kv(runner, view, count), expected, atol=1e-4, rtol=1e-4
            )
            num_checked += count
    assert num_checked >= at_least


def assert_caches_always_hold_the_text(engine: Engine, temperature: float) -> None:
    """After each step of four requests, whose answers are the plain ones."""
    requests = [
        make_request(
            str(number), random_prompt(5 + 9 * number, seed=number), seed=number, max_tokens=60,
            temperature=temperature,
        )
        for number in range(4)
    ]  # fmt: skip
    answers: dict[str, Answer] = {}
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        step_once(engine, answers)
        assert_caches_hold_the_text(engine)
    assert texts(answers) == plainly(tiny_pair(), requests)
