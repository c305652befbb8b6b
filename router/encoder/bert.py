"""The forward pass of a BERT-class sentence encoder in numpy, one text at a time.

A gateway needs no torch for it. An embedding is the mean of the token vectors behind layer `depth`;
the layers above are not computed. GELU is its tanh form, within 0.0005 of the exact one. Weights of
`sentence-transformers` and of transformers' `BertModel` fit; they are float32 or float16.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file

Floats32 = NDArray[np.float32]

MAX_TOKENS: Final = 128
# A word piece has four characters or so; the rest of a long prompt need not be split into pieces.
MAX_CHARS: Final = 2048
_GELU_SCALE: Final = np.float32(np.sqrt(2.0 / np.pi))
_GELU_CUBE: Final = np.float32(0.044715)
_MAX_LAYERS: Final = 64


class EncoderError(ValueError):
    """The encoder cannot be used. The message says why, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Norm:
    weight: Floats32
    bias: Floats32
    epsilon: float

    def __call__(self, rows: Floats32) -> Floats32:
        centred = rows - rows.mean(axis=-1, keepdims=True)
        spread = np.sqrt(np.mean(centred * centred, axis=-1, keepdims=True) + self.epsilon)
        return np.asarray(centred / spread * self.weight + self.bias, dtype=np.float32)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Linear:
    weight: Floats32
    """[num_inputs, num_outputs]."""
    bias: Floats32

    def __call__(self, rows: Floats32) -> Floats32:
        result: Floats32 = rows @ self.weight
        result += self.bias
        return result


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Layer:
    projections: _Linear
    """Queries, keys and values side by side."""
    attended: _Linear
    attended_norm: _Norm
    inner: _Linear
    outer: _Linear
    outer_norm: _Norm
    num_heads: int

    def __call__(self, rows: Floats32) -> Floats32:
        num_rows, width = rows.shape
        parts = self.projections(rows).reshape(num_rows, 3, self.num_heads, -1)
        queries, keys, values = parts.transpose(1, 2, 0, 3)  # each [num_heads, num_rows, head_size]
        scores: Floats32 = queries @ keys.transpose(0, 2, 1)
        scores *= np.float32(np.sqrt(self.num_heads / width))
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=-1, keepdims=True)
        mixed: Floats32 = (scores @ values).transpose(1, 0, 2).reshape(num_rows, width)
        rows = self.attended_norm(self.attended(mixed) + rows)
        return self.outer_norm(self.outer(_gelu(self.inner(rows))) + rows)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BertEncoder:
    """The embeddings and the first layers of an encoder."""

    words: Floats32
    """[vocabulary, dimension]."""
    places: Floats32
    """Of the positions, with the vector of the first token type: [positions, dimension]."""
    norm: _Norm
    layers: tuple[_Layer, ...]

    @property
    def dimension(self) -> int:
        """The length of an embedding."""
        return int(self.words.shape[1])

    @property
    def depth(self) -> int:
        """The number of layers that are computed."""
        return len(self.layers)

    def embed(self, token_ids: list[int]) -> Floats32:
        """Return the mean vector, [dimension], of a text's tokens; zeros without any.

        Raises EncoderError for ids beyond the vocabulary.
        """
        ids = np.array(token_ids[: min(MAX_TOKENS, len(self.places))], dtype=np.intp)
        if not len(ids):
            return np.zeros(self.dimension, dtype=np.float32)
        if ids.max() >= len(self.words):
            raise EncoderError("the tokenizer has ids that the encoder's weights lack")
        rows = self.norm(self.words[ids] + self.places[: len(ids)])
        for layer in self.layers:
            rows = layer(rows)
        return np.asarray(rows.mean(axis=0), dtype=np.float32)


def read_bert(folder: Path, depth: int | None = None) -> BertEncoder:
    """Read config.json and model.safetensors; `depth`: the number of layers, None: all but one.

    The last layer of a sentence encoder is tuned to likeness of meaning. The one before it says
    more of difficulty (docs/router.md).
    Raises EncoderError for another architecture, and for weights that do not fit.
    """
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EncoderError(f"{folder}: {error}") from error
    if not isinstance(config, dict) or config.get("model_type") != "bert":
        kind = config.get("model_type") if isinstance(config, dict) else None
        raise EncoderError(f"{folder}: model_type {kind!r} is not supported; available: bert")
    try:
        tensors = load_file(folder / "model.safetensors")
    except (OSError, ValueError, SafetensorError) as error:
        raise EncoderError(f"{folder}: {error}") from error
    except TypeError as error:  # numpy lacks the type
        why = f"{error}; save the encoder in float32 or float16"
        raise EncoderError(f"{folder}/model.safetensors: {why}") from error
    try:
        return _Reader(config, tensors).encoder(depth)
    except (KeyError, TypeError, ValueError) as error:
        raise EncoderError(f"{folder}: not a BERT-class encoder: {error}") from error


class _Reader:
    """Takes weights by name; those of a model with a head begin with `bert.`."""

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]]) -> None:
        self._tensors = tensors
        self._prefix = "bert." if "bert.embeddings.word_embeddings.weight" in tensors else ""
        self._epsilon = float(config.get("layer_norm_eps", 1e-12))
        self._num_heads = int(config["num_attention_heads"])
        self._num_layers = int(config["num_hidden_layers"])
        self._width = int(config["hidden_size"])
        if config.get("hidden_act", "gelu") not in ("gelu", "gelu_new", "gelu_pytorch_tanh"):
            raise ValueError(f"hidden_act {config['hidden_act']!r} is not supported")
        if config.get("position_embedding_type", "absolute") != "absolute":
            raise ValueError("only absolute positions are supported")
        if not 0 < self._num_layers <= _MAX_LAYERS or self._width % self._num_heads:
            raise ValueError("num_hidden_layers or num_attention_heads do not fit")

    def encoder(self, depth: int | None) -> BertEncoder:
        depth = max(self._num_layers - 1, 1) if depth is None else depth
        if not 0 < depth <= self._num_layers:
            raise ValueError(f"depth {depth} is not in [1, {self._num_layers}]")
        places = self._read("embeddings.position_embeddings.weight", None, self._width)
        kinds = self._read("embeddings.token_type_embeddings.weight", None, self._width)
        return BertEncoder(
            words=self._read("embeddings.word_embeddings.weight", None, self._width),
            places=places[:MAX_TOKENS] + kinds[0],
            norm=self._norm("embeddings.LayerNorm"),
            layers=tuple(self._layer(f"encoder.layer.{index}.") for index in range(depth)),
        )

    def _layer(self, name: str) -> _Layer:
        width = self._width
        parts = [self._linear(f"{name}attention.self.{part}", width) for part in _PROJECTIONS]
        inner = self._linear(f"{name}intermediate.dense", width)
        return _Layer(
            projections=_Linear(
                weight=np.ascontiguousarray(np.hstack([part.weight for part in parts])),
                bias=np.concatenate([part.bias for part in parts]),
            ),
            attended=self._linear(f"{name}attention.output.dense", width, width),
            attended_norm=self._norm(f"{name}attention.output.LayerNorm"),
            inner=inner,
            outer=self._linear(f"{name}output.dense", len(inner.bias), width),
            outer_norm=self._norm(f"{name}output.LayerNorm"),
            num_heads=self._num_heads,
        )

    def _linear(self, name: str, num_inputs: int, num_outputs: int | None = None) -> _Linear:
        weight = self._read(f"{name}.weight", num_outputs, num_inputs)
        return _Linear(
            weight=np.ascontiguousarray(weight.T), bias=self._read(f"{name}.bias", len(weight))
        )

    def _norm(self, name: str) -> _Norm:
        weight, bias = (self._read(f"{name}.{part}", self._width) for part in ("weight", "bias"))
        return _Norm(weight=weight, bias=bias, epsilon=self._epsilon)

    def _read(self, name: str, *shape: int | None) -> Floats32:
        """Return a tensor of a shape, of which None stands for any length."""
        tensor = self._tensors[self._prefix + name]
        fits = len(tensor.shape) == len(shape) and all(
            wanted in (None, found) for wanted, found in zip(shape, tensor.shape, strict=True)
        )
        if not fits or not len(tensor):
            raise ValueError(f"{name} has shape {list(tensor.shape)}")
        result = tensor.astype(np.float32)
        if not np.isfinite(result).all():
            raise ValueError(f"{name} holds numbers that are not finite")
        return result


_PROJECTIONS: Final = ("query", "key", "value")


def _gelu(values: Floats32) -> Floats32:
    """x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3))), in few passes over memory."""
    result = values * values
    result *= _GELU_CUBE
    result += 1.0
    result *= values
    result *= _GELU_SCALE
    np.tanh(result, out=result)
    result += 1.0
    result *= values
    result *= 0.5
    return result
