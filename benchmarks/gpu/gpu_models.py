"""Models of real shapes with random weights, made on the device: nothing is read from disk."""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from outrider.engine.model.config import LayerConfig, ModelConfig
from outrider.engine.model.decoder import DecoderModel
from outrider.kernels.layers.rope import RopeConfig

# Logits of a random model are normal; with this deviation its best guesses stand out as real ones
# do, so that drafting has something to rank.
LOGIT_DEVIATION = 6.0


class RandomReader:
    """Stands in for `outrider.engine.model.weights.CheckpointReader`: every tensor that is asked
    for is random.

    Norms are 1, matrices keep the size of what they multiply, and the head spreads the logits.
    """

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        """`config`: to know how much there will be."""
        self.dtype = dtype
        self._device = device
        self._is_tied = config.tie_word_embeddings
        self.num_parameters = 0
        self.total_bytes = count_parameters(config) * dtype.itemsize
        self.done_bytes = 0

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits that no checkpoint has."""
        return "0" * 16

    @property
    def num_whole_parameters(self) -> int:
        """All that were read: the model is in one piece."""
        return self.num_parameters

    def __contains__(self, name: str) -> bool:
        """Whatever is wanted is there, but a second table for a tied head."""
        return not (self._is_tied and name.startswith("lm_head"))

    def read(self, name: str, shape: Iterable[int]) -> Tensor:
        """A new random tensor."""
        size = tuple(shape)
        if name.endswith("norm.weight"):
            tensor = torch.ones(size, dtype=self.dtype, device=self._device)
        else:
            tensor = torch.empty(size, dtype=self.dtype, device=self._device)
            tensor.normal_(0.0, self._deviation(name, size))
        self.num_parameters += tensor.numel()
        self.done_bytes += tensor.nbytes
        return tensor

    @property
    def may_keep_stored(self) -> bool:
        """Nothing is stored."""
        return False

    def read_weight(self, name: str, shape: Iterable[int]) -> Tensor:
        """As `read`."""
        return self.read(name, shape)

    def read_joined(self, names: Sequence[str], sizes: Sequence[int], width: int) -> Tensor:
        """New random matrices, one below the other."""
        parts = zip(names, sizes, strict=True)
        return torch.cat([self.read(name, (size, width)) for name, size in parts])

    def finish(
        self, *, ignorable: tuple[str, ...] = (), ignorable_prefixes: tuple[str, ...] = ()
    ) -> None:
        """Nothing is left unread."""

    def _deviation(self, name: str, size: tuple[int, ...]) -> float:
        if name.endswith(".bias"):
            return 0.02
        is_head = name.startswith("lm_head") or (self._is_tied and "embed_tokens" in name)
        return (LOGIT_DEVIATION if is_head else 1.0) / math.sqrt(size[-1])


def count_parameters(config: ModelConfig) -> int:
    """All weights, norms included."""
    return _outside_layers(config) + config.num_layers * _in_layer(config)


def bytes_per_step(config: ModelConfig, dtype: torch.dtype) -> int:
    """Weight bytes that a decoding step must read: all but the table that tokens are looked up in.

    A tied head reads that table.
    """
    unread = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    return (count_parameters(config) - unread) * dtype.itemsize


def _outside_layers(config: ModelConfig) -> int:
    tables = 1 if config.tie_word_embeddings else 2
    return tables * config.vocab_size * config.hidden_size + config.hidden_size


def _in_layer(config: ModelConfig) -> int:
    query, kv = (n * config.head_dim for n in (config.num_query_heads, config.num_kv_heads))
    width = config.hidden_size
    attention = width * (query + 2 * kv) + query * width
    norms = 2 * width + (2 * config.head_dim if config.qk_norm else 0)
    return attention + norms + 3 * width * config.intermediate_size


def qwen3(  # noqa: PLR0913 - what the family's members differ in
    name: str,
    *,
    hidden_size: int,
    num_layers: int,
    num_query_heads: int,
    intermediate_size: int,
    is_tied: bool,
    num_kv_heads: int = 8,
    head_dim: int = 128,
    vocab_size: int = 151936,
    max_positions: int = 40960,
) -> ModelConfig:
    """A member of the Qwen3 family, by its config.json."""
    return ModelConfig(
        model_id=name,
        architecture="Qwen3ForCausalLM",
        hidden_size=hidden_size,
        num_query_heads=num_query_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=intermediate_size,
        vocab_size=vocab_size,
        norm_eps=1e-6,
        max_position_embeddings=max_positions,
        layers=(LayerConfig(rope=RopeConfig(head_dim=head_dim, theta=1e6)),) * num_layers,
        qk_norm="head",
        tie_word_embeddings=is_tied,
        dtype="bfloat16",
    )


QWEN3_8B = qwen3(
    "Qwen3-8B shape",
    hidden_size=4096,
    num_layers=36,
    num_query_heads=32,
    intermediate_size=12288,
    is_tied=False,
)
QWEN3_06B = qwen3(
    "Qwen3-0.6B shape",
    hidden_size=1024,
    num_layers=28,
    num_query_heads=16,
    intermediate_size=3072,
    is_tied=True,
)
TINY_LARGE = qwen3(
    "tiny shape",
    hidden_size=64,
    num_layers=2,
    num_query_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=96,
    is_tied=False,
    vocab_size=131,
    max_positions=256,
)
TINY_SMALL = qwen3(
    "tinier shape",
    hidden_size=32,
    num_layers=1,
    num_query_heads=2,
    num_kv_heads=1,
    head_dim=16,
    intermediate_size=48,
    is_tied=True,
    vocab_size=131,
    max_positions=256,
)


def random_model(config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> DecoderModel:
    """The engine's model of this shape."""
    with torch.inference_mode():
        reader = RandomReader(config, dtype=dtype, device=device)
        # The reader has the interface of the checkpoints' one.
        return DecoderModel(config=config, reader=reader, dtype=dtype, device=device)  # type: ignore[arg-type]
