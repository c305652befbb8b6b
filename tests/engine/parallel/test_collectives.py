"""Sums that are asked for in the order of the ranks are made so, on every rank."""

import pytest
import torch
from torch import Tensor

from outrider.engine.parallel import collectives
from outrider.engine.parallel.collectives import TorchCollectives


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_in_order_adds_rank_by_rank_in_float32(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four ranks' parts, gathered by hand; another order, or 16 bits between, gives other bits."""
    parts = (torch.randn(4, 40, 64) * 2.0 ** torch.arange(4)[:, None, None]).to(dtype)

    def gather(found: Tensor, own: Tensor) -> None:
        assert own.dtype == torch.uint8  # not every library adds or even knows every type
        found.copy_(parts.view(-1).view(torch.uint8))

    monkeypatch.setattr(collectives, "_all_gather", gather)
    each = [part.float() for part in parts]
    right = (((each[0] + each[1]) + each[2]) + each[3]).to(dtype)
    other = parts[3] + parts[2] + parts[1] + parts[0]
    assert not torch.equal(right, other)
    for rank in range(4):
        ours = TorchCollectives(rank=rank, count=4, device=torch.device("cpu"))
        assert torch.equal(ours.sum(parts[rank].clone(), in_order=True), right)
