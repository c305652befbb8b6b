"""Trees of a head that grow on the device: those of the host, and every answer the plain one."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from outrider.draft.config import DraftConfig
from outrider.draft.guesses.head_texts import Head
from outrider.draft.heads.protocol import HeadModel
from outrider.draft.heads.read_head import read_head
from outrider.draft.tree_drafter import TreeDrafter
from outrider.engine.core import Engine
from outrider.engine.model.decoder import DecoderModel
from outrider.engine.passes.runner import ModelRunner
from outrider.engine.request import EngineRequest
from tests.draft.heads.head_files import (
    VOCAB,
    eagle3_weights,
    make_target,
    specforge_config,
    specforge_names,
    write_head,
)
from tests.engines import make_request, random_prompt, serve, texts
from tests.gpu import DEVICE
from tests.recorded_levels import poison_levels, record_levels, watch_levels

# What is compared grows by the same rule on both: no node below a node that no pass has computed.
CONFIG = DraftConfig(
    sources=("head",),
    max_branching=2,
    max_draft_depth=4,
    max_draft_nodes=24,
    max_frontier=3,
    min_path_prob=0.0,
)


@cache
def models(num_tokens: int, device: str) -> tuple[DecoderModel, HeadModel]:
    """A random large model and a random head that names so many of its tokens."""
    with TemporaryDirectory() as folder:
        target = make_target(Path(folder) / "target")
        if device != "cpu":
            path = str(Path(folder) / "target")
            target = DecoderModel.load(path, device=device, deterministic=True)
        weights = specforge_names(eagle3_weights(num_tokens=num_tokens))
        path = write_head(Path(folder) / "head", weights, specforge_config(weights))
        return target, read_head(path, target)


def engine_with(
    num_tokens: int,
    *,
    on_device: bool,
    config: DraftConfig = CONFIG,
    speculates: bool = True,
    device: str = "cpu",
) -> Engine:
    target, head = models(num_tokens, device)
    large = ModelRunner(model=target, num_blocks=128, taps=head.tap_layers if speculates else ())
    drafter = None
    if speculates:
        drafter = TreeDrafter(
            runner=None,
            head=Head(
                model=head,
                runner=ModelRunner(model=head, num_blocks=128),
                vocab_size=large.vocab_size,
            ),
            config=config,
            device_target=large if on_device else None,
        )
    return Engine(runners={"large": large}, drafter=drafter)


def requests(**sampling: Any) -> list[EngineRequest]:
    """Prompts of several lengths, one of more rows than wait for a draft pass."""
    return [
        make_request(
            str(number), random_prompt(length, seed=number), max_tokens=9, seed=number, **sampling
        )
        for number, length in enumerate((1, 9, 40))
    ]


def judged_trees(engine: Engine) -> list[Any]:
    """What is judged from now on: whose, its tokens and parents."""
    trees: list[Any] = []
    accept = engine._accept

    def noted(item: Any, *rest: Any) -> None:
        tree = item.tree
        trees.append((item.sequence.request_id, tree.token_ids, tree.parent_index, tree.sources))
        accept(item, *rest)

    engine._accept = noted  # type: ignore[method-assign]
    return trees


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_plain_text_on_a_gpu(temperature: float) -> None:
    """In deterministic mode, where a row's numbers do not depend on the other rows."""
    found = []
    for speculates in (True, False):
        engine = engine_with(50, on_device=True, speculates=speculates, device=DEVICE.type)
        found.append(texts(serve(engine, requests(temperature=temperature))))
    assert found[0] == found[1]


@pytest.mark.slow_cases
@pytest.mark.parametrize("num_tokens", [50, VOCAB], ids=["some tokens", "all tokens"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_same_trees_as_on_the_host_and_the_plain_text(
    num_tokens: int, temperature: float
) -> None:
    """Nodes of every level: each row carries what its parent's gave."""
    found = []
    replayed: list[int] = []
    for on_device, is_recorded in ((False, False), (True, False), (True, True)):
        engine = engine_with(num_tokens, on_device=on_device)
        if is_recorded:
            runner = record_levels(engine)
            poison_levels(runner)
            replayed = watch_levels(runner)
        trees = judged_trees(engine)
        answers = texts(serve(engine, requests(temperature=temperature)))
        found.append((sorted(trees), answers))
    assert len(replayed) > 12
    plain = engine_with(num_tokens, on_device=False, speculates=False)
    right = texts(serve(plain, requests(temperature=temperature)))
    assert found[0][1] == found[1][1] == found[2][1] == right
    assert found[0][0] == found[1][0] == found[2][0]
    grown = [parents for _, _, parents, _ in found[1][0] if len(parents) > 10]
    assert len(grown) > 12
    deep = [own for own in grown if any(own[parent] > 0 for parent in own if parent > 0)]
    assert deep, "a node three levels below its root"
