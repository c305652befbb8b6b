"""torch's own attention functions on the inputs of the attention benchmark."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.gpu_attention_cases import Cache, Problem
from benchmarks.gpu.gpu_report import microseconds, show_rows
from benchmarks.gpu.gpu_timing import measure, ratio_of
from benchmarks.shared.record import Summary


def sdpa(packed: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """torch's attention in the form that suits it best: shared keys once, heads as rows."""
    return F.scaled_dot_product_attention(packed, keys, values, attn_mask=mask, scale=scale)


def additive(mask: Tensor | None, cache: Cache) -> Tensor | None:
    """[batch, 1, nodes * group, kv_len] for `sdpa`; rows are aligned as its kernel wants."""
    if mask is None:
        return None
    rows = mask.repeat_interleave(cache.group_size, 1)[:, None]
    width = -(-rows.shape[-1] // 16) * 16
    dtype = cache.shape.dtype
    padded = torch.zeros((*rows.shape[:-1], width), dtype=dtype, device=rows.device)
    values = padded[..., : rows.shape[-1]]
    values.masked_fill_(~rows, float("-inf"))
    return values


def against_sdpa(cache: Cache, problems: Sequence[Problem], rounds: int) -> list[dict[str, Any]]:
    """Time of torch's attention over ours, with and without gathering."""
    results = []
    for problem in problems:
        sets = cache.inputs(problem)
        scale = cache.shape.head_dim**-0.5
        masks = [additive(cache.mask(one), cache) for one in sets]
        packed = [cache.pack(one.query, problem.batch) for one in sets]
        gathered = [cache.gather(one) for one in sets]
        indices = [cache.block_index(one) for one in sets]
        kv_len = problem.context + problem.nodes

        def with_gather(
            place: int,
            packed: list[Tensor] = packed,
            indices: list[Tensor] = indices,
            masks: list[Tensor | None] = masks,
            kv_len: int = kv_len,
        ) -> Tensor:
            keys, values = cache.gather_blocks(indices[place], kv_len)
            return sdpa(packed[place], keys, values, masks[place], cache.shape.head_dim**-0.5)

        samples = measure(
            {
                "ours": [partial(cache.attend, one) for one in sets],
                "gathered": [
                    partial(sdpa, rows, *kv, mask, scale)
                    for rows, kv, mask in zip(packed, gathered, masks, strict=True)
                ],
                "with gather": [partial(with_gather, place) for place in range(len(sets))],
            },
            device=cache.device,
            rounds=rounds,
        )
        results.append(_compared(problem, samples))
    return results


def against_flex(cache: Cache, problem: Problem, rounds: int) -> dict[str, Any]:
    """Time of flex_attention, compiled for exactly this shape, over ours."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    inputs = cache.inputs(problem)[0]
    keys, values = (part.contiguous() for part in cache.gather(inputs))
    shape = (problem.batch, problem.nodes, cache.shape.num_query_heads, cache.shape.head_dim)
    query = inputs.query.view(shape).transpose(1, 2).contiguous()
    visible = cache.mask(inputs)
    block_mask = None
    if visible is not None:
        block_mask = create_block_mask(
            lambda batch, head, row, key: visible[batch, row, key],
            problem.batch,
            None,
            problem.nodes,
            keys.shape[2],
            device=cache.device.type,
        )
    compiled = torch.compile(flex_attention, dynamic=False)
    call = partial(
        compiled,
        query,
        keys,
        values,
        block_mask=block_mask,
        scale=cache.shape.head_dim**-0.5,
        enable_gqa=True,
        # Its kernel for short queries has no variant for 64 rows of grouped heads.
        kernel_options={"FORCE_USE_FLEX_ATTENTION": True} if problem.nodes > 1 else None,
    )
    # One set of inputs, for both: a compiled function may copy others.
    samples = measure(
        {"ours": [partial(cache.attend, inputs)], "gathered": [call]},
        device=cache.device,
        rounds=rounds,
    )
    return _compared(problem, samples)


def _compared(problem: Problem, samples: dict[str, list[float]]) -> dict[str, Any]:
    return {
        "case": problem.name,
        "seconds": {name: Summary.of(seconds) for name, seconds in samples.items()},
        "over_ours": {name: ratio_of(samples, name, "ours") for name in samples if name != "ours"},
    }


def show_comparison(title: str, results: Sequence[dict[str, Any]]) -> None:
    """The table of a comparison."""
    names = list(results[0]["over_ours"])
    show_rows(
        f"{title}: time over ours",
        ["case", "ours µs", *names],
        [
            [
                one["case"],
                microseconds(one["seconds"]["ours"].median),
                *(f"{one['over_ours'][name]:.2f}" for name in names),
            ]
            for one in results
        ],
    )
