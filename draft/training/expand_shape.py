"""Shapes of Llama-family models: how many parameters one has, and which shape has how many."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

_UNITS = {"K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes that can grow. The size of a head and the vocabulary stay."""

    hidden_size: int
    num_layers: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int

    names: ClassVar[tuple[str, ...]]

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """Read the shape from the contents of a config.json."""
        return cls(
            hidden_size=config["hidden_size"],
            num_layers=config["num_hidden_layers"],
            intermediate_size=config["intermediate_size"],
            num_heads=config["num_attention_heads"],
            num_kv_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
        )

    def replaced(self, changes: Mapping[str, int | None]) -> Self:
        """Return the shape with the changes that are not None."""
        return replace(self, **{key: value for key, value in changes.items() if value is not None})

    def num_parameters(self, config: Mapping[str, Any]) -> int:
        """Count the matrices' parameters, a tied embedding once; no norms and biases."""
        matrices = 1 if config.get("tie_word_embeddings") else 2
        embedding = matrices * int(config["vocab_size"]) * self.hidden_size
        return embedding + self.num_layers * self.parameters_per_layer(_head_dim(config))

    def parameters_per_layer(self, head_dim: int) -> int:
        """Count the parameters of the four attention and three MLP matrices."""
        attention = 2 * (self.num_heads + self.num_kv_heads) * head_dim
        return self.hidden_size * (attention + 3 * self.intermediate_size)


Shape.names = tuple(entry.name for entry in fields(Shape))


def shape_for_parameters(config: Mapping[str, Any], target: str) -> Shape:
    """A shape of about `target` parameters ("400M", "1.5B") with the proportions of real models.

    The width is the old one times a power of 4 (exact in bf16), heads fill the width, the MLP is
    about 4 wide, and the depth is what is left: about width / 40 in models of this size. Raises
    ValueError if the checkpoint is larger already or the target is not a number.
    """
    num_target = _number(target)
    old, head_dim = Shape.of(config), _head_dim(config)
    candidates = []
    for power in range(8):
        hidden_size = old.hidden_size * 4**power
        group = old.num_heads // old.num_kv_heads
        num_kv_heads = max(old.num_kv_heads, hidden_size // (head_dim * group))
        shape = Shape(
            hidden_size=hidden_size,
            num_layers=old.num_layers,
            intermediate_size=max(old.intermediate_size, 4 * hidden_size),
            num_heads=num_kv_heads * group,
            num_kv_heads=num_kv_heads,
        )
        shape = _filled(shape, config, num_target)
        size = shape.num_parameters(config)
        depth_error = abs(math.log(shape.num_layers / (hidden_size / 40)))
        candidates.append((abs(math.log(size / num_target)) > 0.1, depth_error, shape))
    is_off, _, shape = min(candidates, key=lambda candidate: candidate[:2])
    if is_off:
        size = old.num_parameters(config)
        raise ValueError(f"no shape of {target} parameters holds this model of {size}")
    return shape


def _filled(shape: Shape, config: Mapping[str, Any], num_target: float) -> Shape:
    """Depth, then MLP width (in steps of 64), so that the target is met as nearly as possible."""
    head_dim = _head_dim(config)
    rest = num_target - replace(shape, num_layers=0).num_parameters(config)
    depth = max(shape.num_layers, round(rest / shape.parameters_per_layer(head_dim)))
    narrow = replace(shape, intermediate_size=0).parameters_per_layer(head_dim)
    width = (rest / depth - narrow) / (3 * shape.hidden_size)
    least = config["intermediate_size"]
    return replace(
        shape, num_layers=depth, intermediate_size=max(least, 64 * max(1, round(width / 64)))
    )


def _head_dim(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _number(text: str) -> float:
    scale = _UNITS.get(text[-1:].upper())
    try:
        number = float(text[:-1] if scale else text) * (scale or 1.0)
    except ValueError:
        number = math.nan
    if not number > 0.0 or math.isinf(number):
        raise ValueError(f"{text!r} is not a number of parameters such as 400M or 1.5B")
    return number
