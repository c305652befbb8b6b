"""Run a decoder of transformers over the paged KV cache: its own modules, the engine's attention.

For architectures without a description of the engine's own. The rows of all sequences are one
"sequence" of transformers', with positions of their own; attention alone knows which rows belong
together, and it is the engine's: registered with transformers under a name that models are built
with.
"""

from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from outrider.engine.errors import UnsupportedModelError
from outrider.engine.model.config import HeadShape, ModelConfig
from outrider.engine.model.fingerprint import checkpoint_fingerprint
from outrider.engine.model.kv_cache import KVCache
from outrider.engine.model.numerics import numerics_fingerprint
from outrider.engine.model.protocol import ForwardOutput
from outrider.engine.model.recurrent_cache import RecurrentPass
from outrider.engine.model.transformers_probe import is_tied, rows_of_heads
from outrider.engine.model.transformers_weights import (
    ATTENTION_NAME,
    pack_linear_layers,
    read_model,
)
from outrider.kernels.attention.paged_attention import (
    AttentionBatch,
    Plan,
    paged_attention,
    plan_attention,
)
from outrider.kernels.kv.write_kv import write_kv
from outrider.kernels.layers.lora import LoraRows

_CHECKED_ROWS: Final = 7
# Of the deviation of the logits: a pass may differ so much from transformers' own.
_TOLERANCE: Final = {torch.float32: 0.01}
_HALF_TOLERANCE: Final = 0.25


@dataclass(slots=True, kw_only=True)
class _Pass:
    """State shared by the layers of a pass; `layer` counts them as they come."""

    slots: tuple[Tensor, Tensor]
    """The slots for layers without a window, and for those with one."""
    attention: Plan
    kv_cache: KVCache
    windows: tuple[int | None, ...]
    layer: int = 0


_pass: ContextVar[_Pass] = ContextVar("pass")


class TransformersModel:
    """Weights and modules of a transformers model, and a pass over them.

    Holds no state between passes. Not recorded as CUDA graphs: modules may wait for the device.
    """

    def __init__(
        self, *, config: ModelConfig, model: PreTrainedModel, folder: Path, device: torch.device
    ) -> None:
        """Take over a loaded model; use `load`."""
        self.config = config
        self.can_record = False
        self.feature_size = 0
        self.deterministic = False
        self.device = device
        self.dtype = model.dtype
        self.fingerprint = checkpoint_fingerprint(folder)
        self.scheme = str(self.dtype).removeprefix("torch.")
        self.numerics = numerics_fingerprint(
            checkpoint=self.fingerprint,
            scheme=f"{self.scheme}, transformers {transformers.__version__}",
            dtype=self.dtype,
            device=self.device,
            deterministic=False,
        )
        self.num_parameters = model.num_parameters()
        self.weight_bytes = sum(each.nbytes for each in model.parameters())
        head = model.get_output_embeddings()
        assert isinstance(head, nn.Module)
        self._keep_head = is_tied(model)
        self._model = model
        self._windows = tuple(layer.window for layer in config.layers)
        pack_linear_layers(model, kept=head if self._keep_head else None)
        self._hidden: Tensor | None = None
        packed_head = model.get_output_embeddings()
        assert isinstance(packed_head, nn.Module)
        packed_head.register_forward_pre_hook(self._note_hidden)

    @classmethod
    def load(
        cls, folder: Path, *, config: ModelConfig, dtype: torch.dtype, device: torch.device
    ) -> "TransformersModel":
        """Read a checkpoint of a folder whose description is known.

        Raises UnsupportedModelError for missing, misshapen or unexpected tensors, and where a pass
        does not give what transformers gives.
        """
        with torch.inference_mode():
            model = cls(
                config=config,
                model=read_model(
                    folder, dtype=dtype, device=device, is_text_part=config.is_text_part
                ),
                folder=folder,
                device=device,
            )
            model._check()
        return model

    @property
    def embedding(self) -> Tensor:
        """The table of tokens: [vocab_size, hidden_size]."""
        table = self._model.get_input_embeddings()
        assert isinstance(table, nn.Embedding), "decoders look tokens up in a table"
        return table.weight

    @property
    def head(self) -> nn.Module:
        """The product that gives logits."""
        head = self._model.get_output_embeddings()
        assert isinstance(head, nn.Module)
        return head

    def plan_attention(self, batch: AttentionBatch, *, block_size: int) -> Plan:
        """Plan a pass for this model's heads, windows, dtype and device."""
        config = self.config
        differ = config.full_heads is not None
        plan = self._plan(
            batch,
            config.heads(windowed=True),
            block_size=block_size,
            window=config.sliding_window,
            has_full_layers=config.has_mixed_windows and not differ,
        )
        if differ:
            full = self._plan(batch, config.heads(windowed=False), block_size=block_size)
            plan = replace(plan, full=full)  # type: ignore[arg-type]  # of the same kind
        return plan

    def _plan(
        self,
        batch: AttentionBatch,
        heads: HeadShape,
        *,
        block_size: int,
        window: int | None = None,
        has_full_layers: bool = False,
    ) -> Plan:
        return plan_attention(
            batch,
            block_size=block_size,
            num_query_heads=heads.num_query_heads,
            num_kv_heads=heads.num_kv_heads,
            head_dim=heads.head_dim,
            sliding_window=window,
            has_full_layers=has_full_layers,
            dtype=self.dtype,
            device=self.device,
        )

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
        """Run n rows; as `DecoderModel.forward`, but there are no adapters (`lora_modules`)."""
        assert recurrent is None, "transformers' modules keep no state here"
        assert features is None, "a decoder reads no features"
        here = _Pass(
            slots=(slot_mapping, kv_cache.slots_of(slot_mapping)),
            attention=attention,
            kv_cache=kv_cache,
            windows=self._windows,
        )
        token = _pass.set(here)
        try:
            logits, hidden, tapped = self._run(token_ids, positions, logit_rows, taps)
        finally:
            _pass.reset(token)
        assert here.layer == self.config.num_layers, "a layer did not attend"
        logits = logits.float() if logits_out is None else logits_out.copy_(logits)
        return ForwardOutput(logits=logits, hidden=hidden, taps=tapped)

    def _run(
        self,
        token_ids: Tensor,
        positions: Tensor,
        logit_rows: Tensor | None,
        taps: tuple[int, ...] = (),
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return logits and final hidden rows of the wanted rows, and all rows of the taps."""
        output = self._model(
            input_ids=token_ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=0 if logit_rows is None else logit_rows,
            **({"output_hidden_states": list(taps)} if taps else {}),
        )
        hidden, self._hidden = self._hidden, None
        assert hidden is not None
        tapped = None
        if taps:
            tapped = torch.cat([output.hidden_states[layer][0] for layer in taps], dim=-1)
        return output.logits[0], hidden[0], tapped

    def _note_hidden(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self._hidden = inputs[0]

    # ---- the check ------------------------------------------------------------------------

    def _check(self) -> None:
        """Compare a pass of mixed sequences with transformers' own, once, with the real weights.

        Raises UnsupportedModelError where they differ: a module looks past its own row, or takes
        positions from the place of a row in the pass.
        """
        rows = min(_CHECKED_ROWS, self.config.max_position_embeddings)
        token_ids = torch.arange(rows, device=self.device) * 7 % self.config.vocab_size
        self._model.set_attn_implementation("eager")
        try:
            theirs = self._run(token_ids, torch.arange(rows, device=self.device), None)[0].float()
        finally:
            self._model.set_attn_implementation(ATTENTION_NAME)
        error = (self._check_pass(token_ids) - theirs).abs().mean(-1).median()
        tolerance = _TOLERANCE.get(self.dtype, _HALF_TOLERANCE) * theirs.std()
        if not error <= tolerance:
            raise UnsupportedModelError(
                f"{self.config.model_id} is {self.config.architecture}, which the engine cannot "
                "run: over the paged cache its logits are not those of transformers "
                f"(they differ by {error:.3g}; at most {tolerance:.3g} is rounding)."
            )

    def _check_pass(self, token_ids: Tensor) -> Tensor:
        """Return the logits of a sequence whose second half shares a pass with another's."""
        rows = len(token_ids)
        first = rows // 2
        cache = KVCache(
            self.config, num_blocks=2, block_size=rows, dtype=self.dtype, device=self.device
        )

        def run(other: int, begin: int, end: int) -> Tensor:
            """Run rows begin to end of the sequence behind `other` rows of another one."""
            lengths = [other, end - begin] if other else [end - begin]
            places = [*range(other), *range(begin, end)]
            batch = AttentionBatch(
                query_indptr=[0, *torch.tensor(lengths).cumsum(0).tolist()],
                kv_lens=[other, end] if other else [end],
                block_tables=[[1], [0]] if other else [[0]],
                tree_starts=[other, end] if other else [end],
                ancestor_masks=[None] * len(lengths),
            )
            positions = torch.tensor(places, device=self.device)
            slots = positions.clone()
            slots[:other] += rows
            tokens = token_ids[positions].clone()
            tokens[:other] = (tokens[:other] + 11) % self.config.vocab_size
            plan = self.plan_attention(batch, block_size=rows)
            return self.forward(tokens, positions, slots, plan, cache, None).logits[other:]

        return torch.cat([run(0, 0, first), run(2, first, rows)])


# ---- attention ----------------------------------------------------------------------------------


def _attend(  # noqa: PLR0913 - transformers' own arguments
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend as a layer of transformers asks: [1, heads, n, size] to [1, n, heads, size]."""
    here = _pass.get()
    layer, here.layer = here.layer, here.layer + 1
    k_cache, v_cache = here.kv_cache.layers[layer]
    k_scale, v_scale = here.kv_cache.layer_scales[layer]
    size, value_dim = k_cache.shape[-1], value.shape[-1]
    sinks = s_aux if sinks is None else sinks
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    query, key, value = (_padded(rows_of_heads(each), size) for each in (query, key, value))
    has_window = here.windows[layer] is not None
    write_kv(key, value, k_cache, v_cache, here.slots[has_window], k_scale, v_scale)
    plan = here.attention
    if plan.full is not None and not has_window:
        plan = plan.full
    attended = paged_attention(
        query,
        k_cache,
        v_cache,
        plan,
        scale=scaling,
        k_scale=k_scale,
        v_scale=v_scale,
        softcap=softcap,
        sinks=None if sinks is None else sinks.float().reshape(-1),
    )
    return attended[None, ..., :value_dim], None


def _padded(rows: Tensor, size: int) -> Tensor:
    """Rows of heads, contiguous, with zeros behind a head that is shorter than the cache's."""
    if rows.shape[-1] < size:
        return F.pad(rows, (0, size - rows.shape[-1]))
    return rows.contiguous()


# Without a mask function of this name, transformers makes no masks.
AttentionInterface.register(ATTENTION_NAME, _attend)
