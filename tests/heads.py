"""Engines whose large model is drafted for by a head."""

import tempfile
from functools import cache
from pathlib import Path

from draft.budget import TreeBudget
from draft.calibration import EdgeCalibration
from draft.config import DraftConfig
from draft.head_texts import Head
from draft.heads.protocol import HeadModel
from draft.heads.read_head import read_head
from draft.tree_drafter import TreeDrafter
from engine.config import EngineConfig
from engine.core import Engine
from engine.grammar.grammar import GrammarCompiler
from engine.passes.runner import ModelRunner
from engine.request import Tier
from tests.draft.heads.head_files import eagle3_weights, specforge_config, specforge_names, write_head
from tests.engines import Pair, tiny_pair
from verifier.coupled import CoupledVerifier


@cache
def random_pair() -> Pair:
    """The tiny pair with as many layers as a head reads."""
    return tiny_pair(num_layers=3)


@cache
def random_head(kind: str = "eagle3") -> HeadModel:
    """A head with random weights for `random_pair`, in a part of its vocabulary."""
    assert kind == "eagle3"
    weights = eagle3_weights(num_tokens=60)
    config = specforge_config(weights)
    with tempfile.TemporaryDirectory() as folder:
        path = write_head(Path(folder) / kind, specforge_names(weights), config)
        return read_head(path, random_pair().large)


def make_head_engine(
    pair: Pair,
    head: HeadModel,
    *,
    has_small: bool = False,
    draft: DraftConfig | None = None,
    budget: TreeBudget | None = None,
    num_blocks: int = 256,
    head_blocks: int | None = None,
    prefix_caching: bool = True,
    config: EngineConfig | None = None,
    grammars: dict[Tier, GrammarCompiler] | None = None,
    calibration: EdgeCalibration | None = None,
) -> Engine:
    """The large tier with a head; with the small tier beside it where it `has_small`."""
    large = ModelRunner(
        model=pair.large,
        num_blocks=num_blocks,
        prefix_caching=prefix_caching,
        taps=head.tap_layers,
    )
    runners: dict[Tier, ModelRunner] = {"large": large}
    if has_small:
        runners["small"] = ModelRunner(
            model=pair.small, num_blocks=num_blocks, prefix_caching=prefix_caching
        )
    own = ModelRunner(
        model=head, num_blocks=head_blocks or num_blocks, prefix_caching=prefix_caching
    )
    drafter = TreeDrafter(
        runner=runners.get("small"),
        head=Head(model=head, runner=own, vocab_size=large.vocab_size),
        config=draft,
        budget=budget,
        calibration=calibration,
    )
    return Engine(
        runners=runners,
        verifier=CoupledVerifier(),
        drafter=drafter,
        config=config,
        grammars=grammars,
    )
