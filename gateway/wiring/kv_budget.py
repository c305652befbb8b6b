"""Memory for keys and values: how many blocks each tier's cache gets.

torch is imported inside functions: the gateway's process imports the wiring without it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from outrider.engine.cache.recurrent_lines import RecurrentSizes
from outrider.engine.cache.window_blocks import BlockBytes, share_blocks, window_block_demand
from outrider.engine.config import EngineConfig
from outrider.engine.errors import EngineError
from outrider.gateway.settings.tree import Settings
from outrider.gateway.wiring.hardware import available_memory_bytes
from outrider.verifier.params import Tier

if TYPE_CHECKING:
    import torch

    from outrider.draft.heads.protocol import HeadModel
    from outrider.engine.model.protocol import CausalModel
    from outrider.engine.parallel.ranks import Ranks

_GIB = 2**30
_CPU_KV_SHARE = 0.25  # of the memory that is free: others live on the machine too
# Of the memory left beside weights, graphs and what the largest pass takes: allocators round up.
_GPU_KV_SHARE = 0.97


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSizes:
    """Blocks of the caches, by tier."""

    num_blocks: Mapping[Tier, int]
    num_window_blocks: Mapping[Tier, int]
    """Blocks of the tiers whose layers with a window get a smaller cache of their own."""
    recurrent: Mapping[Tier, RecurrentSizes] = field(default_factory=dict)
    """The sizes of the tiers that have recurrent layers."""


def kv_dtype(settings: Settings, model: "CausalModel") -> "torch.dtype":
    """Return the data type of a model's KV cache."""
    import torch

    return torch.float8_e4m3fn if settings.engine.kv_cache_dtype == "fp8" else model.dtype


def cache_sizes(
    settings: Settings,
    models: "Mapping[Tier, CausalModel]",
    device: "torch.device",
    head: "HeadModel | None" = None,
    ranks: "Ranks | None" = None,
) -> CacheSizes:
    """Share the memory out. `head`: a drafter with as many blocks as the large model.

    `device`: rank 0's, where the large model has `ranks`. It holds the other models, too, so the
    others have at least its room, but for what other programs take of their memory.

    Raises EngineError when it does not hold one answer of full length.
    """
    options = settings.engine
    longest = max(model.config.max_position_embeddings for model in models.values())
    context = min(longest, options.max_context or longest)
    per_answer = math.ceil(context / options.block_size)
    demands = _window_demands(settings, models)
    recurrent, state_bytes = _recurrent_sizes(settings, models, device, ranks)
    if options.num_blocks is not None:
        equal = dict.fromkeys(models, options.num_blocks)
        return replace(_sizes(equal, demands), recurrent=recurrent)
    memory = _budget(settings, models, device, head, ranks)
    left = replace(memory, num_bytes=memory.num_bytes - state_bytes)
    if state_bytes and left.num_bytes <= 0:
        raise EngineError(
            f"the states of recurrent layers take {state_bytes / _GIB:.2f} GiB for "
            f"engine.max_sequences={options.max_sequences}, which leaves nothing for keys and "
            "values. Lower engine.max_sequences or raise engine.kv_cache_gib."
        )
    num_blocks = _share(settings, models, demands, head, left, per_answer)
    fewest = min(num_blocks.values())
    if options.max_context is not None and fewest < per_answer:
        raise EngineError(
            f"engine.max_context={context} needs {per_answer} KV blocks, but the memory for "
            f"them holds {fewest} ({left.num_bytes / _GIB:.2f} GiB). Lower max_context or raise "
            "engine.kv_cache_gib."
        )
    if fewest < 2:
        least_bytes = 2 * sum(_bytes_per_block(settings, model) for model in models.values())
        raise EngineError(
            f"{left.num_bytes / _GIB:.3f} GiB for the KV cache is less than two blocks "
            f"({least_bytes / _GIB:.3f} GiB). Free memory or raise engine.kv_cache_gib."
        )
    return replace(_sizes(num_blocks, demands), recurrent=recurrent)


def _share(
    settings: Settings,
    models: "Mapping[Tier, CausalModel]",
    demands: Mapping[Tier, int],
    head: "HeadModel | None",
    memory: "_Budget",
    per_answer: int,
) -> dict[Tier, int]:
    """Return each tier's blocks. `per_answer`: blocks of one answer at full length."""
    options = settings.engine
    blocks = {
        tier: replace(
            _block_bytes(settings, model, demands.get(tier, 0)),
            share=options.small_kv_ratio if tier == "small" and len(models) > 1 else 1.0,
            least=per_answer,
            # More than every answer at full length is never in use.
            most=per_answer * options.max_sequences,
        )
        for tier, model in models.items()
    }
    if head is not None:
        own = blocks["large"]
        blocks["large"] = replace(own, full=own.full + _head_bytes(settings, head))
    shares = share_blocks(memory.num_bytes, list(blocks.values()))
    num_blocks = dict(zip(blocks, shares, strict=True))
    if memory.other_ranks:
        alone = _block_bytes(settings, models["large"], demands.get("large", 0))
        (most,) = share_blocks(min(memory.other_ranks), [alone])
        num_blocks["large"] = min(num_blocks["large"], most)
    return num_blocks


def _recurrent_sizes(
    settings: Settings,
    models: "Mapping[Tier, CausalModel]",
    device: "torch.device",
    ranks: "Ranks | None",
) -> tuple[dict[Tier, RecurrentSizes], int]:
    """Return what recurrent layers keep, by tier, and its memory: checkpoints share a budget."""
    own = {
        tier: model.config.recurrent_bytes(input_bytes=model.dtype.itemsize)
        for tier, model in models.items()
        if model.config.recurrence is not None
    }
    if not own:
        return {}, 0
    budget_bytes = _budget(settings, models, device, ranks=ranks).num_bytes / len(own)
    sizes = {
        tier: RecurrentSizes.within(
            budget_bytes, max_sequences=settings.engine.max_sequences, state_bytes=state_bytes
        )
        for tier, (_, state_bytes) in own.items()
    }
    taken = (
        sizes[tier].num_bytes(line_bytes=line_bytes, state_bytes=state_bytes)
        for tier, (line_bytes, state_bytes) in own.items()
    )
    return sizes, sum(taken)


def _sizes(num_blocks: Mapping[Tier, int], demands: Mapping[Tier, int]) -> CacheSizes:
    """Leave windows out where their cache would not be the smaller one."""
    smaller = {tier: demand for tier, demand in demands.items() if demand < num_blocks[tier]}
    return CacheSizes(num_blocks=num_blocks, num_window_blocks=smaller)


def _window_demands(settings: Settings, models: "Mapping[Tier, CausalModel]") -> dict[Tier, int]:
    """Return the window blocks that serve any mix of answers, for tiers that have windows."""
    options = settings.engine
    return {
        tier: window_block_demand(
            model.config.sliding_window,
            block_size=options.block_size,
            max_sequences=options.max_sequences,
            max_step_tokens=EngineConfig().max_tokens_per_step,
        )
        for tier, model in models.items()
        if model.config.sliding_window is not None
    }


def _block_bytes(settings: Settings, model: "CausalModel", demand: int) -> BlockBytes:
    return BlockBytes(
        full=_bytes_per_block(settings, model, windowed=False),
        windowed=_bytes_per_block(settings, model, windowed=True),
        demand=demand,
    )


def _head_bytes(settings: Settings, head: "CausalModel") -> int:
    """Return the bytes of a head's block, which is of the model's own type."""
    from outrider.engine.model.kv_cache import KVCache

    block_size = settings.engine.block_size
    return KVCache.bytes_per_block(head.config, block_size=block_size, dtype=head.dtype)


def _bytes_per_block(
    settings: Settings, model: "CausalModel", *, windowed: bool | None = None
) -> int:
    """Return a block's memory on rank 0's device; on a CPU that is where all ranks' parts lie."""
    from outrider.engine.model.kv_cache import KVCache

    num_parts = model.config.num_ranks if model.device.type == "cpu" else 1
    return num_parts * KVCache.bytes_per_block(
        model.config,
        block_size=settings.engine.block_size,
        dtype=kv_dtype(settings, model),
        windowed=windowed,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Budget:
    """Memory for all caches of a device, and of each other rank's for its part of the large one."""

    num_bytes: float
    other_ranks: tuple[float, ...] = ()


def _budget(
    settings: Settings,
    models: "Mapping[Tier, CausalModel]",
    device: "torch.device",
    head: "HeadModel | None" = None,
    ranks: "Ranks | None" = None,
) -> _Budget:
    import torch

    if settings.engine.kv_cache_gib is not None:
        return _Budget(num_bytes=settings.engine.kv_cache_gib * _GIB)
    if device.type == "cuda":
        pass_bytes, others = _pass_bytes(settings, models, ranks)
        reserve_bytes = _graph_bytes(settings, models, head) + pass_bytes
        free_bytes = torch.cuda.mem_get_info(device)[0] - reserve_bytes
        return _Budget(
            num_bytes=max(free_bytes, 0) * _GPU_KV_SHARE,
            other_ranks=tuple(max(free - pass_bytes, 0) * _GPU_KV_SHARE for free in others),
        )
    return _Budget(num_bytes=available_memory_bytes() * _CPU_KV_SHARE)


def _graph_bytes(
    settings: Settings,
    models: "Mapping[Tier, CausalModel]",
    head: "HeadModel | None" = None,
) -> int:
    """Return the device memory to leave to CUDA graphs, recorded after the cache exists.

    `head`: has graphs of its own, and the large model's yield what it reads.
    """
    from outrider.engine.passes.level_graphs import estimate_level_bytes
    from outrider.engine.passes.pass_graphs import estimate_bytes

    if not settings.engine.cuda_graphs:
        return 0
    taps = {"large": 0 if head is None else len(head.tap_layers)}
    needed = sum(
        estimate_bytes(model.config, model.dtype, num_taps=taps.get(tier, 0))
        for tier, model in models.items()
        if model.can_record
    )
    if head is not None and head.can_record:
        needed += estimate_bytes(head.config, head.dtype, feature_size=head.feature_size)
        needed += estimate_level_bytes(head.dtype, feature_size=head.feature_size)
    if len(models) > 1 and settings.speculation.enabled and models["small"].can_record:
        needed += estimate_level_bytes(models["small"].dtype)
    return needed


def _pass_bytes(
    settings: Settings, models: "Mapping[Tier, CausalModel]", ranks: "Ranks | None" = None
) -> tuple[int, list[int]]:
    """Return the device memory that passes take while they run, measured: one at a time does.

    Also the free bytes of the other ranks' devices, which run the large model's beside rank 0.
    """
    import torch

    from outrider.engine.parallel.runner import RankRunner
    from outrider.engine.passes.pass_memory import LargestPass, measure_pass_bytes

    options = settings.engine
    needed = 0
    others: list[int] = []
    for tier, model in models.items():
        largest = LargestPass(
            max_rows=options.max_tokens_per_step,
            max_sequences=options.max_sequences,
            block_size=options.block_size,
            kv_dtype=kv_dtype(settings, model),
        )
        if ranks is not None and tier == "large":
            measure = partial(measure_pass_bytes, model, largest, make_runner=RankRunner)
            own, others = ranks.room(measure, largest)
        else:
            own = measure_pass_bytes(model, largest)
        needed = max(needed, own)
    torch.cuda.empty_cache()  # what was freed counts as free again
    return needed, others
