"""Device memory that a pass takes while it runs, measured with the largest that may come."""

from typing import Final, Protocol

import torch

from engine.model.protocol import CausalModel
from engine.passes.runner import ForwardSlice, ModelRunner

# A pass asks for logits of at most so many rows for each sequence: a tree's.
_LOGIT_ROWS: Final = 16
# Beside the model's own float32 logits, copies that choosing tokens makes: rules, noise, chances.
_LOGIT_COPIES: Final = 3


class DeviceMemory(Protocol):
    """What an allocator says of its memory."""

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


@torch.inference_mode()
def measure_pass_bytes(
    model: CausalModel,
    *,
    max_rows: int,
    max_sequences: int,
    block_size: int,
    kv_dtype: torch.dtype,
    memory: DeviceMemory | None = None,
) -> int:
    """Run a pass of `max_rows` rows on a cache of just that size, and return its peak.

    Its cache is not counted, attention's workspace and what is chosen from its logits are.
    """
    if memory is None:
        memory = CudaMemory(model.device)
    num_rows = min(max_rows, model.config.max_position_embeddings)
    runner = ModelRunner(
        model=model,
        num_blocks=-(-num_rows // block_size) + 1,
        block_size=block_size,
        prefix_caching=False,
        kv_dtype=kv_dtype,
        cuda_graphs=False,
    )
    view = runner.new_view("pass-memory")
    view.reserve(num_rows)
    num_logit_rows = min(num_rows, _LOGIT_ROWS * max_sequences)
    piece = ForwardSlice(
        view=view,
        token_ids=[row % model.config.vocab_size for row in range(num_rows)],
        start_slot=0,
        num_logit_rows=num_logit_rows,
    )
    before_bytes = memory.used_bytes()
    memory.reset_peak()
    runner.forward([piece])
    runner.wait()
    peak_bytes = memory.peak_bytes() - before_bytes
    view.release()
    return peak_bytes + _LOGIT_COPIES * num_logit_rows * model.config.vocab_size * 4
