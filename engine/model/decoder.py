"""A decoder over a paged KV cache: all rows of a step in one pass."""

import sys
from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from outrider.engine.errors import UnsupportedModelError
from outrider.engine.model.compiled_layers import CompiledLayers, pass_rows
from outrider.engine.model.config import ModelConfig
from outrider.engine.model.delta_net import refuse_modes
from outrider.engine.model.experts import read_experts
from outrider.engine.model.few_row_layers import FewRowLayers
from outrider.engine.model.kv_cache import KVCache
from outrider.engine.model.layer_attention import LayerAttention, SharedInputs
from outrider.engine.model.layers import LayerReader, Norm, normalise
from outrider.engine.model.numerics import (
    is_deterministic_anyway,
    numerics_fingerprint,
    refuse_portable,
)
from outrider.engine.model.protocol import ForwardOutput
from outrider.engine.model.quantised.formats import EXACT, Rounding, StoredWay
from outrider.engine.model.quantised.scheme import (
    RoundedWeights,
    StoredWeights,
    computing_dtype,
    stored_dtype,
)
from outrider.engine.model.read_config import read_model_config
from outrider.engine.model.recurrent_cache import RecurrentPass
from outrider.engine.model.shard import WHOLE, Shard, SummedProduct
from outrider.engine.model.shard_reader import ShardReader
from outrider.engine.model.shared_config import share_of
from outrider.engine.model.shared_vocabulary import PickedRows, SharedVocabulary
from outrider.engine.model.weights import CheckpointReader, ProgressCallback, resolve_checkpoint
from outrider.kernels.attention.paged_attention import (
    AttentionBatch,
    Plan,
    plan_attention,
    plans_rows,
)
from outrider.kernels.cpu.panel_linear import PanelLinear
from outrider.kernels.cpu.product_library import is_portable
from outrider.kernels.cpu.row_attention import can_attend_rows
from outrider.kernels.layers.compiled_pass import ModelEnds, WholePass
from outrider.kernels.layers.compiled_rows import CompiledNorm, can_place_heads
from outrider.kernels.layers.embedding import embed_tokens
from outrider.kernels.layers.lora import LayerLora, LoraRows, Projection, project
from outrider.kernels.layers.rope import RotaryTable
from outrider.kernels.layers.row_invariant_linear import (
    Product,
    can_keep_stored,
    keeps_stored_weights,
)
from outrider.kernels.layers.row_invariant_ops import (
    row_invariant_softcap,
    softcap,
)
from outrider.kernels.layers.split_k_linear import HalfNormed
from outrider.kernels.layers.taps import Taps
from outrider.kernels.triton_support import is_automatic, uses_triton

DtypeName = Literal["auto", "bfloat16", "float16", "float32"]
# Tensors of a drafter inside the checkpoint have this prefix; this class does not read them.
_DRAFTER = "mtp."
DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


class DecoderModel:
    """Weights and forward pass. Holds no state between passes; the caller owns the cache.

    With `deterministic`, the bits of a token's logits depend neither on the rows that share its
    pass nor on where its keys lie.
    """

    can_record: bool

    def __init__(  # noqa: PLR0913 - all that a model is made of
        self,
        *,
        config: ModelConfig,
        reader: CheckpointReader,
        dtype: torch.dtype,
        device: torch.device,
        deterministic: bool = False,
        max_context: int | None = None,
        weights: StoredWeights | RoundedWeights | None = None,
        shard: Shard = WHOLE,
    ) -> None:
        """Read and pack all weights; use `load`. `config`, `reader`: of the shard."""
        weights = weights or StoredWeights()
        self.config = config
        self.dtype = dtype
        self.device = device
        self.deterministic = deterministic
        # A recording could follow neither the host's plan of recurrent layers nor the other ranks.
        self.can_record = config.recurrence is None and shard.is_whole
        self.feature_size = 0
        width, vocab_size = config.hidden_size, config.vocab_size
        table_shape = (shard.length(vocab_size), width)
        self._embedding = reader.read("model.embed_tokens.weight", table_shape)
        self._vocabulary = None
        if not shard.is_whole:
            self._vocabulary = SharedVocabulary(self._embedding, shard, vocab_size=vocab_size)
        ropes = tuple(dict.fromkeys(layer.rope for layer in config.layers))
        layers = LayerReader(
            reader=reader,
            config=config,
            ropes=ropes,
            weights=weights,
            deterministic=deterministic,
            sparse=partial(
                read_experts, reader, config, weights=weights, deterministic=deterministic
            ),
            shard=shard,
        )
        self._layers = tuple(layers.read(index) for index in range(config.num_layers))
        self._final_norm = layers.norm("model.norm.weight")
        self._head = layers.head(self._embedding)
        self._softcap = row_invariant_softcap if deterministic else softcap
        reader.finish(
            ignorable=("rotary_emb.inv_freq", "lm_head.weight"),
            ignorable_prefixes=(_DRAFTER, *config.ignored_prefixes),
        )
        max_positions = min(max_context or sys.maxsize, config.max_position_embeddings)
        self._rotary = tuple(
            RotaryTable(rope, max_positions=max_positions, dtype=dtype, device=device)
            for rope in ropes
        )
        self._can_place = is_automatic() and can_place_heads(dtype, device, config.head_dim)
        self._scale = config.attention_scale or config.head_dim**-0.5
        self._attend = LayerAttention(
            config, self._rotary, scale=self._scale, deterministic=deterministic
        )
        self._few_rows = None
        if shard.is_whole:
            self._few_rows = FewRowLayers.of(
                self._layers, config, self._attend, deterministic=deterministic
            )
        # Rounded as transformers rounds it, to the weights' type.
        self._embedding_scale = float(torch.tensor(config.embedding_scale, dtype=dtype))
        self._compiled = None
        is_plain = config.recurrence is None and not config.has_output_gate and shard.is_whole
        if is_plain and self._can_place and can_attend_rows(dtype, config.head_dim, device):
            self._compiled = CompiledLayers.of(
                self._layers, config, self._rotary, scale=self._scale, ends=self._ends()
            )
        self.fingerprint = reader.fingerprint
        self.num_parameters = reader.num_whole_parameters
        self.weight_bytes = reader.num_parameters * dtype.itemsize
        weights.finish()
        spared = weights.num_rounded
        if config.tie_word_embeddings and weights.has_head:  # of which the table is no less
            spared -= self._embedding.numel()
        self.weight_bytes += weights.num_bytes - spared * dtype.itemsize
        self.scheme = weights.scheme or weights.held or str(dtype).removeprefix("torch.")
        if not self._is_portable:
            refuse_portable(config.model_id)
        self.numerics = numerics_fingerprint(
            checkpoint=self.fingerprint,
            scheme=self.scheme,
            dtype=dtype,
            device=device,
            deterministic=deterministic,
            num_ranks=shard.count,
            has_long_rope=any(rope.serves_long(max_positions) for rope in ropes),
            rotation=self._rotary,
        )

    @property
    def _is_portable(self) -> bool:
        """True if compiled kernels are all of a pass but for operations with one rounding."""
        is_whole = self._compiled is not None and self._compiled.is_whole
        return is_whole and self.deterministic and self.config.logit_softcap is None

    @property
    def embedding(self) -> Tensor:
        """The table of tokens: [vocab_size, hidden_size], of a model in one piece."""
        assert self._vocabulary is None, "see WholeEnds"
        return self._embedding

    @property
    def head(self) -> Product:
        """The product that gives logits, before they are scaled and capped; as `embedding`."""
        assert self._vocabulary is None, "see WholeEnds"
        return self._head

    def _ends(self) -> ModelEnds | None:
        """Return what is before the layers and behind them, where all of it is compiled."""
        norm, head = self._final_norm, self._head
        if not (isinstance(norm, CompiledNorm) and isinstance(head, PanelLinear)):
            return None
        return ModelEnds(
            embedding=self._embedding.contiguous(),
            embedding_scale=self._embedding_scale,
            norm=norm,
            head=head,
        )

    @classmethod
    def load(  # noqa: PLR0913 - all that a model may be loaded with
        cls,
        path_or_id: str,
        *,
        dtype: DtypeName = "auto",
        device: str | torch.device = "cpu",
        deterministic: bool | None = False,
        max_context: int | None = None,
        rounding: Rounding | StoredWay | None = None,
        on_progress: ProgressCallback | None = None,
        shard: Shard = WHOLE,
    ) -> "DecoderModel":
        """Load a checkpoint from a local folder or, if there is none, from the hub.

        `dtype` "auto" is the checkpoint's own; `deterministic`: see the class, None for where it
        costs nothing (`is_deterministic_anyway`), as portable numerics are in any case;
        `max_context`: the positions to be served, where they are fewer than the model's:
        longrope's frequencies depend on it; `rounding`: of weights, None for none; of weights that
        come quantised, "decode" makes plain ones, "exact" multiplies them with rows that are not
        rounded; `shard`: the part of the model to load.
        Raises UnsupportedModelError for what the engine cannot run and for missing, misshapen or
        unexpected tensors.
        """
        may_stay, is_exact = rounding in (None, EXACT), rounding == EXACT
        rounding = rounding if isinstance(rounding, Rounding) else None
        folder = resolve_checkpoint(path_or_id)
        whole = read_model_config(folder)
        config = share_of(whole, shard)
        wanted = _computing_dtype(path_or_id, config, dtype, rounding)
        target = torch.device(device)
        keeps = None
        if may_stay and keeps_stored_weights(torch.bfloat16, target):
            if dtype == "auto":
                wanted = stored_dtype(config.weight_format, wanted)
            keeps = partial(can_keep_stored, device=target) if wanted == torch.bfloat16 else None
        if config.recurrence is not None:
            refuse_portable(path_or_id)
            refuse_modes(config, is_rounded=rounding is not None, deterministic=deterministic)
            deterministic, keeps = False, None
        if deterministic is None or is_portable():
            deterministic = is_deterministic_anyway(wanted, target, head_dim=config.head_dim)
        make_reader: Callable[..., CheckpointReader] = CheckpointReader
        if not shard.is_whole:
            make_reader = partial(ShardReader, config=whole, shard=shard)
        with (
            torch.inference_mode(),
            make_reader(
                folder,
                dtype=wanted,
                device=target,
                on_progress=on_progress,
                text_only=config.is_text_part,
                weight_format=config.weight_format,
                keeps=keeps,
            ) as reader,
        ):
            weights: StoredWeights | RoundedWeights = StoredWeights(is_exact=is_exact)
            if rounding is not None:
                weights = RoundedWeights(reader, rounding)
            return cls(
                config=config,
                reader=reader,
                dtype=wanted,
                device=target,
                deterministic=deterministic,
                max_context=max_context,
                weights=weights,
                shard=shard,
            )

    def plan_attention(self, batch: AttentionBatch, *, block_size: int) -> Plan:
        """The step's plan for this model's heads, windows, dtype and device."""
        return plan_attention(
            batch,
            block_size=block_size,
            num_query_heads=self.config.num_query_heads,
            num_kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            sliding_window=self.config.sliding_window,
            has_full_layers=self.config.has_mixed_windows,
            deterministic=self.deterministic,
            dtype=self.dtype,
            device=self.device,
        )

    def whole_pass(self, kv_cache: KVCache) -> WholePass | None:
        """Return what the compiled library needs to run passes itself; None where it cannot.

        Its logits are the head's product, so nothing may be left to do with that.
        """
        config = self.config
        is_finished = config.logit_scale == 1.0 and config.logit_softcap is None
        has_rows = kv_cache.dtype == self.dtype and plans_rows(
            deterministic=self.deterministic,
            dtype=self.dtype,
            head_dim=config.head_dim,
            device=self.device,
        )
        if self._compiled is None or not (is_finished and has_rows):
            return None
        return self._compiled.whole(kv_cache)

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
        """Run n rows; write their keys and values; return logits of the rows in `logit_rows`.

        `token_ids`, `positions`, `slot_mapping`: [n] int64 (a slot of -1 keeps nothing);
        `logit_rows`: [m] int64, indices of rows, or None for all of them. Rows that are not in
        logit_rows only fill the cache. Part of a model yields its part of them, which `join_logits`
        puts together. `logits_out`: float32 [m, vocab_size] that the logits are written to. `lora`:
        the rows' adapters, None where no row has one. `recurrent`: the pass of the recurrent
        layers, where there are some. `taps`: whose hidden rows are wanted of all n rows (see
        `Taps`). `features`: None, since only drafters read them. On a GPU nothing waits for the
        device, so that CUDA graphs can hold a pass.
        """
        assert features is None, "a decoder reads no features"
        num_rows = token_ids.shape[0]
        found = Taps(taps, num_rows=num_rows, like=self._embedding) if taps else None
        here = SharedInputs(
            positions=positions,
            slots=(slot_mapping, kv_cache.slots_of(slot_mapping)),
            attention=attention,
            kv_cache=kv_cache,
            is_fused=uses_triton(self.device),
            is_placed=self._can_place and kv_cache.dtype == self.dtype,
            lora=lora,
            recurrent=recurrent,
        )
        compiled = self._compiled
        if compiled is not None and here.is_placed and compiled.can_run(num_rows, attention):
            here.rows = pass_rows(positions, here.slots, attention, lora)
            if compiled.runs_whole(num_rows, logit_rows):
                product, hidden = compiled.run_whole(
                    token_ids,
                    here.rows,
                    kv_cache,
                    wanted=logit_rows,
                    logits_out=logits_out,
                    taps=found,
                )
                return ForwardOutput(
                    logits=self._finished(product),
                    hidden=hidden,
                    taps=None if found is None else found.rows,
                )
        return self._forward(token_ids, here, logit_rows, logits_out, found)

    def _forward(
        self,
        token_ids: Tensor,
        here: SharedInputs,
        logit_rows: Tensor | None,
        logits_out: Tensor | None,
        taps: Taps | None,
    ) -> ForwardOutput:
        """Run a pass of which at most the layers are compiled."""
        if not (here.is_fused or here.is_placed):
            here.turns = tuple(table.gather(here.positions) for table in self._rotary)
        residual = self._embed(token_ids, here)  # [n, hidden_size]
        some_rows = logit_rows
        takes_all = logit_rows is not None and logit_rows.shape[0] >= residual.shape[0]
        last = len(self._layers) - 1
        if takes_all or (taps is not None and last + 1 in taps.layers):
            some_rows = None  # all of them, perhaps in another order
        update: Tensor | None = None
        num_done = 0
        if here.rows is not None and self._compiled is not None:
            # The last layer computes fewer rows where fewer are wanted.
            num_done = last + (some_rows is None)
            update = self._compiled.run(
                residual, here.rows, here.kv_cache, count=num_done, taps=taps
            )
        few = self._few_rows
        if few is not None and not few.can_run(len(residual), here):
            few = None
        normed: HalfNormed | None = None
        for index in range(num_done, last + 1):
            rows = some_rows if index == last else None
            if few is not None:
                normed, residual = few.run(index, normed, residual, here, rows, taps)
            else:
                update, residual = self._run_layer(index, update, residual, here, rows, taps)
        hidden = normalise(self._final_norm, update, residual, is_fused=here.is_fused)
        if taps is not None:
            taps.note(last + 1, hidden)
        if logit_rows is not None and some_rows is None:
            hidden = hidden.index_select(0, logit_rows)
        return ForwardOutput(
            logits=self._logits(hidden, logits_out),
            hidden=hidden,
            taps=None if taps is None else taps.rows,
        )

    def _run_layer(
        self,
        index: int,
        update: Tensor | None,
        residual: Tensor,
        here: SharedInputs,
        some_rows: Tensor | None,
        taps: Taps | None,
    ) -> tuple[Tensor, Tensor]:
        """Return what layer `index` adds to the residual stream, and the stream: [m, width] each.

        `update`: what the layer before it adds, [n, width]. `some_rows`: int64 [m], past whose keys
        and values only they matter; None for all n.
        """
        layer = self._layers[index]
        normed = normalise(layer.before_attention, update, residual, is_fused=here.is_fused)
        if taps is not None:
            taps.note(index, residual)
        attended = self._attend(layer, index, normed, here)
        own_lora = here.layer_lora(index)
        if some_rows is not None:
            attended = attended.index_select(0, some_rows)
            residual = residual.index_select(0, some_rows)
            if own_lora is not None:
                own_lora = LayerLora(own_lora.rows.select(some_rows), index)
            if self.config.is_parallel:
                normed = normed.index_select(0, some_rows)
        output = self._project_output(layer.output, attended, own_lora)
        update = self._added(layer.after_attention, output)
        if not self.config.is_parallel:
            normed = normalise(layer.before_mlp, update, residual, is_fused=here.is_fused)
        inner = layer.mlp(normed, is_fused=here.is_fused, lora=own_lora)
        added = self._added(layer.after_mlp, inner)
        return (update.add_(added) if self.config.is_parallel else added), residual

    @staticmethod
    def _project_output(
        product: Product | SummedProduct, attended: Tensor, lora: LayerLora | None
    ) -> Tensor:
        if isinstance(product, SummedProduct):
            return product(attended, lora)
        return project(product, attended, Projection.OUTPUT, lora)

    def _logits(self, hidden: Tensor, logits_out: Tensor | None) -> Tensor:
        """Return the head's product, [m, vocab_size] float32, scaled and capped.

        One rank of a shared model returns the product with its own part of the vocabulary, neither
        scaled nor capped. `join_logits` puts the parts together and finishes them.
        """
        product = self._head(hidden)
        if self._vocabulary is not None:
            return product
        return self._finished(product.float() if logits_out is None else logits_out.copy_(product))

    def join_logits(self, product: Tensor, picked: PickedRows | None) -> Tensor:
        """Return all ranks' logits on rank 0 (`SharedVocabulary.joined`)."""
        assert self._vocabulary is not None, "a whole model's logits need no joining"
        return self._vocabulary.joined(product, self._finished, picked)

    def _finished(self, logits: Tensor) -> Tensor:
        """Scale and cap, in place."""
        if self.config.logit_scale != 1.0:
            logits.mul_(self.config.logit_scale)
        if self.config.logit_softcap is not None:
            self._softcap(logits, self.config.logit_softcap)
        return logits

    def _added(self, norm: Norm | None, rows: Tensor) -> Tensor:
        """Return what attention or MLP adds to the residual stream. [n, width]."""
        if norm is not None:
            rows = norm(rows)
        return rows if self.config.residual_scale == 1.0 else rows.mul_(self.config.residual_scale)

    def _embed(self, token_ids: Tensor, here: SharedInputs) -> Tensor:
        if self._vocabulary is not None:
            rows = self._vocabulary.look_up(token_ids, is_fused=here.is_fused)
        elif here.is_fused:
            rows = embed_tokens(self._embedding, token_ids)
        else:
            rows = self._embedding.index_select(0, token_ids)
        return rows if self._embedding_scale == 1.0 else rows.mul_(self._embedding_scale)


def _computing_dtype(
    path_or_id: str, config: ModelConfig, dtype: DtypeName, rounding: Rounding | None
) -> torch.dtype:
    """Return the type that a model computes in. Raises UnsupportedModelError."""
    name = config.dtype if dtype == "auto" else dtype
    if name not in DTYPES:
        raise UnsupportedModelError(
            f"{path_or_id}: dtype {name!r} is not one of {', '.join(DTYPES)}."
        )
    try:
        return computing_dtype(rounding, DTYPES[name], is_asked=dtype != "auto")
    except ValueError as error:
        raise UnsupportedModelError(f"{path_or_id}: {error}") from None
