"""MTP heads (DeepSeek-V3, 2024): one more decoder layer that large models are trained with.

A row's token, looked up and normalised, and the large model's last hidden state, normalised, are
projected together to the row that the layer reads. The layer is one of the large model's own kind
(its attention, its experts), and so is what gives logits. Rows of the next level carry the head's
own output, once more in the place of the large model's.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from outrider.draft.heads.decoder_head import DecoderHead, HeadParts, layer_reader
from outrider.draft.heads.head_reader import HeadReader
from outrider.draft.heads.protocol import HeadError, TargetModel
from outrider.engine.model.config import LayerConfig, ModelConfig
from outrider.engine.model.layers import LayerReader, Norm, normalise
from outrider.engine.model.weights import ProgressCallback

_PROJECTION: Final = "fc.weight"
_TOKEN_NORM, _HIDDEN_NORM = "token_norm.weight", "hidden_norm.weight"
_LAYER: Final = "model.layers.0."
_MLA: Final = f"{_LAYER}self_attn.kv_a_proj_with_mqa.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Style:
    """A checkpoint's names for an MTP head's tensors, below a prefix."""

    names: Mapping[str, str | None]
    """Beginnings of names, and what they are here; None for copies of the large model's own."""
    feeds_normed: bool
    """Rows of the next level carry normalised rows."""

    def renamed(self, prefix: str) -> Callable[[str], str | None]:
        """Return what tensors below a prefix are called here."""

        def rename(name: str) -> str | None:
            if not name.startswith(prefix):
                return None
            below = name.removeprefix(prefix)
            for old, new in self.names.items():
                if below.startswith(old):
                    return None if new is None else new + below.removeprefix(old)
            return _LAYER + below

        return rename


# Qwen3-Next, Qwen 3.5.
_QWEN = _Style(
    names={
        "fc.": "fc.",
        "pre_fc_norm_embedding.": "token_norm.",
        "pre_fc_norm_hidden.": "hidden_norm.",
        "layers.0.": _LAYER,
        "layers.": None,  # only the first head is run, again and again
        "norm.": "model.norm.",
    },
    feeds_normed=True,
)
# DeepSeek-V3, GLM 4.5: a layer behind the last.
_LAST_LAYER = _Style(
    names={
        "eh_proj.": "fc.",
        "enorm.": "token_norm.",
        "hnorm.": "hidden_norm.",
        "shared_head.norm.": "model.norm.",
        "shared_head.head.": None,
        "embed_tokens.": None,
    },
    feeds_normed=False,
)
# speculators, which trains heads further and saves them alone.
_SPECULATORS = _Style(
    names={
        "input_proj.": "fc.",
        "token_layernorm.": "token_norm.",
        "hidden_layernorm.": "hidden_norm.",
        "final_layernorm.": "model.norm.",
    },
    feeds_normed=True,
)


class MtpEntry:
    """From the large model's last hidden state and a token to the layer's row."""

    def __init__(self, reader: HeadReader, layers: LayerReader) -> None:
        """Read the projection and the norms in front of it."""
        width = layers.config.hidden_size
        self._projection = reader.linear(_PROJECTION, (width, 2 * width))
        self._token_norm = layers.norm(_TOKEN_NORM)
        self._hidden_norm = layers.norm(_HIDDEN_NORM)

    def features_of_taps(self, taps: Tensor) -> Tensor:
        """Return the hidden states as they are."""
        return taps

    def __call__(
        self, embedded: Tensor, features: Tensor, norm: Norm | None, *, is_fused: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the normalised rows and the rows: [n, hidden_size] each."""
        tokens = normalise(self._token_norm, None, embedded, is_fused=is_fused)
        hidden = normalise(self._hidden_norm, None, features, is_fused=is_fused)
        residual = self._projection(torch.cat((tokens, hidden), dim=-1))
        return normalise(norm, None, residual, is_fused=is_fused), residual


def read_mtp(
    folder: Path,
    target: TargetModel,
    *,
    is_alone: bool = False,
    max_context: int | None = None,
    on_progress: ProgressCallback | None = None,
) -> DecoderHead:
    """Read the MTP head of a large model from its checkpoint, or, `is_alone`, from its own folder.

    Raises HeadError where there is none, and UnsupportedModelError for a file that is damaged.
    """
    for style, prefix in _places(target.config, is_alone=is_alone):
        renamed = style.renamed(prefix)
        with HeadReader(
            folder,
            target,
            renamed=renamed,
            weight_format=None if is_alone else target.config.weight_format,
            on_progress=on_progress,
        ) as reader:
            if _PROJECTION in reader:
                return _read(reader, style, max_context)
    raise HeadError(
        f"{folder} has no MTP head: none of its tensors is called mtp.fc.weight or "
        f"model.layers.{target.config.num_layers}.eh_proj.weight. Name a drafter's folder or hub "
        "id, or leave the drafter away."
    )


def _places(config: ModelConfig, *, is_alone: bool) -> list[tuple[_Style, str]]:
    """Return how and below which prefixes the tensors may be named."""
    if is_alone:
        return [(_SPECULATORS, "mtp_layers.0.")]
    behind = f"layers.{config.num_layers}."
    prefixes = ("model.", "model.language_model.", "language_model.model.")
    return [(_QWEN, "mtp."), *((_LAST_LAYER, prefix + behind) for prefix in prefixes)]


def _read(reader: HeadReader, style: _Style, max_context: int | None) -> DecoderHead:
    config = _layer_config(reader)
    layers = layer_reader(reader, config)
    parts = HeadParts(
        kind="mtp",
        reader=reader,
        layers=layers,
        head=reader.target.head,
        taps=(reader.target.config.num_layers,),
        max_context=max_context,
    )
    head = DecoderHead(
        parts,
        entry=MtpEntry(reader, layers),
        feeds_normed=style.feeds_normed,
        qkv_width=config.hidden_size,
    )
    reader.finish(ignorable=("rotary_emb.inv_freq",))
    return head


def _layer_config(reader: HeadReader) -> ModelConfig:
    """Return the description of a head's one layer: as the large model's with attention are."""
    config = reader.target.config
    if _MLA in reader:
        raise HeadError(
            f"{config.model_id} has an MTP head with latent attention (MLA), which heads cannot "
            "compute yet. Leave the drafter away, or name an EAGLE-3 drafter."
        )
    names = config.names
    is_plain = names.after_attention is None and names.after_mlp is None and not config.is_parallel
    if not config.is_native or not is_plain or names.before_attention is None:
        raise HeadError(
            f"{config.model_id} is {config.architecture}, of which the MTP head cannot be run "
            "here: only those of models that the engine's own decoder runs can, with norms in "
            "front of attention and MLP. Name an EAGLE-3 drafter, or leave the drafter away."
        )
    attention = next(layer for layer in reversed(config.layers) if not layer.is_recurrent)
    experts = config.experts
    is_sparse = experts is not None and f"{_LAYER}{experts.names.router}.weight" in reader
    layer = LayerConfig(rope=attention.rope, window=attention.window, is_sparse=is_sparse)
    return replace(config, layers=(layer,), recurrence=None, ignored_prefixes=())
