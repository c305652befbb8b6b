"""The library's own threads: any number of callers, forks, and threads that never come."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from outrider.kernels.cpu.panel_linear import PanelLinear
from outrider.kernels.cpu.product_library import product_support
from tests.kernels.layers.bits import same_bits, torch_threads

pytestmark = pytest.mark.skipif(
    product_support().library is None, reason=f"products: {product_support().detail}"
)

_FORKED = """
import os, sys, torch
from outrider.kernels.cpu.panel_linear import PanelLinear
torch.set_num_threads(3)
torch.manual_seed(0)
linear = PanelLinear(torch.randn(2048, 512).bfloat16())
x = torch.randn(4, 512).bfloat16()
expected = linear(x)
pid = os.fork()
if pid == 0:
    os._exit(0 if linear(x).equal(expected) else 3)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) or not linear(x).equal(expected))
"""


def test_callers_in_many_threads_get_their_own_results() -> None:
    generator = torch.Generator().manual_seed(0)
    linear = PanelLinear(torch.randn(1024, 512, generator=generator).bfloat16())
    rows = [torch.randn(1 + n % 5, 512, generator=generator).bfloat16() for n in range(64)]
    with torch_threads(1):
        expected = [linear(x) for x in rows]

    def compute(index: int) -> bool:
        torch.set_num_threads(1 + index % 4)
        return same_bits(linear(rows[index % 64]), expected[index % 64])

    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(4) as callers:
            assert all(callers.map(compute, range(2000)))
    finally:
        torch.set_num_threads(before)


def test_more_threads_than_processors_and_then_fewer() -> None:
    linear = PanelLinear(torch.randn(4096, 256).bfloat16())
    x = torch.randn(3, 256).bfloat16()
    with torch_threads(1):
        expected = linear(x)
    for num_threads in (9, 2, 16, 3):
        with torch_threads(num_threads):
            assert all(same_bits(linear(x), expected) for _ in range(50))


@pytest.mark.slow
def test_a_forked_child_computes_too() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", _FORKED], timeout=120)
    assert done.returncode == 0
