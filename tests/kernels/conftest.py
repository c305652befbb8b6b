"""Kernel tests run on the GPU where there is one, else in Triton's interpreter."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.kernels.triton_support import triton, use_kernels


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Return the device on which the kernels under test run."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def triton_kernels() -> Iterator[None]:
    """Launchers run their Triton kernels, on the CPU too."""
    if triton is None:
        pytest.skip("there is no triton for this system")
    with use_kernels("triton"):
        yield


@pytest.fixture
def equal_rows(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products in the interpreter treat all rows of a tile alike, as a GPU does.

    It multiplies with numpy, whose BLAS sums some rows of a tile in another order on some
    processors; einsum's own loops do not.
    """

    def product(left: Any, right: Any, dtype: Any = None) -> Any:
        return np.einsum("...ik,...kj->...ij", left, right, dtype=dtype, casting="unsafe")

    if device.type == "cpu":
        monkeypatch.setattr(np, "matmul", product)


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill memory that is allocated without being written with NaN or large numbers."""
    empty = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> Tensor:
        tensor = empty(*args, **kwargs)
        return tensor.fill_(float("nan") if tensor.is_floating_point() else 1 << 28)

    monkeypatch.setattr(torch, "empty", poisoned)
