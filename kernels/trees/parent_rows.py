"""Gathers what parents' rows gave, for rows of a draft pass that carry it beside their tokens.

A head's row in a tree reads the hidden row that its parent's pass gave. Which node is the parent
only the device knows.
"""

from typing import Final

import torch
from torch import Tensor

from outrider.kernels.trees.tree_state import (
    DRAFT_OFFSET,
    NUM_FIELDS,
    NUM_NUMBERS,
    NUM_PASSES,
    PARENT,
    TreeState,
    number,
)
from outrider.kernels.triton_support import jit, launch, next_power_of_2, tl, uses_triton

_MOST_AT_ONCE: Final = 1024


def parent_rows_reference(state: TreeState, rows: Tensor) -> Tensor:
    """`parent_rows` in torch's own steps."""
    node = state.frontier.to(torch.int64)  # [S, F]
    is_row = node >= 0
    parent = state.parent.gather(1, node.clamp(min=0)).to(torch.int64)
    offset = state.draft_offset.gather(1, parent.clamp(min=0)).to(torch.int64)
    index = offset.where(is_row, 0)[:, :, None].expand(-1, -1, rows.shape[2])
    found = rows.gather(1, index).where(is_row[:, :, None], 0.0)
    return found.view(-1, rows.shape[2])


@jit
def _parent_rows_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    result,
    candidates,
    frontier,
    rows,
    num_offsets,
    width,
    FRONTIER: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid [num_sequences * frontier rows, parts of a row]."""
    place = tl.program_id(0).to(tl.int64)
    sequence = place // FRONTIER
    own = candidates + sequence * (NUM_FIELDS * CAPACITY)
    node = tl.load(frontier + place)
    parent = tl.load(own + PARENT * CAPACITY + tl.maximum(node, 0))
    offset = tl.load(own + DRAFT_OFFSET * CAPACITY + tl.maximum(parent, 0))
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = columns < width
    values = tl.load(
        rows + (sequence * num_offsets + offset) * width + columns,
        mask=columns < tl.where(node >= 0, width, 0),
        other=0.0,
    )
    tl.store(result + place * width + columns, values, mask=is_there)


def parent_rows(state: TreeState, rows: Tensor) -> Tensor:
    """Return the rows of the frontier's parents, [S * F, width], zeros in padding.

    `rows`: [S, number of draft offsets, width], contiguous: what each computed node's row gave. The
    parents must have been computed in earlier passes (`choose_frontier`'s `is_stepwise`).
    """
    if not uses_triton(rows):
        return parent_rows_reference(state, rows)
    num_sequences, num_offsets, width = rows.shape
    assert rows.is_contiguous()
    result = torch.empty((num_sequences * state.width, width), dtype=rows.dtype, device=rows.device)
    block = min(next_power_of_2(width), _MOST_AT_ONCE)
    launch(
        _parent_rows_kernel,
        (num_sequences * state.width, -(-width // block)),
        result,
        state.candidates,
        state.frontier,
        rows,
        num_offsets,
        width,
        num_warps=4,
        FRONTIER=state.width,
        CAPACITY=state.capacity,
        BLOCK=block,
    )
    return result


def keep_rows_reference(state: TreeState, new: Tensor, rows: Tensor) -> None:
    """`keep_rows` in torch's own steps."""
    num_passes = state.numbers[:, number(NUM_PASSES)].to(torch.int64)  # [S]
    place = torch.arange(state.width, device=rows.device)
    offset = 1 + (num_passes[:, None] - 2) * state.width + place  # [S, F]
    has_room = offset < rows.shape[1]
    sequence = torch.arange(state.num_sequences, device=rows.device)[:, None].expand_as(offset)
    rows[sequence[has_room], offset[has_room]] = new.view(*offset.shape, -1)[has_room]


@jit
def _keep_rows_kernel(  # type: ignore[no-untyped-def]
    rows,
    numbers,
    new,
    num_offsets,
    width,
    FRONTIER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid [num_sequences * frontier rows, parts of a row]."""
    place = tl.program_id(0).to(tl.int64)
    sequence = place // FRONTIER
    num_passes = tl.load(numbers + sequence * NUM_NUMBERS + NUM_PASSES)
    offset = 1 + (num_passes - 2) * FRONTIER + place % FRONTIER
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = columns < tl.where(offset < num_offsets, width, 0)
    values = tl.load(new + place * width + columns, mask=is_there)
    tl.store(rows + (sequence * num_offsets + offset) * width + columns, values, mask=is_there)


def keep_rows(state: TreeState, new: Tensor, rows: Tensor) -> None:
    """Write what the rows of the last level gave to their draft offsets, for `parent_rows`.

    `new`: [S * F, width], of what `choose_frontier` chose last, padding included; `rows`: as in
    `parent_rows`. What they have no room for is left out.
    """
    if not uses_triton(rows):
        keep_rows_reference(state, new, rows)
        return
    num_sequences, num_offsets, width = rows.shape
    assert rows.is_contiguous()
    block = min(next_power_of_2(width), _MOST_AT_ONCE)
    launch(
        _keep_rows_kernel,
        (num_sequences * state.width, -(-width // block)),
        rows,
        state.numbers,
        new.contiguous(),
        num_offsets,
        width,
        num_warps=4,
        FRONTIER=state.width,
        BLOCK=block,
    )
