"""A Llama-family decoder over a paged KV cache: all rows of a step in one pass."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from engine.errors import UnsupportedModelError
from engine.kv_cache import KVCache
from engine.model_config import ModelConfig
from engine.weights import CheckpointReader, ProgressCallback, resolve_checkpoint
from kernels.linear import Linear
from kernels.paged_attention import AttentionBatch, AttentionPlan, paged_attention, plan_attention
from kernels.rms_norm import RmsNorm
from kernels.rope import RotaryTable, rotate
from kernels.silu_mul import silu_mul
from kernels.write_kv import write_kv

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
    """What a pass yields for the rows asked for.

    `logits`: [m, vocab_size] float32; `hidden`: [m, hidden_size], after the final norm.
    """

    logits: Tensor
    hidden: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    input_norm: RmsNorm
    qkv: Linear
    qk_norm: RmsNorm | None  # over each head
    output: Linear
    post_attention_norm: RmsNorm
    gate_up: Linear
    down: Linear
    has_window: bool


class DecoderModel:
    """Weights and forward pass. Holds no state between passes; the caller owns the cache."""

    def __init__(
        self,
        *,
        config: ModelConfig,
        reader: CheckpointReader,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Read and pack all weights; use `load`."""
        self.config = config
        self.dtype = dtype
        self.device = device
        width, vocab_size = config.hidden_size, config.vocab_size
        self._embedding = reader.read("model.embed_tokens.weight", (vocab_size, width))
        self._layers = tuple(
            _read_layer(reader, config, index) for index in range(config.num_layers)
        )
        self._final_norm = RmsNorm(reader.read("model.norm.weight", (width,)), config.rms_norm_eps)
        if config.tie_word_embeddings:
            spare_bytes = _TIED_HEAD_COPY_BYTES + _TIED_HEAD_COPY_SHARE * reader.total_bytes
            self._head = Linear(self._embedding, pack=self._embedding.nbytes <= spare_bytes)
        else:
            self._head = Linear(reader.read("lm_head.weight", (vocab_size, width)))
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
        on_progress: ProgressCallback | None = None,
    ) -> "DecoderModel":
        """Load a checkpoint from a local folder or, if there is none, from the hub.

        `dtype` "auto" is the checkpoint's own. Raises UnsupportedModelError for what the engine
        cannot run and for missing, misshapen or unexpected tensors.
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
            return cls(config=config, reader=reader, dtype=_DTYPES[name], device=target)

    def plan_attention(self, batch: AttentionBatch, *, block_size: int) -> AttentionPlan:
        """The step's plan for this model's heads, windows, dtype and device."""
        return plan_attention(
            batch,
            block_size=block_size,
            num_query_heads=self.config.num_query_heads,
            num_kv_heads=self.config.num_kv_heads,
            sliding_window=self.config.sliding_window,
            has_full_layers=self.config.has_mixed_windows,
            dtype=self.dtype,
            device=self.device,
        )

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        attention: AttentionPlan,
        kv_cache: KVCache,
        logit_rows: Tensor,
    ) -> ForwardOutput:
        """Run n rows; write their keys and values; return logits of the rows in `logit_rows`.

        token_ids, positions, slot_mapping: [n] int64; logit_rows: [m] int64, indices of rows.
        Rows that are not in logit_rows only fill the cache.
        """
        cos, sin = self._rotary.gather(positions)  # [n, 1, head_dim] each
        residual = self._embedding.index_select(0, token_ids)  # [n, hidden_size]
        num_wanted = logit_rows.shape[0]
        is_partial = num_wanted < residual.shape[0]
        update: Tensor | None = None
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            normed = (
                layer.input_norm(residual)
                if update is None
                else layer.input_norm.add(update, residual)
            )
            attended = self._attend(
                layer, normed, cos, sin, slot_mapping, attention, kv_cache.layers[index]
            )
            if index == last and is_partial:
                # Past the last cache write only the wanted rows matter.
                attended = attended.index_select(0, logit_rows)
                residual = residual.index_select(0, logit_rows)
            normed = layer.post_attention_norm.add(layer.output(attended), residual)
            update = layer.down(silu_mul(layer.gate_up(normed)))
        assert update is not None
        hidden = self._final_norm.add(update, residual)
        if not is_partial:
            hidden = hidden.index_select(0, logit_rows)
        return ForwardOutput(logits=self._head(hidden).float(), hidden=hidden)

    def _attend(
        self,
        layer: _Layer,
        normed: Tensor,
        cos: Tensor,
        sin: Tensor,
        slot_mapping: Tensor,
        attention: AttentionPlan,
        caches: tuple[Tensor, Tensor],
    ) -> Tensor:
        """Attention of one layer up to the output projection: [n, heads * head_dim]."""
        config = self.config
        num_rows = len(normed)
        num_query_heads, num_kv_heads = config.num_query_heads, config.num_kv_heads
        heads = layer.qkv(normed).view(num_rows, -1, config.head_dim)  # queries, keys, values
        num_rotated = num_query_heads + num_kv_heads
        query_key, value = heads[:, :num_rotated], heads[:, num_rotated:]
        if layer.qk_norm is not None:
            query_key = layer.qk_norm(query_key)
        query_key = rotate(query_key, cos, sin)
        query, key = query_key[:, :num_query_heads], query_key[:, num_query_heads:]
        k_cache, v_cache = caches
        write_kv(key, value, k_cache, v_cache, slot_mapping)
        plan = attention.full if attention.full and not layer.has_window else attention
        attended = paged_attention(query, k_cache, v_cache, plan, scale=self._scale)
        return attended.view(num_rows, -1)


def _read_layer(reader: CheckpointReader, config: ModelConfig, index: int) -> _Layer:
    """One decoder layer; query, key and value projections are fused, gate and up as well."""
    prefix = f"model.layers.{index}."
    width, head_dim = config.hidden_size, config.head_dim
    query_size, kv_size = config.num_query_heads * head_dim, config.num_kv_heads * head_dim

    def read(name: str, *shape: int) -> Tensor:
        return reader.read(prefix + name, shape)

    def norm(name: str) -> RmsNorm:
        return RmsNorm(read(name, width), config.rms_norm_eps)

    def linear(
        names: tuple[str, ...], out_features: tuple[int, ...], in_features: int, bias: bool
    ) -> Linear:
        parts = list(zip(names, out_features, strict=True))
        weights = [read(f"{name}.weight", size, in_features) for name, size in parts]
        biases = [read(f"{name}.bias", size) for name, size in parts] if bias else []
        weight = torch.cat(weights) if len(weights) > 1 else weights[0]
        return Linear(weight, torch.cat(biases) if biases else None)

    qk_norm = None
    if config.qk_norm:
        q_norm = read("self_attn.q_norm.weight", head_dim).expand(config.num_query_heads, -1)
        k_norm = read("self_attn.k_norm.weight", head_dim).expand(config.num_kv_heads, -1)
        # a row of weights for each query and key head
        qk_norm = RmsNorm(torch.cat((q_norm, k_norm)), config.rms_norm_eps)
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
