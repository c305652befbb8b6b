"""Exchanges of a model's ranks, over torch.distributed: NCCL on GPUs, gloo on CPUs."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

# The ranks are on one machine, and what they listen on is not for others.
_INTERFACE: Final = "lo"
_INTERFACE_VARIABLES: Final = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
# Its name from torch 2.13 on, and the one before.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class TorchCollectives:
    """Exchanges tensors of one device a rank; nothing can be exchanged before `connect`.

    A process has one at a time: the group is torch.distributed's own.
    """

    def __init__(self, *, rank: int, count: int, device: torch.device) -> None:
        self._rank = rank
        self._count = count
        self._device = device

    def connect(self, folder: Path, *, timeout_s: float) -> None:
        """Meet the other ranks, by a file in `folder`; raises RuntimeError where they do not come.

        `timeout_s`: how long this and each later exchange may take.
        """
        on_gpu = self._device.type == "cuda"
        with _on_this_machine():
            dist.init_process_group(
                "nccl" if on_gpu else "gloo",
                store=dist.FileStore(str(folder / "ranks"), self._count),  # type: ignore[attr-defined]
                rank=self._rank,
                world_size=self._count,
                timeout=timedelta(seconds=timeout_s),
                device_id=self._device if on_gpu else None,
            )

    def sum(self, rows: Tensor, *, in_order: bool) -> Tensor:
        """Return the sum of all ranks' tensors, on every rank; `rows` may be overwritten."""
        rows = rows.contiguous()
        # On the CPU 16 bits would be rounded after every summand.
        if not in_order and (rows.is_cuda or rows.dtype == torch.float32):
            dist.all_reduce(rows)
            return rows
        parts = rows.new_empty((self._count, *rows.shape))
        _all_gather(_as_bytes(parts), _as_bytes(rows))
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part
        return total.to(rows.dtype)

    def gather(self, rows: Tensor) -> list[Tensor] | None:
        """Return all ranks' tensors, in order, on rank 0; None on the others."""
        rows = rows.contiguous()
        parts = None
        if self._rank == 0:
            parts = [torch.empty_like(rows) for _ in range(self._count)]
        dist.gather(_as_bytes(rows), parts and [_as_bytes(part) for part in parts], dst=0)
        return parts

    def broadcast(self, values: Tensor) -> None:
        """Send rank 0's tensor to the others, whose own is overwritten."""
        dist.broadcast(values, src=0)

    def abort(self) -> None:
        """End exchanges that wait for a rank that is gone, on GPUs; on CPUs they end themselves."""
        if self._device.type == "cuda" and dist.is_initialized():
            dist.distributed_c10d._abort_process_group()

    @staticmethod
    def close() -> None:
        """Leave the group, if it was met."""
        if dist.is_initialized():
            dist.destroy_process_group()


def _as_bytes(tensor: Tensor) -> Tensor:
    """Return a view, uint8 [bytes]: gloo does not know every type of numbers."""
    return tensor.view(-1).view(torch.uint8)


@contextmanager
def _on_this_machine() -> Iterator[None]:
    """Listen on the loopback interface, unless the environment names another one."""
    ours = [name for name in _INTERFACE_VARIABLES if name not in os.environ]
    os.environ.update(dict.fromkeys(ours, _INTERFACE))
    try:
        yield
    finally:
        for name in ours:
            del os.environ[name]
