"""Bring host arrays to a device."""

from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor


def upload(values: npt.NDArray[Any], device: torch.device) -> Tensor:
    """The array on the device, same shape and type; on the CPU the two share their memory.

    The host does not wait for the device: the copy goes through pinned memory, which torch's
    allocator keeps until it is done. (From pageable memory it would wait for the whole stream.)
    """
    tensor = torch.from_numpy(values)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
