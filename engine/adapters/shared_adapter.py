"""An adapter of a model that several ranks share: each has its part of every product."""

from pathlib import Path

import torch

from outrider.engine.adapters.read_adapter import Adapter, read_adapter_file
from outrider.engine.model.shard import Shard
from outrider.engine.model.shared_config import share_of
from outrider.engine.model.whole_ends import whole_config
from outrider.engine.parallel.runner import ParallelRunner


def read_shared_adapter(folder: Path, runner: ParallelRunner, *, max_bytes: int) -> Adapter:
    """Read an adapter, and keep the other ranks' parts for the first pass that needs them.

    Where a projection's outputs are cut, A is whole and B has the rank's rows; where its inputs
    are, A has the rank's columns, and the sum over the ranks adds the parts. The bytes that are
    told, and bounded, are those of the whole. Raises as `read_adapter` does.
    """
    model = runner.model
    config = whole_config(model.config)
    file = read_adapter_file(folder, config, dtype=model.dtype, max_bytes=max_bytes)
    count = model.config.num_ranks
    parts = []
    for rank in range(count):
        shard = Shard(rank=rank, count=count)
        device = model.device if rank == 0 else torch.device("cpu")
        parts.append(file.share(config, shard).weights(share_of(config, shard), device))
    runner.keep_parts(parts[0], parts[1:])
    return Adapter(weights=parts[0], info=file.info)
