"""Compile what an engine of the served pair launches, side by side, without touching a GPU.

One engine of an 8B target and a 0.6B drafter needs about a hundred variants of the kernels, which
one process compiles for two minutes. Here each process records all launches of models of one layer
(instead of making them), and compiles its share into Triton's cache, TRITON_CACHE_DIR. A machine
with the same Triton, of the same sources, finds them there.

    python -m benchmarks.gpu.gpu_variants --workers 14 --launchers

With --launchers the C programs that launch them are built too, for which gcc and CUDA's library
must be there. The exit status is 1 where something does not compile.
"""

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.gpu.gpu_engine_cases import PairSizes
from benchmarks.gpu.gpu_kernel_cases import TINY, Cases
from benchmarks.gpu.gpu_models import QWEN3_06B, QWEN3_8B, RandomReader
from benchmarks.gpu.gpu_token_cases import sampling_rows
from outrider.draft.config import DraftConfig
from outrider.draft.device.draft_levels import capture_levels
from outrider.draft.device.tree_warm_up import warm_up_trees
from outrider.engine.model.config import ModelConfig
from outrider.engine.model.decoder import DecoderModel
from outrider.engine.passes.cuda_capture import Run
from outrider.engine.passes.runner import ForwardSlice, ModelRunner
from outrider.kernels.sampling.sample import SamplingTable, top_tokens
from outrider.kernels.trees.verify_tree import verify_tree
from outrider.kernels.triton_support import Launch, record_launches

ARCHITECTURE = 90
_CPU = torch.device("cpu")
_SIZES = PairSizes()
_UNRECORDED_ROWS = (1, 12, 17, 300, 1024)  # a row of logits each; and trees
_MOVES = (4, 16, 40, 200)
_DRAWN = ((0.0, False), (0.8, False), (0.8, True))  # temperature, truncation


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """A variant and how long it took; `problem`: why there is none."""

    kernel: str
    seconds: float
    launcher_s: float = 0.0
    problem: str | None = None


# ---- what is launched ---------------------------------------------------------------------------


class EmptyReader(RandomReader):
    """`RandomReader` whose tensors hold anything: nothing is computed with them."""

    def read(self, name: str, shape: Iterable[int]) -> Tensor:
        """Memory that nothing was written to, which costs nothing."""
        return torch.empty(tuple(shape), dtype=self.dtype)

    def read_joined(self, names: Sequence[str], sizes: Sequence[int], width: int) -> Tensor:
        """All matrices as one."""
        return torch.empty((sum(sizes), width), dtype=self.dtype)


def recorded_variants(large: ModelConfig, small: ModelConfig) -> dict[str, Launch]:
    """All that differs for the compiler, of recorded and other passes, levels, tokens and trees."""
    counts = patch("outrider.engine.passes.level_graphs.TREE_COUNTS", (1,))
    products = patch("torch.nn.functional.linear", _unmultiplied)
    with torch.inference_mode(), counts, products, record_launches(ARCHITECTURE) as launches:
        runners = [_record_passes(one) for one in (large, small)]
        for config in (_SIZES.draft_config, DraftConfig()):
            capture_levels(config, runners[1], runners[0])
            warm_up_trees(config, _CPU)
        _record_tokens(large.vocab_size)
        nodes = [torch.empty(64, dtype=torch.int64) for _ in range(5)]
        verify_tree(*nodes, num_trees=1, max_depth=_SIZES.draft_depth)
    return {launch.variant(): launch for launch in launches}


def _unmultiplied(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A product's shape."""
    del bias
    return torch.empty((*x.shape[:-1], weight.shape[0]), dtype=x.dtype)


def _once(run: Run) -> Run:
    """Run what is to be recorded, for its launches; its replay is nothing."""
    run()
    return lambda: None


def _record_passes(config: ModelConfig) -> ModelRunner:
    """Launches of a model's passes; a runner whose levels can be recorded."""
    one_layer = replace(config, layers=config.layers[:1])
    reader = EmptyReader(one_layer, dtype=_SIZES.dtype, device=_CPU)
    # The reader has the interface of the checkpoints' one.
    model = DecoderModel(config=one_layer, reader=reader, dtype=_SIZES.dtype, device=_CPU)  # type: ignore[arg-type]
    make = partial(ModelRunner, model=model, num_blocks=512, block_size=16, max_context=4096)
    recorded, other = make(), make(cuda_graphs=False)
    recorded.capture_graphs(capture=_once, max_rows=max(_SIZES.verified))
    view = other.new_view("variants")
    other.copy_blocks(view.reserve(1024))
    sizes = [*((rows, 1) for rows in _UNRECORDED_ROWS), (64, 64)]
    for rows, num_logit_rows in sizes:
        tokens = [1] * rows
        other.forward(
            [ForwardSlice(view=view, token_ids=tokens, start_slot=0, num_logit_rows=num_logit_rows)]
        )
    for count in _MOVES:
        slots = torch.arange(count)
        other.compact(slots, slots + 1)
    return recorded


def _record_tokens(vocab_size: int) -> None:
    """Launches of drawing tokens."""
    cases = Cases(shape=TINY, device=_CPU)
    for count in (1, 64):
        for temperature, truncates in _DRAWN:
            rows = sampling_rows(cases, count, temperature=temperature, truncates=truncates)
            logits = torch.empty(count, vocab_size)
            top_tokens(logits, rows, 1, with_probs=False)
            top_tokens(logits, rows, 3, with_probs=True)
    table = SamplingTable(
        parameters=torch.empty((4, 1), dtype=torch.int32),
        noise_keys=torch.empty((1, 9, 2), dtype=torch.int32),
        has_sampled=False,
        has_truncation=False,
    )
    index = torch.empty(64, dtype=torch.int64)
    table.rows(index, index)


# ---- compiling ----------------------------------------------------------------------------------


class _AssumedGPU:
    """Stands in for Triton's driver, so that its own specialisation and options are used."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        del device
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", ARCHITECTURE, 32)


def compile_share(index: int, count: int, *, launchers: bool) -> list[Compiled]:
    """Compile every `count`-th variant from `index` on; for a process of its own."""
    from triton.runtime import driver

    torch.set_num_threads(1)
    variants = recorded_variants(QWEN3_8B, QWEN3_06B)
    driver.set_active(_AssumedGPU())
    own = sorted(variants)[index::count]
    return [_compile(variants[name], launchers=launchers) for name in own]


def _compile(launch: Launch, *, launchers: bool) -> Compiled:
    """Compile a launch; what goes wrong is part of the result."""
    kernel = launch.kernel.fn.__name__
    started_s = time.perf_counter()
    compiled, problem = _attempted(
        lambda: launch.kernel.warmup(
            *launch.args,
            **launch.constexprs,
            num_warps=launch.num_warps,
            num_stages=launch.num_stages,
            grid=launch.grid,
        )
    )
    seconds = time.perf_counter() - started_s
    if problem is not None or not launchers:
        return Compiled(kernel=kernel, seconds=seconds, problem=problem)
    started_s = time.perf_counter()
    _, problem = _attempted(lambda: _build_launcher(compiled))
    launcher_s = time.perf_counter() - started_s
    return Compiled(kernel=kernel, seconds=seconds, launcher_s=launcher_s, problem=problem)


def _build_launcher(compiled: Any) -> None:
    from triton.backends.nvidia.driver import CudaLauncher

    CudaLauncher(compiled.src, compiled.metadata)


def _attempted(work: Callable[[], Any]) -> tuple[Any, str | None]:
    """The result, or what went wrong."""
    try:
        return work(), None
    except Exception as error:  # noqa: BLE001 - reported, and the other variants are compiled
        return None, repr(error)[:300]


def compile_variants(workers: int, *, launchers: bool) -> list[Compiled]:
    """Compile all variants in so many processes."""
    context = multiprocessing.get_context("spawn")
    # Neither the interpreter nor a GPU: for the processes, which import kernels anew.
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ |= {"OUTRIDER_KERNELS": "triton", "CUDA_VISIBLE_DEVICES": ""}
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        share = partial(compile_share, count=workers, launchers=launchers)
        return [one for part in pool.map(share, range(workers)) for one in part]


def main(argv: Sequence[str] | None = None) -> int:
    """Compile, and print seconds by kernel."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--launchers", action="store_true", help="build what launches them too")
    arguments = parser.parse_args(argv)
    started_s = time.perf_counter()
    done = compile_variants(arguments.workers, launchers=arguments.launchers)
    wall_s = time.perf_counter() - started_s
    print(
        f"{len(done)} variants in {wall_s:.1f} s: {sum(one.seconds for one in done):.1f} s of "
        f"compiling, {sum(one.launcher_s for one in done):.1f} s of launchers"
    )
    seconds: Counter[str] = Counter()
    for one in done:
        seconds[one.kernel] += one.seconds  # type: ignore[assignment]
    for kernel, total in seconds.most_common():
        print(f"{kernel:30} {total:6.1f} s")
    problems = [f"{one.kernel}: {one.problem}" for one in done if one.problem is not None]
    print("\n".join(problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
