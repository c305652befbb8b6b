"""EAGLE-3 (Li et al., 2025) and P-EAGLE: a decoder layer over tokens and three hidden states.

A row's token, looked up and normalised, and its features, normalised, stand side by side in front
of the first layer's attention; the features are its residual stream. Features of text rows are a
projection (fc) of the large model's hidden states; those of a tree's rows are the head's own
residual stream of the level before. P-EAGLE (2026) runs several levels in one pass: rows behind
the first carry a mask token and one learnt row of features.
"""

from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from outrider.draft.heads.decoder_head import DecoderHead, HeadParts, layer_reader
from outrider.draft.heads.head_config import HeadConfig
from outrider.draft.heads.head_reader import HeadReader
from outrider.draft.heads.protocol import BlockLayout, TargetModel
from outrider.engine.model.layers import LayerReader, Norm, normalise
from outrider.engine.model.weights import ProgressCallback
from outrider.kernels.layers.row_invariant_linear import Product, make_norm

_FIRST = "model.layers.0."
IGNORED: Final = ("rotary_emb.inv_freq", "verifier_norm.weight", "verifier_lm_head.weight")
_RENAMED: Final = {
    "midlayer.": _FIRST,
    "layers.": "model.layers.",
    "norm.": "model.norm.",
    "embed_tokens.": "model.embed_tokens.",
}


def renamed(name: str) -> str:
    """Return what a tensor of either layout is called here: as those of a decoder are."""
    name = name.removeprefix("model.")
    for old, new in _RENAMED.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


class Eagle3Entry:
    """From hidden states to features, and from features and tokens to the first layer."""

    def __init__(self, reader: HeadReader, config: HeadConfig, layers: LayerReader) -> None:
        """Read fc and the norms in front of the layer."""
        shape = config.layers
        target_width, num_taps = reader.target.config.hidden_size, len(config.taps)
        width = num_taps * target_width
        self._fc: Product = reader.linear("fc.weight", (shape.hidden_size, width))
        self._norms: list[Norm] = []
        if config.norm_before_fc:
            self._norms = [_norm(reader, "input_norm.weight", width, shape.norm_eps)]
        elif config.fc_norm:
            self._norms = [
                _norm(reader, f"fc_norm.{index}.weight", target_width, shape.norm_eps)
                for index in range(num_taps)
            ]
        self._feature_norm = layers.norm(f"{_FIRST}hidden_norm.weight")
        self._norm_before_residual = config.norm_before_residual

    def features_of_taps(self, taps: Tensor) -> Tensor:
        """Return the projection of hidden states: [n, taps * target's] -> [n, hidden_size]."""
        if self._norms:
            pieces = taps.chunk(len(self._norms), dim=-1)
            normed = [
                norm(piece.contiguous()) for norm, piece in zip(self._norms, pieces, strict=True)
            ]
            taps = torch.cat(normed, dim=-1)
        return self._fc(taps)

    def __call__(
        self, embedded: Tensor, features: Tensor, norm: Norm | None, *, is_fused: bool
    ) -> tuple[Tensor, Tensor]:
        """Return tokens and features side by side, [n, 2 * hidden_size], and the features."""
        tokens = normalise(norm, None, embedded, is_fused=is_fused)
        hidden = normalise(self._feature_norm, None, features, is_fused=is_fused)
        residual = hidden if self._norm_before_residual else features.clone()
        return torch.cat((tokens, hidden), dim=-1), residual


def read_eagle3(
    folder: Path,
    config: HeadConfig,
    target: TargetModel,
    *,
    max_context: int | None = None,
    on_progress: ProgressCallback | None = None,
) -> DecoderHead:
    """Read an EAGLE-3 or P-EAGLE head; raises UnsupportedModelError for a file that is none."""
    shape = config.layers
    with HeadReader(folder, target, renamed=renamed, on_progress=on_progress) as reader:
        token_ids = reader.target_token_ids(config)
        layers = layer_reader(reader, shape)
        entry = Eagle3Entry(reader, config, layers)
        mask_features = None
        if config.kind == "peagle":
            mask_features = entry.features_of_taps(_mask_hidden(reader, config))[0]
        parts = HeadParts(
            kind=config.kind,
            reader=reader,
            layers=layers,
            head=reader.head(shape.vocab_size, shape.hidden_size),
            taps=config.taps,
            target_token_ids=token_ids,
            block=_block(config),
            mask_features=mask_features,
            max_context=max_context,
        )
        head = DecoderHead(
            parts,
            entry=entry,
            feeds_normed=config.norm_output,
            qkv_width=2 * shape.hidden_size,
        )
        reader.finish(ignorable=IGNORED)
    return head


def _block(config: HeadConfig) -> BlockLayout | None:
    if config.kind != "peagle":
        return None
    assert config.mask_token_id is not None, "checked with the config"
    return BlockLayout(
        num_rows=config.block_size,
        first_row=0,
        mask_token_id=config.mask_token_id,
        is_bidirectional=False,
        is_behind_text=False,
    )


def _mask_hidden(reader: HeadReader, config: HeadConfig) -> Tensor:
    """Return the hidden states of rows that have none, [1, taps * target's]."""
    width = len(config.taps) * reader.target.config.hidden_size
    name = "mask_hidden"
    shape = (1, 1, width) if len(reader.raw(name).shape) == 3 else (1, width)
    return reader.read(name, shape).view(1, width)


def _norm(reader: HeadReader, name: str, width: int, eps: float) -> Norm:
    return make_norm(reader.read(name, (width,)), eps, dtype=reader.dtype)
