"""Layers with a window keep only its keys, and every answer stays as it was."""

from pathlib import Path

import pytest
import torch

from outrider.draft.config import DraftConfig
from outrider.engine.config import EngineConfig
from outrider.engine.core import Engine
from outrider.engine.model.load import load_model
from outrider.engine.passes.runner import ModelRunner
from outrider.kernels.triton_support import use_kernels
from tests.engine.passes.twins import record_eagerly
from tests.engines import (
    Pair,
    serve,
    texts,
    tiny_pair,
)
from tests.laws.mixed import long_requests
from tests.laws.same_answers import ON_DEVICE, WARM, Way, assert_same_answers, by, plainly
from tests.models import save_hf_model

BLOCK_SIZE = 4
# For prompts that go far beyond the window (7 or 9 tokens) and what is kept behind it (64).
LENGTHS = (3, 20, 31, 60, 97, 140, 180)
BLOCKS = 70
WINDOW_BLOCKS = 66


@pytest.fixture(
    scope="module",
    params=[
        "gemma2",
        pytest.param("mistral", marks=pytest.mark.slow),  # all layers have a window
        pytest.param("gpt-oss", marks=pytest.mark.slow),
        pytest.param("gemma4_text", marks=pytest.mark.slow),  # whose layers differ in their heads
        pytest.param("starcoder2", marks=pytest.mark.slow),  # through transformers
    ],
)
def pair(request: pytest.FixtureRequest) -> Pair:
    return tiny_pair(request.param, max_positions=256, drift=0.03)


@pytest.mark.parametrize("on_device", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_answers_do_not_depend_on_the_windows_cache(pair: Pair, on_device: bool) -> None:
    few = by(
        block_size=BLOCK_SIZE,
        large_blocks=BLOCKS,
        small_blocks=BLOCKS,
        window_blocks=WINDOW_BLOCKS,
        on_device=on_device,
        draft=DraftConfig(max_branching=4),
        config=EngineConfig(max_tokens_per_step=96),
    )
    vary = few | WARM | Way(shows=("num_preemptions",))
    served = assert_same_answers(long_requests(LENGTHS), of=pair, vary=vary)
    assert served.engine.stats().tiers["large"].prefix_cache_hits > 0


@pytest.mark.parametrize(
    "architecture", ["gemma2", pytest.param("gpt-oss", marks=pytest.mark.slow)]
)
def test_bfloat16_answers_do_not_depend_on_the_windows_cache(
    architecture: str, tmp_path: Path
) -> None:
    """The products and attention that bfloat16 runs, which read the cache by plans of their own."""
    save_hf_model(architecture, tmp_path, vocab_size=131, max_position_embeddings=256)
    model = load_model(str(tmp_path), dtype="bfloat16", deterministic=True)

    def answers(num_window_blocks: int | None) -> dict[str, list[int]]:
        runner = ModelRunner(
            model=model,
            num_blocks=BLOCKS,
            block_size=BLOCK_SIZE,
            num_window_blocks=num_window_blocks,
        )
        engine = Engine(runners={"large": runner})
        return texts(serve(engine, long_requests(LENGTHS)))

    assert answers(WINDOW_BLOCKS) == answers(None)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of what padding holds, interpreted
def test_plans_on_the_device_find_the_windows_cache() -> None:
    """In Triton's interpreter: the passes that a GPU would run, recorded ones among them."""
    pair = tiny_pair("gemma2", max_positions=256, drift=0.03)
    requests = long_requests(LENGTHS, max_tokens=8)[7:8]
    plainly(pair, requests)  # what is right is not computed by the interpreter

    def record(engine: Engine) -> None:
        for runner in engine._runners.values():
            assert runner.capture_graphs(capture=record_eagerly, max_rows=8)

    many = by(block_size=BLOCK_SIZE, large_blocks=200, small_blocks=200)
    vary = many | ON_DEVICE | by(window_blocks=WINDOW_BLOCKS) | Way(watch=record)
    with use_kernels("triton"), torch.inference_mode():
        assert_same_answers(requests, of=pair, vary=vary)
