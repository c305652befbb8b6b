"""The kernels of trees, of either kind."""

from collections.abc import Iterator

import pytest

from tests.kernels.growing import tree_kernels


@pytest.fixture(params=["reference", "triton"])
def kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run the test with the references, and with the kernels."""
    with tree_kernels(request.param):
        yield
