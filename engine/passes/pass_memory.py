"""Device memory that a pass takes while it runs, measured with the largest that may come."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from outrider.engine.config import MAX_SCORED_ROWS
from outrider.engine.model.protocol import CausalModel
from outrider.engine.passes.runner import ForwardSlice, ModelRunner

# A pass asks for logits of at most so many rows for each sequence, a tree's, and of scored rows.
_LOGIT_ROWS: Final = 16
# Beside the model's own float32 logits, copies that choosing tokens makes: rules, noise, chances.
_LOGIT_COPIES: Final = 3


class DeviceMemory(Protocol):
    """The memory that an allocator reports."""

    def reset_peak(self) -> None:
        """Forget the peak so far."""

    def used_bytes(self) -> int:
        """Return the bytes in use now."""

    def peak_bytes(self) -> int:
        """Return the most that was in use since the last `reset_peak`."""


class CudaMemory:
    """torch's allocator of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def reset_peak(self) -> None:
        """See `DeviceMemory`."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def used_bytes(self) -> int:
        """See `DeviceMemory`."""
        return torch.cuda.memory_allocated(self._device)

    def peak_bytes(self) -> int:
        """See `DeviceMemory`."""
        return torch.cuda.max_memory_allocated(self._device)


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestPass:
    """The largest pass that may come. `kv_dtype`: of the cache."""

    max_rows: int
    max_sequences: int
    block_size: int
    kv_dtype: torch.dtype


def measure_pass_bytes(
    model: CausalModel,
    largest: LargestPass,
    *,
    memory: DeviceMemory | None = None,
    make_runner: Callable[..., ModelRunner] = ModelRunner,
) -> int:
    """Run the pass on a cache of just its size, and return its peak.

    Its cache is not counted, attention's workspace and what is chosen from its logits are.
    """
    if memory is None:
        memory = CudaMemory(model.device)
    with _prepared(model, largest, make_runner) as (runner, piece):
        before_bytes = memory.used_bytes()
        memory.reset_peak()
        runner.forward([piece])
        runner.wait()
        peak_bytes = memory.peak_bytes() - before_bytes
    return peak_bytes + _LOGIT_COPIES * piece.num_logit_rows * model.config.vocab_size * 4


def run_largest_pass(
    model: CausalModel, largest: LargestPass, *, make_runner: Callable[..., ModelRunner]
) -> None:
    """Run it as `measure_pass_bytes` does, beside a rank that measures."""
    with _prepared(model, largest, make_runner) as (runner, piece):
        runner.forward([piece])
        runner.wait()


@contextmanager
def _prepared(
    model: CausalModel, largest: LargestPass, make_runner: Callable[..., ModelRunner]
) -> Iterator[tuple[ModelRunner, ForwardSlice]]:
    """Yield a runner whose cache has just room for the pass, and the pass's rows."""
    block_size = largest.block_size
    num_rows = min(largest.max_rows, model.config.max_position_embeddings)
    with torch.inference_mode():
        runner = make_runner(
            model=model,
            num_blocks=-(-num_rows // block_size) + 1,
            block_size=block_size,
            prefix_caching=False,
            kv_dtype=largest.kv_dtype,
            cuda_graphs=False,
        )
        view = runner.new_view("pass-memory")
        view.reserve(num_rows)
        yield (
            runner,
            ForwardSlice(
                view=view,
                token_ids=[row % model.config.vocab_size for row in range(num_rows)],
                start_slot=0,
                num_logit_rows=min(num_rows, _LOGIT_ROWS * largest.max_sequences + MAX_SCORED_ROWS),
            ),
        )
        view.release()
