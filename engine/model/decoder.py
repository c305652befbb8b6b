"""A Llama-family decoder over a paged KV cache: all rows of a step in one pass."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from engine.errors import UnsupportedModelError
from engine.model.config import ModelConfig
from engine.model.kv_cache import KVCache
from engine.model.weights import CheckpointReader, ProgressCallback, resolve_checkpoint
from kernels.attention.paged_attention import AttentionBatch, Plan, paged_attention, plan_attention
from kernels.kv.rope_write_kv import rope_write_kv
from kernels.kv.write_kv import write_kv_reference
from kernels.layers.embedding import embed_tokens
from kernels.layers.linear import Linear
from kernels.layers.rms_norm import RmsNorm, add_rms_norm, rms_norm
from kernels.layers.rope import RotaryTable, rotate
from kernels.layers.row_invariant_linear import RowInvariantLinear, make_linear, make_norm
from kernels.layers.row_invariant_ops import row_invariant_rotate, row_invariant_silu_mul
from kernels.layers.silu_mul import silu_mul, silu_mul_reference
from kernels.triton_support import uses_triton

DtypeName = Literal["auto", "bfloat16", "float16", "float32"]
_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
# A tied head gets a packed copy of the embedding table (look-ups need plain rows) while the copy
# is at most this share of the weights plus this many bytes: the plain product takes 2.3 times as
# long (Zen 5, 151936 x 1024 bfloat16, 1 to 16 rows: 24 to 30 ms against 10 to 12). Beyond, the
# one table serves both, because weights are to be held once.
_TIED_HEAD_COPY_SHARE = 0.15
_TIED_HEAD_COPY_BYTES = 128 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardOutput:
    """The output of a pass for the rows asked for.

    `logits`: [m, vocab_size] float32; `hidden`: [m, hidden_size], after the final norm.
    """

    logits: Tensor
    hidden: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    input_norm: RmsNorm
    qkv: Linear | RowInvariantLinear
    qk_norm: RmsNorm | None  # over each head
    output: Linear | RowInvariantLinear
    post_attention_norm: RmsNorm
    gate_up: Linear | RowInvariantLinear
    down: Linear | RowInvariantLinear
    has_window: bool


@dataclass(slots=True, kw_only=True)
class _Pass:
    """The inputs that a pass's layers share. `is_fused`: Triton's kernels turn heads by position.

    cos, sin: [n, 1, head_dim], gathered for the others.
    """

    positions: Tensor
    slot_mapping: Tensor
    attention: Plan
    kv_cache: KVCache
    is_fused: bool
    cos: Tensor | None = None
    sin: Tensor | None = None


class DecoderModel:
    """Weights and forward pass. Holds no state between passes; the caller owns the cache.

    With `deterministic`, the bits of a token's logits depend neither on the rows that share its
    pass nor on where its keys lie.
    """

    def __init__(
        self,
        *,
        config: ModelConfig,
        reader: CheckpointReader,
        dtype: torch.dtype,
        device: torch.device,
        deterministic: bool = False,
    ) -> None:
        """Read and pack all weights; use `load`."""
        self.config = config
        self.dtype = dtype
        self.device = device
        self.deterministic = deterministic
        width, vocab_size = config.hidden_size, config.vocab_size
        self._embedding = reader.read("model.embed_tokens.weight", (vocab_size, width))
        self._layers = tuple(
            _read_layer(reader, config, index, deterministic=deterministic)
            for index in range(config.num_layers)
        )
        self._final_norm = make_norm(
            reader.read("model.norm.weight", (width,)),
            config.rms_norm_eps,
            deterministic=deterministic,
        )
        head, can_pack = self._embedding, True
        if config.tie_word_embeddings:
            spare_bytes = _TIED_HEAD_COPY_BYTES + _TIED_HEAD_COPY_SHARE * reader.total_bytes
            can_pack = head.nbytes <= spare_bytes
        else:
            head = reader.read("lm_head.weight", (vocab_size, width))
        self._head = make_linear(head, pack=can_pack, deterministic=deterministic)
        # Not of the kernels' launchers: on the CPU, choosing is not free.
        self._rotate = row_invariant_rotate if deterministic else rotate
        self._silu_mul = row_invariant_silu_mul if deterministic else silu_mul_reference
        reader.finish(ignorable=("rotary_emb.inv_freq", "lm_head.weight"))
        self._rotary = RotaryTable(
            config.rope, max_positions=config.max_position_embeddings, dtype=dtype, device=device
        )
        self._scale = config.head_dim**-0.5
        self.fingerprint = reader.fingerprint
        self.num_parameters = reader.num_parameters
        self.weight_bytes = reader.num_parameters * dtype.itemsize

    @classmethod
    def load(
        cls,
        path_or_id: str,
        *,
        dtype: DtypeName = "auto",
        device: str | torch.device = "cpu",
        deterministic: bool = False,
        on_progress: ProgressCallback | None = None,
    ) -> "DecoderModel":
        """Load a checkpoint from a local folder or, if there is none, from the hub.

        `dtype` "auto" is the checkpoint's own; `deterministic`: see the class. Raises
        UnsupportedModelError for what the engine cannot run and for missing, misshapen or
        unexpected tensors.
        """
        folder = resolve_checkpoint(path_or_id)
        config = ModelConfig.from_hf(folder)
        name = config.dtype if dtype == "auto" else dtype
        if name not in _DTYPES:
            raise UnsupportedModelError(
                f"{path_or_id}: dtype {name!r} is not one of {', '.join(_DTYPES)}."
            )
        target = torch.device(device)
        with (
            torch.inference_mode(),
            CheckpointReader(
                folder, dtype=_DTYPES[name], device=target, on_progress=on_progress
            ) as reader,
        ):
            return cls(
                config=config,
                reader=reader,
                dtype=_DTYPES[name],
                device=target,
                deterministic=deterministic,
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

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        attention: Plan,
        kv_cache: KVCache,
        logit_rows: Tensor | None,
        *,
        logits_out: Tensor | None = None,
    ) -> ForwardOutput:
        """Run n rows; write their keys and values; return logits of the rows in `logit_rows`.

        token_ids, positions, slot_mapping: [n] int64 (a slot of -1 keeps nothing); logit_rows: [m]
        int64, indices of rows, or None for all of them. Rows that are not in logit_rows only fill
        the cache. logits_out: float32 [m, vocab_size] that the logits are written to.
        On a GPU nothing waits for the device, so that CUDA graphs can hold a pass.
        """
        here = _Pass(
            positions=positions,
            slot_mapping=slot_mapping,
            attention=attention,
            kv_cache=kv_cache,
            is_fused=uses_triton(self.device),
        )
        if not here.is_fused:
            here.cos, here.sin = self._rotary.gather(positions)
        residual = self._embed(token_ids, here)  # [n, hidden_size]
        some_rows = logit_rows
        if logit_rows is not None and logit_rows.shape[0] >= residual.shape[0]:
            some_rows = None  # all of them, perhaps in another order
        update: Tensor | None = None
        last = len(self._layers) - 1
        silu = silu_mul if here.is_fused else self._silu_mul
        for index, layer in enumerate(self._layers):
            normed = _normalise(layer.input_norm, update, residual, here)
            attended = self._attend(index, normed, here)
            if index == last and some_rows is not None:
                # Past the last cache write only the wanted rows matter.
                attended = attended.index_select(0, some_rows)
                residual = residual.index_select(0, some_rows)
            normed = _normalise(layer.post_attention_norm, layer.output(attended), residual, here)
            update = layer.down(silu(layer.gate_up(normed)))
        assert update is not None
        hidden = _normalise(self._final_norm, update, residual, here)
        if logit_rows is not None and some_rows is None:
            hidden = hidden.index_select(0, logit_rows)
        logits = self._head(hidden)  # [m, vocab_size]
        logits = logits.float() if logits_out is None else logits_out.copy_(logits)
        return ForwardOutput(logits=logits, hidden=hidden)

    def _embed(self, token_ids: Tensor, here: _Pass) -> Tensor:
        if here.is_fused:
            return embed_tokens(self._embedding, token_ids)
        return self._embedding.index_select(0, token_ids)

    def _attend(self, index: int, normed: Tensor, here: _Pass) -> Tensor:
        """Attention of one layer up to the output projection: [n, heads * head_dim]."""
        config, layer = self.config, self._layers[index]
        num_rows, num_query_heads = len(normed), config.num_query_heads
        heads = layer.qkv(normed).view(num_rows, -1, config.head_dim)  # queries, keys, values
        k_cache, v_cache = here.kv_cache.layers[index]
        k_scale, v_scale = here.kv_cache.layer_scales[index]
        if here.is_fused:
            query = rope_write_kv(
                heads,
                here.positions,
                here.slot_mapping,
                self._rotary,
                k_cache,
                v_cache,
                num_query_heads=num_query_heads,
                qk_norm=layer.qk_norm,
                k_scale=k_scale,
                v_scale=v_scale,
            )
        else:
            assert here.cos is not None
            assert here.sin is not None
            num_rotated = num_query_heads + config.num_kv_heads
            query_key, value = heads[:, :num_rotated], heads[:, num_rotated:]
            if layer.qk_norm is not None:
                query_key = layer.qk_norm(query_key)
            query_key = self._rotate(query_key, here.cos, here.sin)
            query, key = query_key[:, :num_query_heads], query_key[:, num_query_heads:]
            write_kv_reference(key, value, k_cache, v_cache, here.slot_mapping, k_scale, v_scale)
        plan = here.attention
        if plan.full is not None and not layer.has_window:
            plan = plan.full
        attended = paged_attention(
            query, k_cache, v_cache, plan, scale=self._scale, k_scale=k_scale, v_scale=v_scale
        )
        return attended.view(num_rows, -1)


def _normalise(norm: RmsNorm, update: Tensor | None, residual: Tensor, here: _Pass) -> Tensor:
    """The norm of the residual stream, to which the update is added first. All: [n, width]."""
    if update is None:
        return rms_norm(residual, norm.weight, norm.eps) if here.is_fused else norm(residual)
    if here.is_fused:
        return add_rms_norm(update, residual, norm.weight, norm.eps)
    return norm.add(update, residual)


def _read_layer(
    reader: CheckpointReader, config: ModelConfig, index: int, *, deterministic: bool
) -> _Layer:
    """One decoder layer; query, key and value projections are fused, gate and up as well."""
    prefix = f"model.layers.{index}."
    width, head_dim = config.hidden_size, config.head_dim
    query_size, kv_size = config.num_query_heads * head_dim, config.num_kv_heads * head_dim

    def read(name: str, *shape: int) -> Tensor:
        return reader.read(prefix + name, shape)

    def norm(name: str) -> RmsNorm:
        return make_norm(read(name, width), config.rms_norm_eps, deterministic=deterministic)

    def linear(
        names: tuple[str, ...], out_features: tuple[int, ...], in_features: int, bias: bool
    ) -> Linear | RowInvariantLinear:
        parts = list(zip(names, out_features, strict=True))
        weights = [read(f"{name}.weight", size, in_features) for name, size in parts]
        biases = [read(f"{name}.bias", size) for name, size in parts] if bias else []
        weight = torch.cat(weights) if len(weights) > 1 else weights[0]
        return make_linear(
            weight, torch.cat(biases) if biases else None, deterministic=deterministic
        )

    qk_norm = None
    if config.qk_norm:
        q_norm = read("self_attn.q_norm.weight", head_dim).expand(config.num_query_heads, -1)
        k_norm = read("self_attn.k_norm.weight", head_dim).expand(config.num_kv_heads, -1)
        # a row of weights for each query and key head
        qk_norm = make_norm(
            torch.cat((q_norm, k_norm)), config.rms_norm_eps, deterministic=deterministic
        )
    projections = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    inner = config.intermediate_size
    return _Layer(
        input_norm=norm("input_layernorm.weight"),
        qkv=linear(projections, (query_size, kv_size, kv_size), width, config.attention_bias),
        qk_norm=qk_norm,
        output=linear(("self_attn.o_proj",), (width,), query_size, config.output_bias),
        post_attention_norm=norm("post_attention_layernorm.weight"),
        gate_up=linear(("mlp.gate_proj", "mlp.up_proj"), (inner, inner), width, config.mlp_bias),
        down=linear(("mlp.down_proj",), (width,), inner, config.mlp_bias),
        has_window=config.sliding_windows[index] is not None,
    )
