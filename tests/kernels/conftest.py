"""Kernel tests run on the GPU where there is one, else in Triton's interpreter."""

from collections.abc import Iterator

import pytest
import torch

from kernels.triton_support import triton, use_kernels


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the kernels under test run."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def triton_kernels() -> Iterator[None]:
    """Launchers run their Triton kernels, on the CPU too."""
    if triton is None:
        pytest.skip("there is no triton for this system")
    with use_kernels("triton"):
        yield
