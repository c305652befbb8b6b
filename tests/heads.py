"""Engines whose large model is drafted for by a head."""

import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from draft.budget import TreeBudget
from draft.config import DraftConfig
from draft.head_guesses import HeadGuesses
from draft.head_texts import Head
from draft.heads.protocol import HeadModel
from draft.heads.read_head import read_head
from draft.model_guesses import Slices
from draft.tree_drafter import TreeDrafter
from engine.config import EngineConfig
from engine.core import Engine
from engine.grammar.grammar import GrammarCompiler
from engine.model.protocol import CausalModel
from engine.passes.runner import ModelRunner
from engine.request import Tier
from tests.draft.heads.head_files import (
    dflash_config,
    dflash_weights,
    eagle3_weights,
    peagle_weights,
    specforge_config,
    specforge_names,
    write_head,
)
from tests.engines import Pair, shipped_pair, tiny_pair
from verifier.coupled import CoupledVerifier

TextAndPath = tuple[tuple[int, ...], tuple[int, ...]]

# Wide trees have right guesses in them even where a head knows nothing.
WIDE = DraftConfig(max_branching=16, max_frontier=12, max_draft_nodes=160, min_path_prob=0.0)


@cache
def random_pair() -> Pair:
    """The tiny pair with as many layers as a head reads."""
    return tiny_pair(num_layers=3)


@cache
def random_head(kind: str = "eagle3") -> HeadModel:
    """A head with random weights for `random_pair`, in a part of its vocabulary.

    kind: "eagle3" or "peagle"; or "dflash", which has all tokens.
    """
    if kind == "dflash":
        weights = dflash_weights()
        return _read(weights, dflash_config(weights), random_pair().large)
    if kind == "peagle":
        weights = peagle_weights(num_tokens=60)
        config = specforge_config(weights, ptd_token_id=130, block_size=4)
    else:
        assert kind == "eagle3"
        weights = eagle3_weights(num_tokens=60)
        config = specforge_config(weights)
    return _read(specforge_names(weights), config, random_pair().large)


def _read(
    weights: Mapping[str, Tensor], config: dict[str, object], large: CausalModel
) -> HeadModel:
    with tempfile.TemporaryDirectory() as folder:
        path = write_head(Path(folder) / "head", dict(weights), config)
        return read_head(path, large)  # type: ignore[arg-type]


def make_head_engine(  # noqa: PLR0913 - as `make_engine`
    pair: Pair,
    head: HeadModel,
    *,
    has_small: bool = False,
    draft: DraftConfig | None = None,
    budget: TreeBudget | None = None,
    num_blocks: int = 256,
    head_blocks: int | None = None,
    block_size: int = 16,
    prefix_caching: bool = True,
    config: EngineConfig | None = None,
    grammars: dict[Tier, GrammarCompiler] | None = None,
    clock: Callable[[], float] | None = None,
) -> Engine:
    """The large tier with a head; with the small tier beside it where it `has_small`."""
    large = ModelRunner(
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
        **clocks,
    )
    return Engine(
        runners=runners,
        verifier=CoupledVerifier(),
        drafter=drafter,
        config=config,
        grammars=grammars,
    )


def head_runner(engine: Engine) -> ModelRunner:
    """The runner of an engine's head."""
    assert engine._drafter is not None
    assert engine._drafter.features is not None
    return engine._drafter.features.runner


def watch_head(engine: Engine) -> dict[TextAndPath, Tensor]:
    """A dict that gets the head's logits from now on: by the text and the path behind it."""
    drafter = engine._drafter
    assert isinstance(drafter, TreeDrafter)
    guesses = drafter._growths["head"]._model
    assert isinstance(guesses, HeadGuesses)
    receive = guesses.receive
    seen: dict[TextAndPath, Tensor] = {}

    def noted(slices: Slices, logits: Tensor, hidden: Tensor | None = None) -> None:
        row = 0
        for draft, piece in slices:
            if piece.num_logit_rows:
                for path in draft.tree.frontier_paths():
                    seen[tuple(draft.sequence.token_ids), tuple(path)] = logits[row].clone()
                    row += 1
        receive(slices, logits, hidden)

    guesses.receive = noted  # type: ignore[method-assign]
    return seen


@cache
def shipped_head() -> HeadModel:
    """A head with random weights for the shipped large model."""
    large = shipped_pair().large
    shape = large.config
    width, dim, num_tokens = shape.hidden_size, 32, shape.vocab_size // 2
    generator = torch.Generator().manual_seed(3)

    def made(*size: int) -> Tensor:
        return torch.randn(size, generator=generator) * size[-1] ** -0.5

    names = {
        "fc.weight": made(width, 3 * width),
        "midlayer.self_attn.q_proj.weight": made(2 * dim, 2 * width),
        "midlayer.self_attn.k_proj.weight": made(2 * dim, 2 * width),
        "midlayer.self_attn.v_proj.weight": made(2 * dim, 2 * width),
        "midlayer.self_attn.o_proj.weight": made(width, 2 * dim),
        "midlayer.mlp.gate_proj.weight": made(96, width),
        "midlayer.mlp.up_proj.weight": made(96, width),
        "midlayer.mlp.down_proj.weight": made(width, 96),
        "lm_head.weight": made(num_tokens, width),
    }
    norms = ("midlayer.hidden_norm", "midlayer.input_layernorm", "norm")
    norms += ("midlayer.post_attention_layernorm",)
    names |= {f"{name}.weight": torch.ones(width) for name in norms}
    token_ids = torch.randperm(shape.vocab_size, generator=generator)[:num_tokens].sort().values
    names["d2t"] = token_ids - torch.arange(num_tokens)
    names["t2d"] = torch.zeros(shape.vocab_size, dtype=torch.bool).index_fill(0, token_ids, True)
    config: dict[str, object] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": dim,
        "vocab_size": shape.vocab_size,
        "draft_vocab_size": num_tokens,
        "max_position_embeddings": shape.max_position_embeddings,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
    }
    return _read(names, config, large)
