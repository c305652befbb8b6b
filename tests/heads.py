"""Engines whose large model is drafted for by a head."""

import tempfile
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from outrider.draft.budget.budget import TreeBudget
from outrider.draft.config import DraftConfig
from outrider.draft.guesses.head_guesses import HeadGuesses
from outrider.draft.guesses.head_texts import Head
from outrider.draft.guesses.model_guesses import Slices
from outrider.draft.heads.protocol import HeadKind, HeadModel
from outrider.draft.heads.read_head import read_head
from outrider.draft.tree_drafter import TreeDrafter
from outrider.engine.cache.extent_store import ExtentStore
from outrider.engine.config import EngineConfig
from outrider.engine.core import Engine
from outrider.engine.grammar.grammar import GrammarCompiler
from outrider.engine.model.protocol import CausalModel
from outrider.engine.model.whole_ends import ends_of
from outrider.engine.parallel.ranks import Ranks
from outrider.engine.parallel.runner import ParallelRunner
from outrider.engine.passes.runner import ModelRunner
from outrider.verifier.coupled import CoupledVerifier
from outrider.verifier.params import Tier
from tests.draft.heads.head_files import (
    dflash_config,
    dflash_weights,
    eagle3_weights,
    peagle_weights,
    specforge_config,
    specforge_names,
    write_head,
)
from tests.engines import Pair, drafter_of, engine_model, tiny_pair
from tests.models import make_hf_model

TextAndPath = tuple[tuple[int, ...], tuple[int, ...]]

# Wide trees have right guesses in them even where a head knows nothing.
WIDE = DraftConfig(max_branching=16, max_frontier=12, max_draft_nodes=160, min_path_prob=0.0)


@cache
def random_pair() -> Pair:
    """The tiny pair with as many layers as a head reads."""
    return tiny_pair(num_layers=3)


@cache
def random_head(kind: HeadKind = "eagle3") -> HeadModel:
    """A head with random weights for `random_pair`."""
    return random_head_of(kind, random_pair().large)


def random_head_of(kind: HeadKind, large: CausalModel) -> HeadModel:
    """The same for `random_pair`'s large model as it was loaded elsewhere.

    EAGLE-3 and P-EAGLE name a part of its vocabulary, the others all tokens.
    """
    if kind == "dflash":
        weights = dflash_weights()
        return read_written(weights, dflash_config(weights), large)
    if kind == "mtp":
        layer = make_hf_model("llama3", seed=7, vocab_size=131, num_hidden_layers=1).model.layers[0]
        return read_written(*mtp_of(layer, random_pair().large_reference), large)
    if kind == "peagle":
        weights = peagle_weights(num_tokens=60)
        config = specforge_config(weights, ptd_token_id=130, block_size=4)
    else:
        weights = eagle3_weights(num_tokens=60)
        config = specforge_config(weights)
    return read_written(specforge_names(weights), config, large)


def mtp_of(
    layer: torch.nn.Module, large: PreTrainedModel, *, knows_all: bool = False
) -> tuple[dict[str, Tensor], dict[str, object]]:
    """A layer behind a random projection as an MTP head, as speculators saves it.

    `knows_all`: what the layer reads is the token's vector, as long as it is; what logits are made
    of, the large model's last norm.
    """
    own = {name: weight.detach() for name, weight in layer.state_dict().items()}
    width, made = large.config.hidden_size, torch.Generator().manual_seed(5)
    own["input_proj.weight"] = 0.2 * torch.randn((width, 2 * width), generator=made)
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        own[f"{name}.weight"] = 0.5 + torch.rand(width, generator=made)
    if knows_all:
        own["input_proj.weight"] = torch.eye(width, 2 * width)
        own["token_layernorm.weight"] = torch.ones(width)
        own["final_layernorm.weight"] = large.model.norm.weight.detach()
    config: dict[str, object] = {
        "speculators_model_type": "mtp",
        "num_nextn_predict_layers": 1,
        "transformer_layer_config": large.config.to_dict(),
    }
    return {f"mtp_layers.0.{name}": each.clone() for name, each in own.items()}, config


@cache
def knowing_pair() -> tuple[Pair, HeadModel]:
    """A large model of one layer that reads one token, and a head that computes the same."""
    large = make_hf_model("llama3", seed=1, vocab_size=131, num_hidden_layers=1)
    layer, embedding = large.model.layers[0], large.model.embed_tokens.weight
    with torch.no_grad():
        layer.self_attn.o_proj.weight.zero_()
        embedding /= embedding.square().mean(1, keepdim=True).sqrt().clamp(min=1e-3)
        large.model.norm.weight *= 0.1  # moderate opinions
    model = engine_model(large)
    pair = Pair(large=model, small=model, large_reference=large, small_reference=large)
    return pair, read_written(*mtp_of(layer, large, knows_all=True), model)


def read_written(
    weights: Mapping[str, Tensor], config: dict[str, object], large: CausalModel
) -> HeadModel:
    """Write a head and read it for a large model."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_head(Path(folder) / "head", dict(weights), config)
        return read_head(path, ends_of(large))  # type: ignore[arg-type]


def make_head_engine(  # noqa: PLR0913 - as `make_engine`
    pair: Pair,
    head: HeadModel,
    *,
    has_small: bool = False,
    on_device: bool = False,
    draft: DraftConfig | None = None,
    budget: TreeBudget | None = None,
    num_blocks: int = 256,
    head_blocks: int | None = None,
    block_size: int = 16,
    prefix_caching: bool = True,
    config: EngineConfig | None = None,
    grammars: dict[Tier, GrammarCompiler] | None = None,
    clock: Callable[[], float] | None = None,
    verifier: CoupledVerifier | None = None,
    ranks: Ranks | None = None,
    store: ExtentStore | None = None,
) -> Engine:
    """The large tier with a head; with the small tier beside it where it `has_small`.

    `on_device`: trees grow without the host where they can. `ranks`: of a large model in parts.
    """
    make_large = ModelRunner if ranks is None else partial(ParallelRunner, ranks=ranks)
    large = make_large(
        model=pair.large,
        num_blocks=num_blocks,
        taps=head.tap_layers,
        block_size=block_size,
        prefix_caching=prefix_caching,
    )
    runners: dict[Tier, ModelRunner] = {"large": large}
    if has_small:
        runners["small"] = ModelRunner(
            model=pair.small,
            num_blocks=num_blocks,
            block_size=block_size,
            prefix_caching=prefix_caching,
        )
    own = ModelRunner(
        model=head,
        num_blocks=head_blocks or num_blocks,
        block_size=block_size,
        prefix_caching=prefix_caching,
    )
    clocks = {} if clock is None else {"clock": clock}
    drafter = TreeDrafter(
        runner=runners.get("small"),
        head=Head(model=head, runner=own, vocab_size=large.vocab_size),
        config=draft,
        budget=budget,
        device_target=large if on_device else None,
        **clocks,
    )
    return Engine(
        runners=runners,
        verifier=verifier,
        drafter=drafter,
        config=config,
        grammars=grammars,
        store=store,
    )


def head_runner(engine: Engine) -> ModelRunner:
    """The runner of an engine's head."""
    assert engine._drafter is not None
    assert engine._drafter.features is not None
    return engine._drafter.features.runner


def watch_head(engine: Engine) -> dict[TextAndPath, Tensor]:
    """A dict that gets the head's logits from now on: by the text and the path behind it.

    Rows of a block stand by their numbers in the place of a path.
    """
    drafter = drafter_of(engine)
    guesses = drafter._growths["head"]._model
    assert isinstance(guesses, HeadGuesses)
    receive, is_block = guesses.receive, guesses._model.block is not None
    seen: dict[TextAndPath, Tensor] = {}

    def noted(slices: Slices, logits: Tensor, hidden: Tensor | None = None) -> None:
        row = 0
        for draft, piece in slices:
            paths = [(place,) for place in range(piece.num_logit_rows)]
            if piece.num_logit_rows and not is_block:
                paths = [(*path,) for path in draft.tree.frontier_paths()]
            for path in paths:
                seen[tuple(draft.sequence.token_ids), path] = logits[row].clone()
                row += 1
        receive(slices, logits, hidden)

    guesses.receive = noted  # type: ignore[method-assign]
    return seen
