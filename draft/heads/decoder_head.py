"""A head of one decoder's kind: features and tokens become rows, which its layers run."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from outrider.draft.heads.head_reader import HeadReader
from outrider.draft.heads.protocol import BlockLayout, HeadKind
from outrider.engine.model.config import ModelConfig
from outrider.engine.model.experts import read_experts
from outrider.engine.model.kv_cache import KVCache
from outrider.engine.model.layer_attention import LayerAttention, SharedInputs
from outrider.engine.model.layers import LayerReader, Norm, normalise
from outrider.engine.model.numerics import numerics_fingerprint
from outrider.engine.model.protocol import ForwardOutput
from outrider.engine.model.recurrent_cache import RecurrentPass
from outrider.kernels.attention.paged_attention import AttentionBatch, Plan, plan_attention
from outrider.kernels.layers.compiled_rows import can_place_heads
from outrider.kernels.layers.embedding import embed_tokens
from outrider.kernels.layers.lora import LoraRows
from outrider.kernels.layers.rope import RotaryTable
from outrider.kernels.layers.row_invariant_ops import softcap
from outrider.kernels.triton_support import is_automatic, uses_triton


class HeadEntry(Protocol):
    """What stands in front of a head's layers."""

    def features_of_taps(self, taps: Tensor) -> Tensor:
        """Return features, [n, feature_size], of taps, [n, taps * hidden_size]."""
        ...

    def __call__(
        self, embedded: Tensor, features: Tensor, norm: Norm | None, *, is_fused: bool
    ) -> tuple[Tensor, Tensor]:
        """Return what the first layer's attention reads, and the residual stream.

        `embedded`: [n, hidden_size], of the rows' tokens; `features`: [n, feature_size]; both are
        left as they are. `norm`: the layer's in front of attention. `is_fused`: Triton's kernels
        run.
        """
        ...


def layer_reader(reader: HeadReader, config: ModelConfig) -> LayerReader:
    """Return what reads the layers of a head, which are named as those of a decoder."""
    weights = reader.weights
    return LayerReader(
        reader=reader,
        config=config,
        ropes=tuple(dict.fromkeys(layer.rope for layer in config.layers)),
        weights=weights,
        deterministic=False,
        sparse=partial(read_experts, reader, config, weights=weights, deterministic=False),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadParts:
    """A head as it was read, its layers apart. Fields without a line: see `HeadModel`."""

    kind: HeadKind
    reader: HeadReader
    layers: LayerReader
    head: Callable[[Tensor], Tensor]
    """The product that gives logits."""
    taps: tuple[int, ...]
    target_token_ids: Tensor | None = None
    block: BlockLayout | None = None
    mask_features: Tensor | None = None
    max_context: int | None = None
    """Positions to be served; None for all."""


class HeadBase:
    """What all heads have in common: `HeadModel` but for the forward pass."""

    can_record = True
    deterministic = False  # guesses need not be: what is emitted does not depend on them

    def __init__(self, parts: HeadParts) -> None:
        """Read what all heads have beside their layers."""
        reader, layers, target = parts.reader, parts.layers, parts.reader.target
        config = layers.config
        self.kind: HeadKind = parts.kind
        self.config = config
        self.dtype, self.device = target.dtype, target.device
        self.tap_layers = parts.taps
        self.target_token_ids = parts.target_token_ids
        self.block = parts.block
        self.mask_features = parts.mask_features
        self.feature_size = config.hidden_size
        self._embedding = reader.embedding(config.hidden_size)
        self._final_norm = layers.norm("model.norm.weight")
        self._head = parts.head
        max_positions = min(parts.max_context or sys.maxsize, config.max_position_embeddings)
        if parts.block is not None:  # rows of a block go beyond the text
            max_positions += parts.block.num_rows
        rotary = tuple(
            RotaryTable(rope, max_positions=max_positions, dtype=self.dtype, device=self.device)
            for rope in layers.ropes
        )
        self._rotary = rotary
        self._can_place = is_automatic() and can_place_heads(
            self.dtype, self.device, config.head_dim
        )
        self._attend = LayerAttention(
            config,
            rotary,
            scale=config.attention_scale or config.head_dim**-0.5,
            deterministic=False,
        )
        self.fingerprint = reader.fingerprint
        self.num_parameters = reader.num_parameters
        weights = reader.weights
        self.weight_bytes = weights.num_bytes + self.dtype.itemsize * (
            reader.num_parameters - weights.num_rounded
        )
        self.scheme = weights.scheme or weights.held or str(self.dtype).removeprefix("torch.")
        self.numerics = numerics_fingerprint(
            checkpoint=f"{self.fingerprint} on {target.numerics}",
            scheme=self.scheme,
            dtype=self.dtype,
            device=self.device,
            deterministic=False,
        )

    def plan_attention(self, batch: AttentionBatch, *, block_size: int) -> Plan:
        """Plan a pass for this head's layers."""
        config = self.config
        return plan_attention(
            batch,
            block_size=block_size,
            num_query_heads=config.num_query_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            sliding_window=config.sliding_window,
            has_full_layers=config.has_mixed_windows,
            deterministic=False,
            dtype=self.dtype,
            device=self.device,
        )

    def _shared(
        self, positions: Tensor, slot_mapping: Tensor, attention: Plan, kv_cache: KVCache
    ) -> SharedInputs:
        """Return the inputs that a pass's layers share."""
        here = SharedInputs(
            positions=positions,
            slots=(slot_mapping, kv_cache.slots_of(slot_mapping)),
            attention=attention,
            kv_cache=kv_cache,
            is_fused=uses_triton(self.device),
            is_placed=self._can_place and kv_cache.dtype == self.dtype,
            lora=None,
        )
        if not (here.is_fused or here.is_placed):
            here.turns = tuple(table.gather(positions) for table in self._rotary)
        return here

    def _embed(self, token_ids: Tensor, here: SharedInputs) -> Tensor:
        if here.is_fused:
            return embed_tokens(self._embedding, token_ids)
        return self._embedding.index_select(0, token_ids)

    def _nothing(self, logits_out: Tensor | None) -> ForwardOutput:
        """Return the output of a pass that only fills the cache."""
        config, width = self.config, self.feature_size
        logits = logits_out
        if logits is None:
            logits = torch.empty((0, config.vocab_size), dtype=torch.float32, device=self.device)
        hidden = torch.empty((0, width), dtype=self.dtype, device=self.device)
        return ForwardOutput(logits=logits, hidden=hidden)

    def _logits(self, hidden: Tensor, logits_out: Tensor | None) -> Tensor:
        """Return the head's product in float32, scaled and capped as the large model's is."""
        product = self._head(hidden)
        logits = product.float() if logits_out is None else logits_out.copy_(product)
        if self.config.logit_scale != 1.0:
            logits.mul_(self.config.logit_scale)
        if self.config.logit_softcap is not None:
            softcap(logits, self.config.logit_softcap)
        return logits


class DecoderHead(HeadBase):
    """A head whose rows run through decoder layers: EAGLE-3, P-EAGLE, MTP.

    `feeds_normed`: rows of the next level carry what lm_head reads; else the residual stream.
    """

    def __init__(
        self, parts: HeadParts, *, entry: HeadEntry, feeds_normed: bool, qkv_width: int
    ) -> None:
        """`entry`: in front of the layers; `qkv_width`: what it gives the first one's attention."""
        self._entry = entry
        self._feeds_normed = feeds_normed
        self._layers = tuple(
            parts.layers.read(index, qkv_width=None if index else qkv_width)
            for index in range(parts.layers.config.num_layers)
        )
        super().__init__(parts)

    def features_of_taps(self, taps: Tensor) -> Tensor:
        """Return what rows carry: [n, taps * hidden_size] -> [n, feature_size]."""
        with torch.inference_mode():
            return self._entry.features_of_taps(taps)

    @torch.inference_mode()
    def forward(  # noqa: PLR0913 - all of a pass
        self,
        token_ids: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        attention: Plan,
        kv_cache: KVCache,
        logit_rows: Tensor | None,
        *,
        logits_out: Tensor | None = None,
        lora: LoraRows | None = None,
        recurrent: RecurrentPass | None = None,
        taps: tuple[int, ...] = (),
        features: Tensor | None = None,
    ) -> ForwardOutput:
        """Run n rows; see `DecoderModel.forward`. `features`: [n, feature_size], left as they are.

        `hidden` of the result is what the rows of the next level carry. `lora`, `recurrent`,
        `taps`: a head has none of them.
        """
        assert features is not None, "the rows of a head carry features"
        assert (lora, recurrent, taps) == (None, None, ()), "heads have none of these"
        here = self._shared(positions, slot_mapping, attention, kv_cache)
        is_fused = here.is_fused
        embedded = self._embed(token_ids, here)
        first = self._layers[0].before_attention
        normed, residual = self._entry(embedded, features, first, is_fused=is_fused)
        some_rows = logit_rows
        if logit_rows is not None and logit_rows.shape[0] >= residual.shape[0]:
            some_rows = None  # all of them, perhaps in another order
        update: Tensor | None = None
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            if index:
                normed = normalise(layer.before_attention, update, residual, is_fused=is_fused)
            if index == last and some_rows is not None and not some_rows.shape[0]:
                self._attend.keep(layer, index, normed, here)
                return self._nothing(logits_out)
            attended = self._attend(layer, index, normed, here)
            if index == last and some_rows is not None:
                # Past the last cache write only the wanted rows matter.
                attended = attended.index_select(0, some_rows)
                residual = residual.index_select(0, some_rows)
            output = layer.output(attended)
            normed = normalise(layer.before_mlp, output, residual, is_fused=is_fused)
            update = layer.mlp(normed, is_fused=is_fused)
        assert update is not None
        normed = normalise(self._final_norm, update, residual, is_fused=is_fused)
        if logit_rows is not None and some_rows is None:
            normed = normed.index_select(0, logit_rows)
            residual = residual.index_select(0, logit_rows)
        return ForwardOutput(
            logits=self._logits(normed, logits_out),
            hidden=normed if self._feeds_normed else residual,
        )
