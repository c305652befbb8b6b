"""Heads as they are trained: the layer of EAGLE-3 and of an MTP module, unrolled over some levels.

The parameters' names are those of the public files, so a state is what is written. Training-time
test (Li et al., EAGLE-3, 2025): level 0 of row t has the large model's features of place t and
token t + 1; level k has the head's own output of level k - 1 and token t + 1 + k. As in a draft, it
attends to the rows of the text up to t and to its own earlier levels.
"""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

TrainedHeadKind = Literal["eagle3", "mtp"]

# What fc adds of the taps before the last at the beginning, in parts of what is random otherwise.
_OTHER_TAPS = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSizes:
    """Sizes of a head of one layer; the large model's, but for `draft_vocab_size`."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_size: int
    draft_vocab_size: int
    tap_layers: tuple[int, ...]
    """The layers that give the features, as transformers numbers hidden states."""
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    has_head_norms: bool = False
    """Over each query and key head, as Qwen3 has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetEnds:
    """The ends of the large model: token vectors, last norm, output matrix."""

    embedding: Tensor
    """[vocab_size, hidden_size]."""
    norm: Tensor
    """[hidden_size]."""
    head: Tensor
    """[vocab_size, hidden_size]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnrollRows:
    """The rows to unroll, of a batch of sequences padded to n tokens."""

    token_ids: Tensor
    """[batch, n]."""
    taps: Tensor
    """[batch, n, num_taps * hidden_size]."""
    rows: Tensor
    """[batch, num_rows], each the place whose taps it has."""


class TrainableRmsNorm(nn.Module):
    """x / rms(x) * weight, in float32 whatever products are computed in."""

    def __init__(self, size: int, *, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._eps = eps

    def forward(self, rows: Tensor) -> Tensor:
        """[..., size] to the same, float32."""
        return functional.rms_norm(rows.float(), self.weight.shape, self.weight, self._eps)


class _Attention(nn.Module):
    """Projections of an attention layer that reads `in_size` channels."""

    _rates: Tensor

    def __init__(self, sizes: HeadSizes, in_size: int) -> None:
        super().__init__()
        query_size, key_size = (
            count * sizes.head_dim for count in (sizes.num_heads, sizes.num_kv_heads)
        )
        self.q_proj = nn.Linear(in_size, query_size, bias=False)
        self.k_proj = nn.Linear(in_size, key_size, bias=False)
        self.v_proj = nn.Linear(in_size, key_size, bias=False)
        self.o_proj = nn.Linear(query_size, sizes.hidden_size, bias=False)
        self.q_norm = self.k_norm = None
        if sizes.has_head_norms:
            self.q_norm, self.k_norm = (
                TrainableRmsNorm(sizes.head_dim, eps=sizes.norm_eps) for _ in range(2)
            )
        self._num_kv_heads = sizes.num_kv_heads
        self._head_dim = sizes.head_dim
        rates = sizes.rope_theta ** -(torch.arange(0, sizes.head_dim, 2) / sizes.head_dim)
        self.register_buffer("_rates", rates, persistent=False)

    def queries(self, rows: Tensor, places: Tensor) -> Tensor:
        """[batch, n, in_size] to [batch, kv heads, group, n, head_dim], turned by `places`."""
        return self._turned(self._heads(self.q_proj(rows)), self.q_norm, places)

    def keys(self, rows: Tensor, places: Tensor) -> Tensor:
        """Return keys as `queries` does, with groups of one."""
        return self._turned(self._heads(self.k_proj(rows)), self.k_norm, places)

    def values(self, rows: Tensor) -> Tensor:
        """Return values as `keys` does, as they are."""
        return self._heads(self.v_proj(rows))

    def _heads(self, product: Tensor) -> Tensor:
        batch, length, _ = product.shape
        heads = product.view(batch, length, self._num_kv_heads, -1, self._head_dim)
        return heads.permute(0, 2, 3, 1, 4)

    def _turned(self, heads: Tensor, norm: "TrainableRmsNorm | None", places: Tensor) -> Tensor:
        product = heads
        if norm is not None:
            heads = norm(heads)
        angles = places[:, None, None, :, None] * self._rates  # [batch, 1, 1, n, head_dim / 2]
        cos, sin = angles.cos(), angles.sin()
        first, second = heads.float().chunk(2, dim=-1)
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
        return turned.to(product.dtype)


class _Mlp(nn.Module):
    """A gated MLP with SiLU."""

    def __init__(self, sizes: HeadSizes) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(sizes.hidden_size, sizes.mlp_size, bias=False)
        self.up_proj = nn.Linear(sizes.hidden_size, sizes.mlp_size, bias=False)
        self.down_proj = nn.Linear(sizes.mlp_size, sizes.hidden_size, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        product: Tensor = self.down_proj(functional.silu(self.gate_proj(rows)) * self.up_proj(rows))
        return product


class _Layer(nn.Module):
    """A decoder layer whose attention reads `in_size` channels."""

    def __init__(self, sizes: HeadSizes, in_size: int) -> None:
        super().__init__()
        self.self_attn = _Attention(sizes, in_size)
        self.mlp = _Mlp(sizes)
        self.input_layernorm = TrainableRmsNorm(sizes.hidden_size, eps=sizes.norm_eps)
        self.post_attention_layernorm = TrainableRmsNorm(sizes.hidden_size, eps=sizes.norm_eps)


class _Eagle3Layer(_Layer):
    """A decoder layer that reads token vectors and features, each through a norm of its own."""

    def __init__(self, sizes: HeadSizes) -> None:
        super().__init__(sizes, 2 * sizes.hidden_size)
        self.hidden_norm = TrainableRmsNorm(sizes.hidden_size, eps=sizes.norm_eps)


class TrainedHead(nn.Module):
    """A head in training."""

    kind: TrainedHeadKind
    sizes: HeadSizes
    embedding: Tensor
    """The large model's token vectors, which stay as they are."""
    token_ids: Tensor
    """int64 [draft_vocab_size], the large model's token of each of the head's."""
    draft_ids: Tensor

    def __init__(self, sizes: HeadSizes, ends: TargetEnds, token_ids: Tensor) -> None:
        super().__init__()
        self.sizes = sizes
        self.register_buffer("embedding", ends.embedding.float(), persistent=False)
        self.register_buffer("token_ids", token_ids, persistent=False)
        draft_ids = torch.full((len(ends.embedding),), -1)
        draft_ids[token_ids] = torch.arange(len(token_ids))
        self.register_buffer("draft_ids", draft_ids, persistent=False)

    @property
    @abstractmethod
    def layer(self) -> _Layer:
        """The one layer."""

    @abstractmethod
    def features_of_taps(self, taps: Tensor) -> Tensor:
        """Turn taps [..., num_taps * hidden_size] into text rows' features [..., hidden_size]."""

    @abstractmethod
    def layer_input(self, embeds: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """(what attention reads, the residual stream in front of it) of rows."""

    @abstractmethod
    def outputs(self, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(what logits are made of, the next level's features) of the stream behind the layer."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """[..., hidden_size] to [..., draft_vocab_size]."""

    def unroll(self, batch: UnrollRows, depth: int) -> Iterator[Tensor]:
        """Yield what the logits of each level are made of: [batch, num_rows, hidden_size].

        Level k of row t guesses the token at place t + 2 + k. Levels beyond the text read its last
        token; their rows mean nothing.
        """
        token_ids, rows = batch.token_ids, batch.rows
        last = token_ids.shape[1] - 1
        places = torch.arange(last, device=token_ids.device).expand(len(token_ids), -1)
        features = self.features_of_taps(batch.taps)
        read, residual = self.layer_input(self._embed(token_ids[:, 1:]), features[:, :-1])
        attention = self.layer.self_attn
        keys, values = attention.keys(read, places), attention.values(read)
        is_later = places[:, None, :] > rows[:, :, None]  # [batch, num_rows, n - 1]
        masked = torch.zeros_like(is_later, dtype=torch.float32).masked_fill(is_later, -torch.inf)
        own: list[tuple[Tensor, Tensor]] = []  # keys and values of the levels behind the first
        wide = rows[:, :, None]
        read = read.gather(1, wide.expand(-1, -1, read.shape[2]))
        residual = residual.gather(1, wide.expand(-1, -1, residual.shape[2]))
        for level in range(depth):
            if level:
                tokens = token_ids.gather(1, (rows + 1 + level).clamp(max=last))
                read, residual = self.layer_input(self._embed(tokens), features)
                own.append((attention.keys(read, rows + level), attention.values(read)))
            queries = attention.queries(read, rows + level)
            attended = _attend(queries, (keys, values), masked, own)
            residual = residual + attention.o_proj(attended)
            residual = residual + self.layer.mlp(self.layer.post_attention_layernorm(residual))
            hidden, features = self.outputs(residual)
            yield hidden

    def _embed(self, token_ids: Tensor) -> Tensor:
        return functional.embedding(token_ids, self.embedding)


def _attend(
    queries: Tensor,
    text: tuple[Tensor, Tensor],
    masked: Tensor,
    own: list[tuple[Tensor, Tensor]],
) -> Tensor:
    """Attend to the text's rows and to the rows' own earlier levels: [batch, num_rows, size]."""
    keys, values = text
    queries = queries * queries.shape[-1] ** -0.5
    scores = (queries @ keys.transpose(-1, -2)).float() + masked[:, None, None]
    own_scores = [(queries * key).sum(-1, keepdim=True).float() for key, _ in own]
    chances = torch.cat([scores, *own_scores], dim=-1).softmax(-1).to(queries.dtype)
    found = chances[..., : scores.shape[-1]] @ values
    for number, (_, value) in enumerate(own):
        place = scores.shape[-1] + number
        found = found + chances[..., place : place + 1] * value
    return found.permute(0, 3, 1, 2, 4).flatten(2)


class Eagle3Head(TrainedHead):
    """EAGLE-3: three taps through fc; attention reads token vector and features side by side."""

    kind: TrainedHeadKind = "eagle3"

    def __init__(self, sizes: HeadSizes, ends: TargetEnds, token_ids: Tensor) -> None:
        """Begin as the last tap with the large model's output matrix."""
        super().__init__(sizes, ends, token_ids)
        width = sizes.hidden_size
        self.fc = nn.Linear(len(sizes.tap_layers) * width, width, bias=False)
        self.midlayer = _Eagle3Layer(sizes)
        self.norm = TrainableRmsNorm(width, eps=sizes.norm_eps)
        self.lm_head = nn.Linear(width, sizes.draft_vocab_size, bias=False)
        with torch.no_grad():
            self.fc.weight[:, :-width] *= _OTHER_TAPS
            self.fc.weight[:, -width:] += torch.eye(width)
            self.norm.weight.copy_(ends.norm)
            self.lm_head.weight.copy_(ends.head[token_ids])

    @property
    def layer(self) -> _Layer:
        """The one layer."""
        return self.midlayer

    def features_of_taps(self, taps: Tensor) -> Tensor:
        """Pass all taps through fc."""
        features: Tensor = self.fc(taps)
        return features

    def layer_input(self, embeds: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Put both side by side, normalised; the stream is the features themselves."""
        normed = self.midlayer.hidden_norm(features)
        return torch.cat([self.midlayer.input_layernorm(embeds), normed], dim=-1), features

    def outputs(self, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Features go on without the norm."""
        return self.norm(residual), residual

    def logits(self, hidden: Tensor) -> Tensor:
        """Through the head's own matrix."""
        logits: Tensor = self.lm_head(hidden)
        return logits


class MtpHead(TrainedHead):
    """An MTP module as Qwen3-Next has it: fc over token vector and last hidden state, one layer.

    It shares the large model's output matrix, which stays as it is.
    """

    kind: TrainedHeadKind = "mtp"
    head: Tensor

    def __init__(self, sizes: HeadSizes, ends: TargetEnds, token_ids: Tensor) -> None:
        """Begin with the hidden state as the stream."""
        super().__init__(sizes, ends, token_ids)
        width, eps = sizes.hidden_size, sizes.norm_eps
        self.pre_fc_norm_embedding = TrainableRmsNorm(width, eps=eps)
        self.pre_fc_norm_hidden = TrainableRmsNorm(width, eps=eps)
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.layers = nn.ModuleList([_Layer(sizes, width)])
        self.norm = TrainableRmsNorm(width, eps=eps)
        self.register_buffer("head", ends.head[token_ids].float(), persistent=False)
        with torch.no_grad():
            self.fc.weight[:, width:] += torch.eye(width)
            self.norm.weight.copy_(ends.norm)

    @property
    def layer(self) -> _Layer:
        """The one layer."""
        layer = self.layers[0]
        assert isinstance(layer, _Layer)
        return layer

    def features_of_taps(self, taps: Tensor) -> Tensor:
        """The last hidden state as it is."""
        return taps

    def layer_input(self, embeds: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Pass both, normalised, through fc; the stream is the result."""
        embeds, features = self.pre_fc_norm_embedding(embeds), self.pre_fc_norm_hidden(features)
        stream = self.fc(torch.cat([embeds, features], dim=-1))
        return self.layer.input_layernorm(stream), stream

    def outputs(self, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Features go on behind the norm, as the large model's hidden states are."""
        hidden = self.norm(residual)
        return hidden, hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Through the large model's matrix."""
        return functional.linear(hidden, self.head.to(hidden.dtype))


HEADS: dict[TrainedHeadKind, type[TrainedHead]] = {"eagle3": Eagle3Head, "mtp": MtpHead}
