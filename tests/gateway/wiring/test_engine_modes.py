"""The engine's modes, from flag to runner: cache type, deterministic, CUDA graphs, overlap."""

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from outrider.draft.device.device_growth import DeviceGrowth
from outrider.draft.host_growth import HostGrowth
from outrider.draft.tree_drafter import TreeDrafter
from outrider.engine.errors import EngineError
from outrider.engine.model.kv_cache import KVCache
from outrider.engine.passes.level_graphs import LevelConfig, estimate_level_bytes
from outrider.engine.passes.pass_graphs import estimate_bytes
from outrider.engine.passes.runner import ModelRunner
from outrider.engine.queue.fair_queue import FairQueue
from outrider.engine.queue.slo_queue import SloQueue
from outrider.gateway.cli import app
from outrider.gateway.engines.backends.step_loop import no_progress
from outrider.gateway.settings.tree import Settings, load_settings
from outrider.gateway.wiring import build as wiring
from outrider.gateway.wiring import engine as engine_wiring
from outrider.gateway.wiring.kv_budget import cache_sizes
from outrider.kernels.cpu import product_library
from outrider.kernels.cpu.product_library import product_support
from outrider.kernels.layers import row_invariant_linear
from outrider.kernels.triton_support import use_kernels
from outrider.verifier.params import Tier

QUICK = {
    "engine.device": "cpu",
    "engine.dtype": "float32",
    "engine.max_context": 64,
    "engine.num_threads": 1,
    "speculation.adaptive": False,
}


def settings_of(**flags: Any) -> Settings:
    changed = {key.replace("__", "."): value for key, value in flags.items()}
    return load_settings(environ={}, flags=QUICK | changed)


def runners_of(**flags: Any) -> dict[Tier, ModelRunner]:
    return dict(engine_wiring.load_runners(settings_of(**flags), no_progress))


@pytest.fixture
def noted_flags(monkeypatch: pytest.MonkeyPatch) -> dict[str, Settings]:
    """Return what `serve` would run with."""
    noted: dict[str, Settings] = {}
    monkeypatch.setattr(
        "outrider.gateway.tools.commands.serve_command._serve",
        lambda settings: noted.update(settings=settings),
    )
    return noted


@pytest.mark.parametrize(
    ("arguments", "name", "value"),
    [
        (("--kv-cache-dtype", "fp8"), "kv_cache_dtype", "fp8"),
        (("--deterministic",), "deterministic", True),
        (("--no-deterministic",), "deterministic", False),
        (("--set", "engine.deterministic=auto"), "deterministic", "auto"),
        (("--no-cuda-graphs",), "cuda_graphs", False),
        (("--no-overlap",), "overlap", False),
        (("--set", "engine.cuda_graphs=false"), "cuda_graphs", False),
        (("--set", "engine.num_threads=3"), "num_threads", 3),
        (("--set", "engine.num_threads=3", "--num-threads", "2"), "num_threads", 2),
        ((), "kv_cache_dtype", "auto"),
        ((), "deterministic", "auto"),
        ((), "cuda_graphs", True),
        ((), "overlap", True),
    ],
)
def test_each_mode_has_a_flag(
    arguments: tuple[str, ...], name: str, value: object, noted_flags: dict[str, Settings]
) -> None:
    result = CliRunner().invoke(app, ["serve", *arguments])
    assert result.exit_code == 0, result.output
    assert getattr(noted_flags["settings"].engine, name) == value


@pytest.mark.slow
def test_modes_reach_the_runners() -> None:
    usual = runners_of()
    for runner in usual.values():
        assert runner.kv_cache.dtype == torch.float32
        assert runner.kv_cache.groups[0].scales is None
        assert runner.cuda_graphs
        assert not runner.model.deterministic
    changed = runners_of(
        engine__kv_cache_dtype="fp8", engine__deterministic=True, engine__cuda_graphs=False
    )
    for runner in changed.values():
        assert runner.kv_cache.dtype == torch.float8_e4m3fn
        assert runner.kv_cache.groups[0].scales is not None
        assert not runner.cuda_graphs
        assert runner.model.deterministic


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("settings", "is_deterministic"),
    [
        ({}, True),
        ({"engine__deterministic": False}, False),
        ({"engine__kv_cache_dtype": "fp8"}, False),
        ({"engine__dtype": "float32"}, False),
    ],
)
def test_auto_is_deterministic_where_that_costs_nothing(
    settings: dict[str, Any], is_deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_invariant_linear, "prefers_onednn", lambda: False)
    has_library = product_support().library is not None
    for runner in runners_of(**{"engine__dtype": "bfloat16"} | settings).values():
        assert runner.model.deterministic is (is_deterministic and has_library)


def test_auto_is_the_ordinary_mode_where_onednn_has_better_products(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(row_invariant_linear, "prefers_onednn", lambda: True)
    for runner in runners_of(engine__dtype="bfloat16").values():
        assert not runner.model.deterministic


def test_the_same_memory_holds_more_blocks_in_fp8() -> None:
    sizes = {
        name: runners_of(
            engine__kv_cache_dtype=name, engine__kv_cache_gib=0.002, engine__max_context=None
        )["small"]
        for name in ("auto", "fp8")
    }
    budget = 0.002 * 2**30
    for runner in sizes.values():
        config, dtype = runner.model.config, runner.kv_cache.dtype
        own = KVCache.bytes_per_block(config, block_size=16, dtype=dtype) * runner.num_blocks
        assert own < budget
    assert 3 * sizes["auto"].num_blocks < sizes["fp8"].num_blocks  # a quarter, and the scales


def test_recording_is_reported_and_comes_last(monkeypatch: pytest.MonkeyPatch) -> None:
    def capture(runner: ModelRunner, on_progress: Callable[[int, int], None]) -> int:
        on_progress(1, 4)
        return 4

    drafting: list[ModelRunner] = []

    def capture_levels(runner: ModelRunner, config: LevelConfig) -> int:
        drafting.append(runner)
        return 12

    monkeypatch.setattr(ModelRunner, "capture_levels", capture_levels)
    monkeypatch.setattr(ModelRunner, "capture_graphs", capture)
    stages: list[tuple[str, float]] = []
    settings = settings_of(speculation__on_device="on")
    runners = engine_wiring.load_runners(
        settings, lambda stage, share: stages.append((stage, share))
    )
    assert drafting == [runners["small"]]
    assert sorted(stages[-2:]) == [
        ("capturing graphs of the large model", 0.25),
        ("capturing graphs of the small model", 0.25),
    ]
    assert {stage for stage, _ in stages[:-2]} == {
        "loading the large model",
        "loading the small model",
    }


def test_too_little_memory_for_graphs_is_an_error_with_ways_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def capture(*_: object) -> int:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(ModelRunner, "capture_graphs", capture)
    with pytest.raises(EngineError, match=r"--no-cuda-graphs .*engine\.cuda_graphs = false"):
        runners_of()


def test_deterministic_on_a_gpu_needs_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.kernels.triton_support.triton", None)
    wanted = settings_of(engine__deterministic=True)
    engine_wiring._check_modes(wanted, torch.device("cpu"))
    engine_wiring._check_modes(settings_of(), torch.device("cuda"))
    with pytest.raises(EngineError, match=r"needs Triton.*--device cpu"):
        engine_wiring._check_modes(wanted, torch.device("cuda"))


def test_the_cache_leaves_room_for_the_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    models = {tier: runner.model for tier, runner in runners_of().items()}
    needed = sum(estimate_bytes(model.config, model.dtype) for model in models.values())
    needed += estimate_level_bytes(models["small"].dtype)
    taken = 1 << 20
    monkeypatch.setattr("outrider.gateway.wiring.kv_budget._pass_bytes", lambda *_: (taken, []))
    free = needed + taken + (8 << 20)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (free, 1 << 40))
    num_blocks = {
        on: cache_sizes(
            settings_of(
                engine__max_context=None, engine__cuda_graphs=on, engine__small_kv_ratio=1.0
            ),
            models,
            torch.device("cuda"),
        ).num_blocks["large"]
        for on in (True, False)
    }
    bytes_per_block = sum(
        KVCache.bytes_per_block(model.config, block_size=16, dtype=model.dtype)
        for model in models.values()
    )
    assert 0.9 * 0.97 * (8 << 20) < num_blocks[True] * bytes_per_block <= 0.97 * (8 << 20)
    assert num_blocks[False] > 2 * num_blocks[True]


def test_the_rank_with_the_least_room_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    models = {tier: runner.model for tier, runner in runners_of().items()}
    large = models["large"]
    per_block = KVCache.bytes_per_block(large.config, block_size=16, dtype=large.dtype)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (100 << 20, 1 << 40))
    found = []
    for others in ([], [200 << 20], [200 << 20, 1000 + 13 * per_block]):
        taken = (1000, others)
        monkeypatch.setattr(
            "outrider.gateway.wiring.kv_budget._pass_bytes", lambda *_, own=taken: own
        )
        sizes = cache_sizes(
            settings_of(engine__max_context=None, engine__cuda_graphs=False),
            models,
            torch.device("cuda"),
        )
        found.append(sizes.num_blocks)
    assert found[0] == found[1]
    assert found[2] == {"small": found[0]["small"], "large": 12}  # a part stays free


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["reference", "triton"])
def test_kernels_are_compiled_before_anyone_waits_for_them(
    kernels: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On an engine that is thrown away, before passes are timed, and only where Triton runs."""
    order: list[str] = []
    monkeypatch.setattr(
        "outrider.engine.warm_up.warm_up", lambda engine, on_progress: order.append("warm_up")
    )
    monkeypatch.setattr(
        "outrider.engine.passes.warm_up.warm_up_passes",
        lambda runner, max_rows, adapter=None: order.append(f"{max_rows} rows, {adapter is None}"),
    )
    monkeypatch.setattr(wiring, "measure_budget", lambda *arguments: order.append("measure_budget"))
    settings = settings_of(speculation__on_device="on", adapters__folder=str(tmp_path))
    with use_kernels(kernels):
        engine = wiring.build_engine(settings, no_progress)
    compiled = ["2048 rows, True", "2048 rows, False"] * 2 + ["warm_up"]
    assert order == compiled * (kernels == "triton") + ["measure_budget"]
    assert isinstance(engine._drafter, TreeDrafter)
    assert isinstance(engine._drafter._last["small"], DeviceGrowth)


@pytest.mark.slow_cases
@pytest.mark.parametrize("wanted", ["auto", "off"])
def test_on_the_cpu_trees_grow_on_the_host(wanted: str) -> None:
    settings = settings_of(speculation__on_device=wanted)
    engine = wiring.build_engine(settings, no_progress)
    assert isinstance(engine._drafter, TreeDrafter)
    assert isinstance(engine._drafter._last["small"], HostGrowth)


def test_the_start_log_tells_of_a_library_that_is_not_this_version_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    built = product_library.library_path(Path(product_library.__file__).parent)
    if built is None:
        pytest.skip("the library was not built")
    shutil.copy(built, tmp_path)
    monkeypatch.setattr(product_library, "_VERSION", 0)
    stale = product_library.product_support(tmp_path)
    monkeypatch.setattr(product_library, "product_support", lambda: stale)
    with caplog.at_level(logging.WARNING):
        runners_of()
    (told,) = [text for text in caplog.messages if "matrix products" in text]
    assert "install again" in told
    assert "C++ compiler" in told


@pytest.mark.slow
def test_the_queue_is_the_one_of_the_settings() -> None:
    runners = runners_of()
    for queue, kind in ("fair", FairQueue), ("deadlines", SloQueue):
        engine = engine_wiring.join(settings_of(slo__queue=queue), runners, None)
        assert type(engine.scheduler._policy) is kind
    by_default = engine_wiring.join(settings_of(), runners, None)
    assert type(by_default.scheduler._policy) is SloQueue
