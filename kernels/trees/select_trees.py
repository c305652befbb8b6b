"""The guesses that the target judges: the likeliest of all trees of a step, under one budget.

As `outrider.draft.trees.guess_tree.GuessTree.to_token_tree` of what `TreeDrafter` shares out: a
path counts by its probability times its sequence's urgency. A tree's part is the head of its own
ranking, in which parents stand before children, so every selection is a forest (cf. Sequoia, Chen
et al. 2024).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outrider.kernels.tree_bounds import MASK_WORDS, MAX_TREE_NODES
from outrider.kernels.trees.tree_ranks import ranked, ranks_among
from outrider.kernels.trees.tree_state import (
    DEPTH,
    DRAFT_OFFSET,
    MAX_NODES,
    NUM_CANDIDATES,
    NUM_FIELDS,
    NUM_NUMBERS,
    PARENT,
    PATH_PROB,
    SOURCES,
    TARGET_SLOT,
    TOKEN_ID,
    URGENCY,
    TreeState,
    load_bits,
    num_warps_for,
    number,
)
from outrider.kernels.triton_support import jit, launch, next_power_of_2, tl, uses_triton
from outrider.kernels.upload import upload

# Ranks that may be chosen: the root takes one of a tree's bits.
_MOST_GUESSES = MAX_TREE_NODES - 1


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class SelectedTrees:
    """Trees of S sequences, flat, one after the other, then padding; a root begins each.

    Tensors of rows are int64 [num_rows] and 0 in padding, those of trees int32 [S].
    """

    token_ids: Tensor
    parent_index: Tensor
    """A flat row; -1 for roots and padding."""
    depth: Tensor
    tree_index: Tensor
    """-1 in padding."""
    sources: Tensor
    positions: Tensor
    logical_slots: Tensor
    """The root's and a row's place in its tree; -1 in padding."""
    sequence_index: Tensor
    candidates: Tensor
    """The state's; -1 in padding."""
    draft_offsets: Tensor
    """-1 in padding and where the small model has not computed it."""
    ancestor_words: Tensor
    """int64 [num_rows, 4]; bit j is node j of the row's tree, its own included. 0 in padding."""
    row_starts: Tensor
    num_rows: Tensor
    tree_starts: Tensor
    """The roots' slots in the large model's views."""
    kv_lens: Tensor


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class _Ranking:
    """Each tree's guesses that may be chosen, the likeliest first."""

    order: Tensor
    """int32 [S, 255], candidates; -1 beyond the last."""
    keys: Tensor
    """int64 [S, 255], -1 beyond the last. Greater where a guess counts for more, all different."""
    ranks: Tensor
    """int32 [S, C], a candidate's place in `order`, where it has one."""


def _ranking_reference(state: TreeState, caps: Sequence[int]) -> _Ranking:
    ranking = _empty_ranking(state)
    ranking.order.fill_(-1)
    ranking.keys.fill_(-1)
    numbers = state.numbers.tolist()
    urgency = state.numbers[:, number(URGENCY)].contiguous().view(torch.float32)
    num_sequences, device = state.num_sequences, state.candidates.device
    for sequence, cap in enumerate(caps):
        own = numbers[sequence]
        num_candidates = own[number(NUM_CANDIDATES)]
        path_probs = state.path_prob[sequence, :num_candidates]
        depths = state.depth[sequence, :num_candidates].tolist()
        limit = max(min(cap, own[number(MAX_NODES)], _MOST_GUESSES), 0)
        likeliest = ranked(path_probs.tolist(), depths)[:limit]
        chosen = torch.tensor(likeliest, dtype=torch.int64, device=device)
        weighted = path_probs[chosen] * urgency[sequence]
        places = torch.arange(len(chosen), device=device)
        key = weighted.contiguous().view(torch.int32).to(torch.int64) << 32
        ranking.order[sequence, : len(chosen)] = chosen.to(torch.int32)
        ranking.keys[sequence, : len(chosen)] = key | (
            (1 << 31) - 1 - (places * num_sequences + sequence)
        )
        ranking.ranks[sequence, chosen] = places.to(torch.int32)
    return ranking


def _empty_ranking(state: TreeState) -> _Ranking:
    num_sequences, device = state.num_sequences, state.candidates.device
    shape = (num_sequences, _MOST_GUESSES)
    return _Ranking(
        order=torch.empty(shape, dtype=torch.int32, device=device),
        keys=torch.empty(shape, dtype=torch.int64, device=device),
        ranks=torch.empty((num_sequences, state.capacity), dtype=torch.int32, device=device),
    )


def _share(ranking: _Ranking, num_nodes: int) -> Tensor:
    """Count how many of each tree's guesses are among the best `num_nodes` of all: int32 [S]."""
    keys = ranking.keys
    num_best = min(num_nodes, keys.numel())
    if num_best == 0:
        return torch.zeros(keys.shape[0], dtype=torch.int32, device=keys.device)
    # Keys differ, so the least of the best ones says it all.
    threshold = keys.reshape(-1).topk(num_best, sorted=False).values.amin()
    return (keys >= threshold.clamp(min=0)).sum(1, dtype=torch.int32)


def _write_reference(
    state: TreeState, ranking: _Ranking, counts: Tensor, trees: SelectedTrees
) -> None:
    row = 0
    for sequence, count in enumerate(counts.tolist()):
        own = state.numbers[sequence].tolist()
        start, root_slot = row, own[number(TARGET_SLOT)]
        nodes = [0, *ranking.order[sequence, :count].tolist()]
        places = {node: place for place, node in enumerate(nodes)}
        masks: list[int] = []
        for place, node in enumerate(nodes):
            fields = state.candidates[sequence, :, node].tolist()
            parent = places[fields[number(PARENT)]] if node else -1
            masks.append((masks[parent] if node else 0) | 1 << place)
            trees.token_ids[row] = fields[number(TOKEN_ID)]
            trees.parent_index[row] = start + parent if node else -1
            trees.depth[row] = fields[number(DEPTH)]
            trees.tree_index[row] = trees.sequence_index[row] = sequence
            trees.sources[row] = fields[number(SOURCES)]
            trees.positions[row] = root_slot + fields[number(DEPTH)]
            trees.logical_slots[row] = root_slot + place
            trees.candidates[row] = node
            trees.draft_offsets[row] = fields[number(DRAFT_OFFSET)]
            for word in range(MASK_WORDS):
                bits = masks[place] >> (64 * word) & ((1 << 64) - 1)
                trees.ancestor_words[row, word] = bits - (bits >> 63 << 64)
            row += 1
        trees.row_starts[sequence], trees.num_rows[sequence] = start, count + 1
        trees.tree_starts[sequence] = root_slot
        trees.kv_lens[sequence] = root_slot + count + 1


def select_trees_reference(
    state: TreeState, *, num_nodes: int, caps: Sequence[int]
) -> SelectedTrees:
    """`select_trees` one sequence after the other."""
    trees = _padding(state, num_nodes)
    ranking = _ranking_reference(state, caps)
    _write_reference(state, ranking, _share(ranking, num_nodes), trees)
    return trees


def _padding(state: TreeState, num_nodes: int) -> SelectedTrees:
    """Rows of padding, as many as there may be."""
    num_sequences, device = state.num_sequences, state.candidates.device
    num_rows = num_sequences + num_nodes
    even = num_rows + num_rows % 2  # every part begins at 16 bytes, see `init_trees`
    zeros = torch.zeros((5 + MASK_WORDS, even), dtype=torch.int64, device=device)
    unset = torch.full((5, even), -1, dtype=torch.int64, device=device)
    per_tree = torch.empty((4, -(-num_sequences // 4) * 4), dtype=torch.int32, device=device)
    token_ids, depth, sources, positions, sequence_index = zeros[:5, :num_rows]
    parent_index, tree_index, logical_slots, candidates, draft_offsets = unset[:, :num_rows]
    row_starts, counts, tree_starts, kv_lens = per_tree[:, :num_sequences]
    return SelectedTrees(
        token_ids=token_ids,
        parent_index=parent_index,
        depth=depth,
        tree_index=tree_index,
        sources=sources,
        positions=positions,
        logical_slots=logical_slots,
        sequence_index=sequence_index,
        candidates=candidates,
        draft_offsets=draft_offsets,
        ancestor_words=zeros[5:].view(even, MASK_WORDS)[:num_rows],
        row_starts=row_starts,
        num_rows=counts,
        tree_starts=tree_starts,
        kv_lens=kv_lens,
    )


# Rivals that a program compares its candidates with, and trees whose sizes it adds, at a time.
_GROUP = 8
_SIZES = 128


@jit
def _rank_guesses_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    candidates,
    numbers,
    caps,
    order,
    keys,
    ranks,
    MOST: tl.constexpr,
    PLACES: tl.constexpr,
    CAPACITY: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Grid [num_sequences]: `_Ranking` of one sequence."""
    sequence = tl.program_id(0).to(tl.int64)
    own = candidates + sequence * (NUM_FIELDS * CAPACITY)
    own_numbers = numbers + sequence * NUM_NUMBERS
    nodes = tl.arange(0, CAPACITY)  # [C]
    num_candidates = tl.load(own_numbers + NUM_CANDIDATES)
    limit = tl.minimum(tl.load(own_numbers + MAX_NODES), tl.load(caps + sequence))
    limit = tl.maximum(tl.minimum(tl.minimum(limit, MOST), num_candidates - 1), 0)
    rank = ranks_among(own, num_candidates, nodes, CAPACITY, GROUP)
    is_kept = rank < limit
    urgency = tl.load(own_numbers + URGENCY).to(tl.float32, bitcast=True)
    is_guess = (nodes > 0) & (nodes < num_candidates)
    weighted = load_bits(own + PATH_PROB * CAPACITY + nodes, is_guess) * urgency
    # Equal ones: by rank, so that a parent comes first, then by sequence.
    place = rank.to(tl.int64) * tl.num_programs(0) + sequence
    key = (weighted.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (0x7FFFFFFF - place)
    tl.store(order + sequence * MOST + rank, nodes, mask=is_kept)
    tl.store(keys + sequence * MOST + rank, key, mask=is_kept)
    tl.store(ranks + sequence * CAPACITY + nodes, rank, mask=is_kept)
    places = tl.arange(0, PLACES)
    is_beyond = (places >= limit) & (places < MOST)
    tl.store(order + sequence * MOST + places, tl.full([PLACES], -1, tl.int32), mask=is_beyond)
    tl.store(keys + sequence * MOST + places, tl.full([PLACES], -1, tl.int64), mask=is_beyond)


@jit
def _write_trees_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    candidates,
    numbers,
    counts,
    order,
    ranks,
    token_ids,
    parent_index,
    depths,
    tree_index,
    sources,
    positions,
    logical_slots,
    sequence_index,
    row_candidates,
    draft_offsets,
    row_words,
    row_starts,
    num_rows,
    tree_starts,
    kv_lens,
    MOST: tl.constexpr,
    PLACES: tl.constexpr,
    WORDS: tl.constexpr,
    CAPACITY: tl.constexpr,
    SIZES: tl.constexpr,
):
    """Grid [num_sequences]: the rows of one tree."""
    tree = tl.program_id(0)
    sequence = tree.to(tl.int64)
    own = candidates + sequence * (NUM_FIELDS * CAPACITY)
    own_ranks = ranks + sequence * CAPACITY
    root_slot = tl.load(numbers + sequence * NUM_NUMBERS + TARGET_SLOT)
    count = tl.load(counts + sequence)
    start = tree
    first = 0
    while first < tree:
        other = first + tl.arange(0, SIZES)
        start += tl.sum(tl.load(counts + other, mask=other < tree, other=0), 0)
        first += SIZES
    places = tl.arange(0, PLACES)
    is_row = places <= count
    is_guess = is_row & (places > 0)
    node = tl.load(order + sequence * MOST + places - 1, mask=is_guess, other=0)
    parent = tl.load(own + PARENT * CAPACITY + node, mask=is_guess, other=-1)
    parent_place = tl.load(own_ranks + parent, mask=parent > 0, other=-1) + 1
    depth = tl.load(own + DEPTH * CAPACITY + node, mask=is_guess, other=0)

    # ---- every row walks up to its root ----
    word = tl.arange(0, WORDS)
    words = tl.zeros([PLACES, WORDS], tl.int64)
    one = tl.full([PLACES], 1, tl.int64)
    at, at_place = node, places
    height = tl.max(depth, 0)
    while height >= 0:
        # Rows that have arrived stay at the root, whose bit they have then.
        bit = one << (at_place % 64).to(tl.int64)
        words = words | tl.where((at_place // 64)[:, None] == word[None, :], bit[:, None], 0)
        above = tl.load(own + PARENT * CAPACITY + at, mask=is_row & (at > 0), other=0)
        at_place = tl.load(own_ranks + above, mask=above > 0, other=-1) + 1
        at = above
        height -= 1

    row = start + places
    wide_depth = depth.to(tl.int64)
    tl.store(token_ids + row, tl.load(own + TOKEN_ID * CAPACITY + node, mask=is_row), mask=is_row)
    tl.store(parent_index + row, tl.where(places > 0, start + parent_place, -1), mask=is_row)
    tl.store(depths + row, wide_depth, mask=is_row)
    tl.store(tree_index + row, tl.zeros([PLACES], tl.int64) + sequence, mask=is_row)
    tl.store(sources + row, tl.load(own + SOURCES * CAPACITY + node, mask=is_row), mask=is_row)
    tl.store(positions + row, root_slot + wide_depth, mask=is_row)
    tl.store(logical_slots + row, root_slot + places, mask=is_row)
    tl.store(sequence_index + row, tl.zeros([PLACES], tl.int64) + sequence, mask=is_row)
    tl.store(row_candidates + row, node, mask=is_row)
    offset = tl.load(own + DRAFT_OFFSET * CAPACITY + node, mask=is_row)
    tl.store(draft_offsets + row, offset, mask=is_row)
    tl.store(
        row_words + row[:, None] * WORDS + word[None, :],
        words,
        mask=is_row[:, None] & (word >= 0)[None, :],
    )
    tl.store(row_starts + sequence, start)
    tl.store(num_rows + sequence, count + 1)
    tl.store(tree_starts + sequence, root_slot)
    tl.store(kv_lens + sequence, root_slot + count + 1)


def select_trees(state: TreeState, *, num_nodes: int, caps: Sequence[int]) -> SelectedTrees:
    """Select the `num_nodes` guesses of all trees that count for most, at most caps[s] of tree s.

    `caps`: [S], roots not counted; a tree's own `max_nodes` and 255 bound it too. Of guesses that
    count for the same, the one that ranks higher in its own tree is taken, then the one of the
    earlier sequence. Raises ValueError for a negative number.
    """
    if num_nodes < 0:
        raise ValueError(f"num_nodes={num_nodes} must not be negative")
    if not uses_triton(state.candidates):
        return select_trees_reference(state, num_nodes=num_nodes, caps=caps)
    ranking = _empty_ranking(state)
    places = next_power_of_2(MAX_TREE_NODES)
    launch(
        _rank_guesses_kernel,
        (state.num_sequences,),
        state.candidates,
        state.numbers,
        upload(np.array(caps, dtype=np.int32), state.candidates.device),
        ranking.order,
        ranking.keys,
        ranking.ranks,
        num_warps=num_warps_for(state.capacity),
        num_stages=1,
        MOST=_MOST_GUESSES,
        PLACES=places,
        CAPACITY=state.capacity,
        GROUP=_GROUP,
    )
    trees = _padding(state, num_nodes)
    launch(
        _write_trees_kernel,
        (state.num_sequences,),
        state.candidates,
        state.numbers,
        _share(ranking, num_nodes),
        ranking.order,
        ranking.ranks,
        trees.token_ids,
        trees.parent_index,
        trees.depth,
        trees.tree_index,
        trees.sources,
        trees.positions,
        trees.logical_slots,
        trees.sequence_index,
        trees.candidates,
        trees.draft_offsets,
        trees.ancestor_words,
        trees.row_starts,
        trees.num_rows,
        trees.tree_starts,
        trees.kv_lens,
        num_warps=2,
        num_stages=1,
        MOST=_MOST_GUESSES,
        PLACES=places,
        WORDS=MASK_WORDS,
        CAPACITY=state.capacity,
        SIZES=_SIZES,
    )
    return trees
