import pytest

from outrider.engine.adapters.warm_up import adapter_of_nothing
from outrider.engine.passes.runner import ForwardSlice, ModelRunner
from outrider.engine.passes.warm_up import warm_up_passes
from outrider.engine.warm_up import warm_up, warm_up_briefly
from outrider.verifier.params import TIERS
from tests.engines import assert_idle, engine_model, make_engine, tiny_pair
from tests.models import make_hf_model


def test_every_kind_is_served_alone_and_together_and_nothing_stays() -> None:
    engine = make_engine(tiny_pair(), on_device=True)
    told: list[tuple[int, int]] = []
    sizes: list[int] = []
    step = engine.step

    def watched() -> object:
        sizes.append(len(engine._sequences))
        return step()

    engine.step = watched  # type: ignore[method-assign, assignment]
    warm_up(engine, lambda done, total: told.append((done, total)))
    assert_idle(engine)
    total = 2 * (5 * len(TIERS) + 2 * 5)  # alone and together; of both tiers at once
    assert told[-1] == (total, total)
    assert [done for done, _ in told[:-1]] == list(range(1, total // 2 + 1))
    assert min(size for size in sizes if size) == 1  # a step of none sends what was settled
    assert max(sizes) == total // 2
    counters = engine.stats().tiers
    assert all(counters[tier].num_output_tokens >= total // 2 * 12 for tier in TIERS)


@pytest.mark.slow
def test_a_short_context_is_enough() -> None:
    engine = make_engine(tiny_pair(), large_blocks=2, small_blocks=2)
    warm_up(engine)
    assert_idle(engine)


def test_a_brief_one_has_a_prefill_decodes_and_a_draft_of_each_tier() -> None:
    engine = make_engine(tiny_pair())
    warm_up_briefly(engine)
    assert_idle(engine)
    stats = engine.stats()
    assert {tier: stats.tiers[tier].num_output_tokens for tier in TIERS} == dict.fromkeys(TIERS, 4)
    assert stats.tiers["large"].num_drafted_tokens > 0


@pytest.mark.parametrize("has_adapter", [False, True])
def test_a_pass_of_every_size_is_run_and_nothing_stays(has_adapter: bool) -> None:
    runner = ModelRunner(model=tiny_pair().small, num_blocks=6, block_size=16)
    adapter = adapter_of_nothing(runner.model) if has_adapter else None
    sizes: list[int] = []
    forward = runner.forward

    def watched(slices: list[ForwardSlice]) -> object:
        sizes.append(len(slices[0].token_ids))
        assert slices[0].view.adapter is adapter
        return forward(slices)

    runner.forward = watched  # type: ignore[method-assign, assignment]
    free = runner.pool.num_available
    warm_up_passes(runner, max_rows=2048, adapter=adapter)
    assert sizes == [1, 2, 4, 8, 16, 32, 64, 96]  # all that the cache holds
    sizes.clear()
    warm_up_passes(runner, max_rows=16, adapter=adapter)
    assert sizes == [1, 2, 4, 8, 16]
    assert runner.pool.num_available == free


def test_a_model_without_modules_for_adapters_needs_no_warm_up_of_them() -> None:
    assert adapter_of_nothing(engine_model(make_hf_model("qwen3_5"))) is None
