"""Choice of the nodes that the small model extends next, in all trees of a step.

As `outrider.draft.trees.growing_tree.GrowingTree.choose_frontier`: the nodes that the text most
likely reaches and then leaves by none of their children. The small model can compute a node when it
has computed its parent or does so in the same pass; unlike there, no row is spent on the ancestors
of a promising node: they are chosen in their own right, one below the other. A stepwise model can
compute a node only after its parent. A head is stepwise: its rows carry what the parent's row gave.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outrider.kernels.tree_bounds import MASK_WORDS, MAX_TREE_NODES
from outrider.kernels.trees.tree_ranks import ranked, ranks_among
from outrider.kernels.trees.tree_state import (
    COVERED,
    DEPTH,
    DRAFT_OFFSET,
    IS_EXPANDED,
    MAX_DEPTH,
    MAX_NODES,
    NUM_CANDIDATES,
    NUM_FIELDS,
    NUM_NUMBERS,
    NUM_PASSES,
    PARENT,
    PATH_PROB,
    ROOT_SLOT,
    TOKEN_ID,
    TreeState,
    load_bits,
    num_warps_for,
    number,
)
from outrider.kernels.triton_support import jit, launch, next_power_of_2, tl, uses_triton


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class FrontierRows:
    """The next draft pass: F rows for each of S sequences, padding behind the others.

    `outrider.engine.passes.device_rows.DeviceRows` holds the same fields. A row of padding has slot
    -1, token 0, depth 0 and the root's position.
    """

    token_ids: Tensor
    """int64 [S * F]."""
    positions: Tensor
    """int64 [S * F]."""
    logical_slots: Tensor
    """int64 [S * F]."""
    depth: Tensor
    """int64 [S * F]."""
    sequence_index: Tensor
    """int64 [S * F]."""
    ancestor_words: Tensor
    """int64 [S * F, 4]; bit j is draft offset j."""
    row_starts: Tensor
    """int32 [S]."""
    num_rows: Tensor
    """int32 [S]."""
    tree_starts: Tensor
    """int32 [S], the roots' slots."""
    kv_lens: Tensor
    """int32 [S]."""


def _pick(
    state: TreeState, sequence: int, floor: float, most_believed: float, *, is_stepwise: bool
) -> list[int]:
    """Pick one sequence's frontier; at most `state.width` nodes, parents before children."""
    own = state.numbers[sequence].tolist()
    num_candidates, num_passes = own[number(NUM_CANDIDATES)], own[number(NUM_PASSES)]
    max_depth, max_nodes = own[number(MAX_DEPTH)], own[number(MAX_NODES)]
    if num_passes >= max_depth:
        return []
    known = state.candidates[sequence, :, :num_candidates]
    real = known.contiguous().view(torch.float32)
    path_probs, covered = real[[number(PATH_PROB), number(COVERED)]].tolist()
    fields = known[[number(PARENT), number(DEPTH), number(IS_EXPANDED), number(DRAFT_OFFSET)]]
    parents, depths, is_expanded, offsets = fields.tolist()
    gains = {}
    # A child ranks behind its parent, so the last node that still fits cannot have one.
    for node in ranked(path_probs, depths)[: max(max_nodes - 1, 0)]:
        is_closed = is_expanded[node] or offsets[node] >= 0 or depths[node] >= max_depth
        gain = path_probs[node] * (1.0 - min(covered[node], most_believed))
        if not is_closed and path_probs[node] >= floor and gain >= floor and gain > 0.0:
            gains[node] = gain
    chosen: list[int] = []
    num_slots = 1 + (num_passes - 1) * state.width
    for _ in range(min(state.width, MAX_TREE_NODES - num_slots)):
        beside = [] if is_stepwise else chosen
        open_nodes = [
            node for node in gains if offsets[parents[node]] >= 0 or parents[node] in beside
        ]
        if not open_nodes:
            break
        chosen.append(max(open_nodes, key=lambda node: (gains[node], -node)))
        del gains[chosen[-1]]
    return chosen


def choose_frontier_reference(
    state: TreeState, *, min_path_prob: float, most_believed: float, is_stepwise: bool = False
) -> FrontierRows:
    """`choose_frontier` one sequence after the other."""
    floor, most_believed = float(np.float32(min_path_prob)), float(np.float32(most_believed))
    rows = _empty_rows(state)
    rows.token_ids.zero_()
    rows.depth.zero_()
    rows.logical_slots.fill_(-1)
    rows.ancestor_words.zero_()
    rows.positions.copy_(state.root_slots[state.sequence_index])
    for sequence in range(state.num_sequences):
        own = state.numbers[sequence]
        root_slot, num_passes = int(own[number(ROOT_SLOT)]), int(own[number(NUM_PASSES)])
        chosen = _pick(state, sequence, floor, most_believed, is_stepwise=is_stepwise)
        first_offset = 1 + (num_passes - 1) * state.width
        words = state.ancestor_words[sequence]
        for place, node in enumerate(chosen):
            row, offset = sequence * state.width + place, first_offset + place
            words[node] = words[state.parent[sequence, node]]
            word = int(words[node, offset // 64]) | _signed_bit(offset % 64)
            words[node, offset // 64] = word
            state.draft_offset[sequence, node] = offset
            rows.ancestor_words[row] = words[node]
            rows.token_ids[row] = state.token_ids[sequence, node]
            rows.depth[row] = state.depth[sequence, node]
            rows.positions[row] += state.depth[sequence, node]
            rows.logical_slots[row] = root_slot + offset
        state.frontier[sequence] = -1
        state.frontier[sequence, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
        rows.num_rows[sequence] = len(chosen)
        rows.kv_lens[sequence] = root_slot + first_offset + len(chosen)
        own[number(NUM_PASSES)] += 1
    return rows


def _signed_bit(bit: int) -> int:
    """Return one bit of a signed 64-bit word."""
    return 1 << bit if bit < 63 else -(1 << 63)


def _empty_rows(state: TreeState) -> FrontierRows:
    num_rows, device = state.num_sequences * state.width, state.candidates.device

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    return FrontierRows(
        token_ids=empty(num_rows, dtype=torch.int64),
        positions=empty(num_rows, dtype=torch.int64),
        logical_slots=empty(num_rows, dtype=torch.int64),
        depth=empty(num_rows, dtype=torch.int64),
        sequence_index=state.sequence_index,
        ancestor_words=empty(num_rows, MASK_WORDS, dtype=torch.int64),
        row_starts=state.row_starts,
        num_rows=empty(state.num_sequences, dtype=torch.int32),
        tree_starts=state.root_slots,
        kv_lens=empty(state.num_sequences, dtype=torch.int32),
    )


# Rivals that a program compares its candidates with at a time.
_GROUP = 8


@jit
def _choose_frontier_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    candidates,
    numbers,
    ancestor_words,
    frontier,
    row_token_ids,
    row_positions,
    row_slots,
    row_depth,
    row_words,
    num_rows,
    kv_lens,
    min_path_prob,
    most_believed,
    IS_STEPWISE: tl.constexpr,
    WIDTH: tl.constexpr,
    PLACES: tl.constexpr,
    MAX_SLOTS: tl.constexpr,
    WORDS: tl.constexpr,
    CAPACITY: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Grid [num_sequences]: a program holds all candidates of its sequence, a vector a field."""
    sequence = tl.program_id(0).to(tl.int64)
    own = candidates + sequence * (NUM_FIELDS * CAPACITY)
    own_numbers = numbers + sequence * NUM_NUMBERS
    own_words = ancestor_words + sequence * (CAPACITY * WORDS)
    nodes = tl.arange(0, CAPACITY)  # [C]
    num_candidates = tl.load(own_numbers + NUM_CANDIDATES)
    num_passes = tl.load(own_numbers + NUM_PASSES)
    root_slot = tl.load(own_numbers + ROOT_SLOT)
    max_depth = tl.load(own_numbers + MAX_DEPTH)
    max_nodes = tl.load(own_numbers + MAX_NODES)
    is_guess = (nodes > 0) & (nodes < num_candidates)

    # ---- what a look behind each node may bring ----
    parent = tl.load(own + PARENT * CAPACITY + nodes, mask=is_guess, other=-1)
    parent_offset = tl.load(own + DRAFT_OFFSET * CAPACITY + parent, mask=parent >= 0, other=-1)
    offset = tl.load(own + DRAFT_OFFSET * CAPACITY + nodes, mask=is_guess, other=0)
    is_expanded = tl.load(own + IS_EXPANDED * CAPACITY + nodes, mask=is_guess, other=1)
    depth = tl.load(own + DEPTH * CAPACITY + nodes, mask=is_guess, other=0)
    path_prob = load_bits(own + PATH_PROB * CAPACITY + nodes, is_guess)
    covered = load_bits(own + COVERED * CAPACITY + nodes, is_guess)
    rank = ranks_among(own, num_candidates, nodes, CAPACITY, GROUP)
    gain = path_prob * (1.0 - tl.minimum(covered, most_believed))
    # A child ranks behind its parent, so the last node that still fits cannot have one.
    is_worthy = is_guess & (is_expanded == 0) & (offset < 0) & (rank < max_nodes - 1)
    deepest = tl.where(num_passes < max_depth, max_depth, 0)
    is_worthy = is_worthy & (depth < deepest)
    is_worthy = is_worthy & (path_prob >= min_path_prob) & (gain >= min_path_prob)
    gain = tl.where(is_worthy, gain, 0.0)

    # ---- the best one after the other; a chosen one opens its children ----
    is_open = parent_offset >= 0
    places = tl.arange(0, PLACES)  # [F]
    first_offset = 1 + (num_passes - 1) * WIDTH
    chosen = tl.full([PLACES], -1, tl.int32)
    for place in range(WIDTH):
        open_gain = tl.where(is_open, gain, 0.0)
        best = tl.max(open_gain, 0)
        node = tl.min(tl.where(open_gain == best, nodes, CAPACITY), 0)
        is_found = (best > 0.0) & (first_offset + place < MAX_SLOTS)
        node = tl.where(is_found, node, -1)
        chosen = tl.where(places == place, node, chosen)
        gain = tl.where(nodes == node, 0.0, gain)
        if not IS_STEPWISE:
            is_open = is_open | (parent == node)

    # ---- the ancestors' bits: what lies in earlier passes, then this pass's, parents first ----
    is_row = chosen >= 0
    row_parent = tl.load(own + PARENT * CAPACITY + chosen, mask=is_row, other=-2)
    is_below = (row_parent[:, None] == chosen[None, :]) & is_row[None, :]  # [F, F]
    parent_place = tl.sum(tl.where(is_below, places[None, :] + 1, 0), 1) - 1  # [F]
    is_earlier = is_row & (parent_place < 0)
    word = tl.arange(0, WORDS)  # [words]
    words = tl.load(
        own_words + row_parent[:, None] * WORDS + word[None, :],
        mask=is_earlier[:, None],
        other=0,
    )  # [F, words]
    row_offset = first_offset + places
    own_bit = tl.full([PLACES], 1, tl.int64) << (row_offset % 64).to(tl.int64)
    is_own_word = (row_offset // 64)[:, None] == word[None, :]
    words = words | tl.where(is_own_word & is_row[:, None], own_bit[:, None], 0)
    for place in range(WIDTH):
        at_place = tl.sum(tl.where((places == place)[:, None], words, 0), 0)  # [words]
        words = words | tl.where((parent_place == place)[:, None], at_place[None, :], 0)

    row_token = tl.load(own + TOKEN_ID * CAPACITY + chosen, mask=is_row, other=0).to(tl.int64)
    depth_of_row = tl.load(own + DEPTH * CAPACITY + chosen, mask=is_row, other=0).to(tl.int64)
    tl.debug_barrier()  # everything has been read
    is_place = places < WIDTH
    row = sequence * WIDTH + places
    tl.store(own + DRAFT_OFFSET * CAPACITY + chosen, row_offset, mask=is_row)
    tl.store(
        own_words + chosen[:, None] * WORDS + word[None, :],
        words,
        mask=is_row[:, None] & (word >= 0)[None, :],
    )
    tl.store(frontier + row, chosen, mask=is_place)
    tl.store(row_token_ids + row, row_token, mask=is_place)
    tl.store(row_depth + row, depth_of_row, mask=is_place)
    tl.store(row_positions + row, root_slot + depth_of_row, mask=is_place)
    tl.store(row_slots + row, tl.where(is_row, root_slot + row_offset, -1), mask=is_place)
    tl.store(
        row_words + row[:, None] * WORDS + word[None, :],
        words,
        mask=is_place[:, None] & (word >= 0)[None, :],
    )
    num_chosen = tl.sum(is_row.to(tl.int32), 0)
    tl.store(num_rows + sequence, num_chosen)
    tl.store(kv_lens + sequence, root_slot + first_offset + num_chosen)
    tl.store(own_numbers + NUM_PASSES, num_passes + 1)


def choose_frontier(
    state: TreeState, *, min_path_prob: float, most_believed: float, is_stepwise: bool = False
) -> FrontierRows:
    """Choose what the next draft pass computes, at most `state.width` nodes a sequence.

    Sets the state's frontier, and draft offsets and ancestor words of the nodes chosen: the n-th
    call gives out the offsets from 1 + (n - 1) * width on, in the order of the rows. Nothing is
    chosen in a tree that has had as many passes as it may have depths, or has no draft slot left.
    `most_believed`: how far guesses count as covering what may follow
    (`outrider.draft.budget.budget.MOST_BELIEVED`).
    `is_stepwise`: parents of what is chosen were computed in earlier passes.
    """
    if not uses_triton(state.candidates):
        return choose_frontier_reference(
            state,
            min_path_prob=min_path_prob,
            most_believed=most_believed,
            is_stepwise=is_stepwise,
        )
    rows = _empty_rows(state)
    launch(
        _choose_frontier_kernel,
        (state.num_sequences,),
        state.candidates,
        state.numbers,
        state.ancestor_words,
        state.frontier,
        rows.token_ids,
        rows.positions,
        rows.logical_slots,
        rows.depth,
        rows.ancestor_words,
        rows.num_rows,
        rows.kv_lens,
        float(min_path_prob),
        float(most_believed),
        num_warps=num_warps_for(state.capacity),
        num_stages=1,
        IS_STEPWISE=is_stepwise,
        WIDTH=state.width,
        PLACES=next_power_of_2(state.width),
        MAX_SLOTS=MAX_TREE_NODES,
        WORDS=MASK_WORDS,
        CAPACITY=state.capacity,
        GROUP=_GROUP,
    )
    return rows
