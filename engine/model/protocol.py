"""The parts of a causal model that the passes, the engine and the drafter use."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from outrider.engine.model.config import ModelConfig
from outrider.engine.model.kv_cache import KVCache
from outrider.engine.model.recurrent_cache import RecurrentPass
from outrider.kernels.attention.paged_attention import AttentionBatch, Plan
from outrider.kernels.layers.lora import LoraRows


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardOutput:
    """The output of a pass for the rows asked for."""

    logits: Tensor
    """float32 [m, vocab_size]."""
    hidden: Tensor
    """[m, hidden_size], after the final norm."""
    taps: Tensor | None = None
    """The taps of all n rows, [n, number of taps * hidden_size]. None where none are asked for."""


class CausalModel(Protocol):
    """Weights and forward pass over a paged KV cache that the caller owns."""

    can_record: bool
    """Its passes can be recorded as CUDA graphs."""
    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    deterministic: bool
    """A token's logits do not depend on what else is in a pass."""
    feature_size: int
    """Width of the features that a row carries beside its token; 0: it reads none."""
    fingerprint: str
    scheme: str
    """What its products compute with: "int8", "int4" or a type's name."""
    numerics: str
    """The fingerprint of its arithmetic."""
    num_parameters: int
    weight_bytes: int

    def plan_attention(self, batch: AttentionBatch, *, block_size: int) -> Plan:
        """Plan a pass for this model's heads, windows, dtype and device."""
        ...

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
        """Run n rows, write their keys and values, return the wanted rows' logits.

        `lora`: the rows' adapters, None where no row has one.
        `recurrent`: for models with recurrent layers (`ModelConfig.recurrence`).
        `taps`: the hidden states to be returned of all rows, numbered as `output_hidden_states` of
        transformers numbers them (`outrider.kernels.layers.taps`).
        `features`: [n, feature_size], of the model's type; None for a model that reads none.
        """
        ...
