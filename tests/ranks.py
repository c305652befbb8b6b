"""Models in parts, each in a process of its own, on the CPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from outrider.engine.core import Engine
from outrider.engine.model.load import load_model
from outrider.engine.model.protocol import CausalModel
from outrider.engine.parallel.messages import ModelSource
from outrider.engine.parallel.ranks import Ranks
from outrider.engine.request import EngineRequest
from tests.engines import Pair, heldout_prompts, make_engine, make_request
from tests.heads import make_head_engine


@dataclass(frozen=True, kw_only=True)
class Parted:
    """Rank 0's part of a model, and its hold on the others."""

    model: CausalModel
    ranks: Ranks

    def engine(self, pair: Pair, **options: Any) -> Engine:
        """An engine with this model in the place of the pair's large one."""
        return make_engine(replace(pair, large=self.model), ranks=self.ranks, **options)

    def head_engine(self, pair: Pair, **options: Any) -> Engine:
        """The same with a head that drafts."""
        return make_head_engine(replace(pair, large=self.model), ranks=self.ranks, **options)


@contextmanager
def parted(folder: Path | str, count: int, **options: Any) -> Iterator[Parted]:
    """Load a model on so many ranks; options: `ModelSource`'s."""
    source = ModelSource(path=str(folder), **options)
    ranks = Ranks(count, source, device=torch.device("cpu"))
    try:
        model = load_model(
            source.path,
            dtype=source.dtype,
            deterministic=source.deterministic,
            rounding=source.rounding,
            shard=ranks.shard,
        )
        ranks.join(model)
        yield Parted(model=model, ranks=ranks)
    finally:
        ranks.close()


def requests() -> list[EngineRequest]:
    """Four prompts of the shipped pair, greedy and sampled."""
    return [
        make_request(str(number), prompt, seed=number, temperature=0.9 if number % 2 else 0.0)
        for number, prompt in enumerate(heldout_prompts(4))
    ]
