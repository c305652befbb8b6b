"""A model's description for one of several ranks: which models can be cut, and into what."""

from collections.abc import Iterator
from dataclasses import replace

from outrider.engine.errors import UnsupportedModelError
from outrider.engine.model.config import ModelConfig
from outrider.engine.model.shard import Shard


def check_shares(config: ModelConfig, count: int) -> None:
    """Raise UnsupportedModelError for a model that cannot be cut for so many ranks."""
    if count == 1:
        return
    wanted = f"{config.model_id} cannot run on {count} devices (engine.tensor_parallel)"
    if (why := _unable(config)) is not None:
        raise UnsupportedModelError(f"{wanted}: {why}. Leave engine.tensor_parallel at 1 for it.")
    for what, size in _sizes(config):
        if size % count:
            raise UnsupportedModelError(
                f"{wanted}: its {what} ({size}) cannot be shared out evenly. Numbers that divide "
                f"all of it: {_possible(config)}."
            )
    num_kv_heads = config.num_kv_heads
    if num_kv_heads % count and count % num_kv_heads:
        raise UnsupportedModelError(
            f"{wanted}: {num_kv_heads} key-value heads can be neither shared out nor copied "
            f"evenly. Numbers that divide all of it: {_possible(config)}."
        )


def share_of(config: ModelConfig, shard: Shard) -> ModelConfig:
    """Return the description of a rank's part: its heads and inner sizes, all else as it is."""
    if shard.is_whole:
        return config
    check_shares(config, shard.count)
    experts = config.experts
    if experts is not None:
        experts = replace(
            experts,
            inner_size=experts.inner_size // shard.count,
            shared_size=experts.shared_size // shard.count,
        )
    return replace(
        config,
        num_ranks=shard.count,
        num_query_heads=config.num_query_heads // shard.count,
        num_kv_heads=max(config.num_kv_heads // shard.count, 1),
        intermediate_size=shard.length(config.intermediate_size),
        experts=experts,
    )


def kv_head_span(config: ModelConfig, shard: Shard) -> tuple[int, int]:
    """Return the first key-value head of a rank, and the one behind its last.

    Where there are more ranks than heads, some ranks have the same one. `config`: the whole
    model's.
    """
    num_heads = config.num_kv_heads
    if num_heads >= shard.count:
        return shard.span(num_heads)
    head = shard.rank * num_heads // shard.count
    return head, head + 1


def _unable(config: ModelConfig) -> str | None:
    """Return why a model cannot be cut at all; None where it can."""
    if not config.is_native:
        return f"{config.architecture} runs through transformers' own modules"
    if config.recurrence is not None:
        return "it has recurrent layers"
    if config.full_heads is not None:
        return "its layers have heads of two shapes"
    if config.qk_norm == "row":
        return "its queries and keys are normalised over all heads together"
    return None


def _sizes(config: ModelConfig) -> Iterator[tuple[str, int]]:
    """Yield what is shared out evenly."""
    yield "number of query heads", config.num_query_heads
    if not all(layer.is_sparse for layer in config.layers):
        yield "intermediate size", config.intermediate_size
    if config.experts is not None:
        yield "experts' inner size", config.experts.inner_size
        yield "shared expert's inner size", config.experts.shared_size


def _possible(config: ModelConfig) -> str:
    """List the numbers of ranks that a model can be cut for."""
    num_kv_heads = config.num_kv_heads
    return ", ".join(
        str(count)
        for count in range(1, config.num_query_heads + 1)
        if not any(size % count for _, size in _sizes(config))
        and not (num_kv_heads % count and count % num_kv_heads)
    )
