"""The formats of quantised checkpoints, by what config.json says of them; without torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, get_args

Method = Literal["awq", "compressed-tensors", "fp8", "gptq", "mxfp4"]
METHODS: Final[tuple[Method, ...]] = get_args(Method)
# How weights are rounded here, where that is asked for.
SchemeName = Literal["int8", "int4"]
SCHEMES: Final[tuple[SchemeName, ...]] = get_args(SchemeName)
# In 4 bits, columns that share a scale: the first number that divides a weight's.
INT4_GROUP_SIZES: Final = (64, 32)
# A weight with a shorter side is not rounded: it lies in the cache, so that fewer bytes of it spare
# little time, and models of such weights are small enough to lose right answers by it.
MIN_ROUNDED_SIDE: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """The rounding of a checkpoint's weights."""

    scheme: SchemeName
    keep_in: Path | None = None
    """The folder that they are kept in for next time; None to keep nothing."""


StoredWay = Literal["decode", "exact"]
"""Instead of rounding, for weights that come quantised. decode: they become plain ones. exact: they
stay as they are stored, and rows are not rounded where they are multiplied."""
DECODE: Final[StoredWay] = "decode"
EXACT: Final[StoredWay] = "exact"
STORED_WAYS: Final[tuple[StoredWay, ...]] = (DECODE, EXACT)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    """A format of quantised weights."""

    method: Method
    bits: int = 0
    """Bits of a number; 0 where the method or the tensors say it."""
    zero_offset: int = 0
    """What GPTQ's first version takes from zero points."""
    block: tuple[int, int] | None = None
    """Rows and columns that share a scale, where the format names them."""
    group_size: int | None = None
    """Columns that share a scale; -1: all of a row. None: config.json names no size or several."""

    @property
    def can_stay(self) -> bool:
        """True if products can hold such weights as they are stored."""
        return self.method != "mxfp4"  # experts


def weight_format(options: Mapping[str, Any]) -> WeightFormat:
    """Return the format of a `quantization_config`.

    Raises ValueError with a sentence for one that is not read.
    """
    method = str(options.get("quant_method") or options.get("format") or "unknown")
    if method == "gptq":
        bits = options.get("bits")
        if bits not in (4, 8):
            raise ValueError(f"it has {bits} bits; GPTQ is read with 4 or 8.")
        is_second = options.get("checkpoint_format") == "gptq_v2"
        return WeightFormat(
            method="gptq",
            bits=bits,
            zero_offset=0 if is_second else 1,
            group_size=None if options.get("dynamic") else _group_size(options, "group_size"),
        )
    if method == "awq":
        version = str(options.get("version") or "gemm").lower()
        bits = options.get("bits") or options.get("w_bit")
        if bits != 4 or version != "gemm":
            raise ValueError(f"it has {bits} bits as {version!r}; AWQ is read with 4 as 'gemm'.")
        size = _group_size(options, "group_size" if "group_size" in options else "q_group_size")
        return WeightFormat(method="awq", group_size=size)
    if method == "fp8":
        return WeightFormat(method="fp8", block=_block(options.get("weight_block_size")))
    if method == "compressed-tensors":
        return _compressed(options)
    if method == "mxfp4":
        return WeightFormat(method="mxfp4")
    raise ValueError(f"quantised weights are read as {', '.join(METHODS)}.")


def _compressed(options: Mapping[str, Any]) -> WeightFormat:
    sparsity = options.get("sparsity_config") or {}
    if isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense":
        raise ValueError(f"it is sparse ({sparsity['format']}), which is not read.")
    blocks, sizes, widths = set(), set(), set()
    groups = options.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            continue
        bits, kind = weights.get("num_bits"), weights.get("type")
        if (bits, kind) not in ((4, "int"), (8, "int"), (8, "float")):
            raise ValueError(f"it has {kind} weights of {bits} bits, which are not read.")
        widths.add(int(bits or 0))
        blocks.add(_block(weights.get("block_structure")))
        is_grouped = weights.get("strategy") == "group"
        sizes.add(_group_size(weights, "group_size") if is_grouped else None)
    return WeightFormat(
        method="compressed-tensors",
        bits=widths.pop() if len(widths) == 1 else 0,
        block=next(iter(blocks - {None}), None),
        group_size=sizes.pop() if len(sizes) == 1 else None,
    )


def _group_size(options: Mapping[str, Any], key: str) -> int | None:
    """Return the columns of a group. Raises ValueError for a number that is none."""
    size = options.get(key)
    if size is None:
        return None
    if not isinstance(size, int) or isinstance(size, bool) or (size < 1 and size != -1):
        raise ValueError(f"its {key} is {size!r:.40}; it has to be at least 1, or -1 for all.")
    return size


def _block(found: object) -> tuple[int, int] | None:
    """Return the rows and columns of a block."""
    if isinstance(found, (list, tuple)) and len(found) == 2:
        high, wide = found
        if isinstance(high, int) and isinstance(wide, int) and min(high, wide) > 0:
            return high, wide
    return None
