"""Bring host arrays to a device and tensors to the host, several in one copy."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# Arrays begin at multiples of it, so that kernels are compiled for one alignment only.
_ALIGNED_BYTES: Final = 16


def upload(values: npt.NDArray[Any], device: torch.device) -> Tensor:
    """The array on the device, same shape and type; on the CPU the two share their memory.

    The host does not wait for the device: the copy goes through pinned memory, which torch's
    allocator keeps until it is done. (From pageable memory it would wait for the whole stream.)
    """
    tensor = torch.from_numpy(values)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def upload_all(arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> list[Tensor]:
    """`upload` for several arrays, in one copy."""
    sizes = [-(-array.nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES for array in arrays]
    starts = list(accumulate(sizes, initial=0))
    packed = np.zeros(starts[-1], dtype=np.uint8)
    for start, array in zip(starts, arrays, strict=False):
        packed[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view("u1")
    there = upload(packed, device)
    return [
        there[start : start + array.nbytes]
        .view(torch.from_numpy(array[:0]).dtype)
        .view(array.shape)
        for start, array in zip(starts, arrays, strict=False)
    ]


def read_back(tensors: Sequence[Tensor]) -> list[npt.NDArray[Any]]:
    """The tensors on the host, same shapes and types; waits for the device once, for one copy."""
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return [tensor.numpy() for tensor in tensors]
    parts = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    packed = torch.cat(parts).cpu().numpy()
    ends = list(accumulate(len(part) for part in parts))
    return [
        packed[end - len(part) : end]
        .copy()  # at an address that suits the type
        .view(torch.empty(0, dtype=tensor.dtype).numpy().dtype)
        .reshape(tensor.shape)
        for tensor, part, end in zip(tensors, parts, ends, strict=True)
    ]
