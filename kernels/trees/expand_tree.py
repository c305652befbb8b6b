"""The small model's guesses join growing trees: merged, calibrated, multiplied down.

The same as `outrider.draft.trees.growing_tree.GrowingTree.grow`, for all sequences of a step at
once and without the host; `outrider.draft.trees` lists the four implementations. A token that text
guessed too is one candidate, and two opinions of it come to the product of their odds. Siblings'
probabilities are together at most 1.
"""

from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.kernels.trees.tree_state import (
    CONFIDENCE,
    COVERED,
    DEPTH,
    DRAFT_OFFSET,
    EDGE_PROB,
    EVIDENCE,
    IS_EXPANDED,
    MODEL_CONFIDENCE,
    NUM_CANDIDATES,
    NUM_FIELDS,
    NUM_NUMBERS,
    PARENT,
    PATH_PROB,
    SOURCES,
    TABLE,
    TEXT_CONFIDENCE,
    TOKEN_ID,
    CandidateFields,
    GrownTree,
    TreeState,
    load_bits,
    num_warps_for,
    number,
    store_bits,
)
from outrider.kernels.triton_support import jit, launch, tl, uses_triton


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class EdgeTable:
    """Calibration as tensors (`outrider.draft.budget.calibration.EdgeCalibration`)."""

    shifts: Tensor
    """float32 [num_tables, num_kinds, num_depth_classes, num_bins], what is added to a confidence.
    num_kinds is twice the number of combinations of sources. The upper half is for guesses that the
    small model was asked about and did not name."""
    bin_edges: Tensor
    """float32 [num_bins - 1]. A confidence's bin is the number of edges that it has reached."""
    depth_edges: Tensor
    """int32 [num_depth_classes - 1], alike."""
    least: float
    """Lower bound of the result."""
    most: float
    """Upper bound of the result."""
    model_bit: int
    """The small model's among the sources."""


def _read(state: TreeState) -> CandidateFields:
    return CandidateFields(
        fields=state.candidates.cpu().numpy(), num_candidates=state.num_candidates.cpu().numpy()
    )


def _write(tree: GrownTree, state: TreeState, sequence: int) -> None:
    first_real = number(MODEL_CONFIDENCE)
    columns: list[Any] = [getattr(tree, name) for name in tree.__dataclass_fields__]
    whole = torch.tensor(columns[:first_real], dtype=torch.int32)
    real = torch.tensor(columns[first_real:], dtype=torch.float32)
    values = torch.cat([whole, real.view(torch.int32)])  # [13, num_candidates]
    state.candidates[sequence, :, : len(tree.parent)] = values.to(state.candidates.device)
    state.num_candidates[sequence] = len(tree.parent)


class _Calibration:
    """One table of an `EdgeTable` on the host."""

    def __init__(self, table: EdgeTable, index: int) -> None:
        self._shifts = table.shifts[index].tolist()
        self._bin_edges, self._depth_edges = table.bin_edges.tolist(), table.depth_edges.tolist()
        self._least, self._most = table.least, table.most
        self.silent_bit = table.shifts.shape[1] // 2

    def probability(self, confidence: float, evidence: int, depth: int) -> float:
        """The chance that such a guess is right."""
        by_bin = self._shifts[evidence][bisect_right(self._depth_edges, depth)]
        shifted = confidence + by_bin[bisect_right(self._bin_edges, confidence)]
        return float(min(max(shifted, self._least), self._most))


def _agreed(first: float, second: float) -> float:
    """Return what two independent opinions of one event come to (the odds are multiplied)."""
    both, neither = first * second, (1.0 - first) * (1.0 - second)
    return both / (both + neither) if both + neither > 0.0 else 0.5


def _share_out(tree: GrownTree, node: int, calibration: _Calibration) -> None:
    """Work out the probabilities of an expanded node's children."""
    children = tree.children(node)
    named = sum(tree.model_confidence[child] for child in children)
    for child in children:
        of_text, of_model = tree.text_confidence[child], tree.model_confidence[child]
        evidence = tree.sources[child] & (calibration.silent_bit - 1)
        confidence = of_text or of_model
        if of_text:
            if not of_model:
                of_model = max(1.0 - named, 0.0)
                evidence |= calibration.silent_bit
            confidence = _agreed(of_text, of_model)
        tree.confidence[child], tree.evidence[child] = confidence, evidence
        tree.edge_prob[child] = calibration.probability(confidence, evidence, tree.depth[child])
    total = sum(tree.edge_prob[child] for child in children)
    tree.covered[node] = min(total, 1.0)
    for child in children:
        tree.edge_prob[child] /= max(total, 1.0)


def _name_children(
    tree: GrownTree, node: int, named: list[tuple[int, float]], *, model_bit: int, capacity: int
) -> None:
    """Merge the small model's children of a node, as far as there is room."""
    tree.is_expanded[node] = 1
    children = {tree.token_id[child]: child for child in tree.children(node)}
    for token_id, chance in named:
        child = children.get(token_id)
        if child is None:
            child = len(tree.parent)
            if child == capacity:
                continue
            for name in tree.__dataclass_fields__:
                getattr(tree, name).append(0)
            tree.token_id[child], tree.parent[child] = token_id, node
            tree.depth[child], tree.draft_offset[child] = tree.depth[node] + 1, -1
        tree.sources[child] |= model_bit
        tree.model_confidence[child] = chance


def expand_tree_reference(
    state: TreeState, token_ids: Tensor, probs: Tensor, table: EdgeTable, *, min_path_prob: float
) -> None:
    """`expand_tree` one sequence after the other."""
    num_rows = token_ids.shape[0] // max(state.num_sequences, 1)
    floor = float(np.float32(min_path_prob))
    frontier = state.frontier[:, :num_rows].tolist()
    grown = _read(state)
    tables = state.numbers[:, number(TABLE)].tolist()
    rows = [
        [(token_id, chance) for token_id, chance in zip(*row, strict=True) if chance >= floor]
        for row in zip(token_ids.tolist(), probs.tolist(), strict=True)
    ]
    for sequence, nodes in enumerate(frontier):
        asked = [(place, node) for place, node in enumerate(nodes) if node >= 0]
        if not asked:
            continue
        tree = grown.of_tree(sequence)
        for place, node in asked:
            _name_children(
                tree,
                node,
                rows[sequence * num_rows + place],
                model_bit=table.model_bit,
                capacity=state.capacity,
            )
        calibration = _Calibration(table, tables[sequence])
        for _, node in asked:
            _share_out(tree, node, calibration)
        for node in sorted(range(1, len(tree.parent)), key=tree.depth.__getitem__):
            tree.path_prob[node] = tree.path_prob[tree.parent[node]] * tree.edge_prob[node]
        _write(tree, state, sequence)


# What a program looks at together: children named by the frontier, and nodes of the frontier.
_GROUP = 2


@jit
def _expand_tree_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    candidates,
    numbers,
    frontier,
    token_ids,
    probs,
    shifts,
    bin_edges,
    depth_edges,
    least,
    most,
    min_path_prob,
    MODEL_BIT: tl.constexpr,
    NUM_KINDS: tl.constexpr,
    NUM_DEPTH_CLASSES: tl.constexpr,
    NUM_BINS: tl.constexpr,
    BRANCHING: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    CAPACITY: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Grid [num_sequences]: a program holds all candidates of its sequence, a vector a field."""
    sequence = tl.program_id(0).to(tl.int64)
    own = candidates + sequence * (NUM_FIELDS * CAPACITY)
    own_numbers = numbers + sequence * NUM_NUMBERS
    own_frontier = frontier + sequence * WIDTH
    first_pair = sequence * (NUM_ROWS * BRANCHING)
    nodes = tl.arange(0, CAPACITY)  # [C]
    in_group = tl.arange(0, GROUP)  # [G]
    num_old = tl.load(own_numbers + NUM_CANDIDATES)
    is_old = nodes < num_old
    token = tl.load(own + TOKEN_ID * CAPACITY + nodes, mask=is_old, other=-1)
    parent = tl.load(own + PARENT * CAPACITY + nodes, mask=is_old, other=-1)
    depth = tl.load(own + DEPTH * CAPACITY + nodes, mask=is_old, other=0)
    sources = tl.load(own + SOURCES * CAPACITY + nodes, mask=is_old, other=0)
    of_model = load_bits(own + MODEL_CONFIDENCE * CAPACITY + nodes, is_old)

    # ---- the frontier's children join: each becomes one candidate, old or new ----
    num_there = num_old
    for first in range(0, NUM_ROWS * BRANCHING, GROUP):
        pair = first + in_group
        is_pair = pair < NUM_ROWS * BRANCHING
        node = tl.load(own_frontier + pair // BRANCHING, mask=is_pair, other=-1)
        named = tl.load(token_ids + first_pair + pair, mask=is_pair, other=-1).to(tl.int32)
        chance = tl.load(probs + first_pair + pair, mask=is_pair, other=0.0).to(tl.float32)
        node_depth = tl.load(own + DEPTH * CAPACITY + node, mask=node >= 0, other=0)
        is_named = is_pair & (node >= 0) & (chance >= min_path_prob)
        # [C, G]; a frontier node stands in the frontier once, and its tokens differ.
        is_same = (parent[:, None] == node[None, :]) & (token[:, None] == named[None, :])
        is_same = is_same & is_named[None, :] & is_old[:, None]
        is_new = is_named & (tl.sum(is_same.to(tl.int32), 0) == 0)  # [G]
        place = num_there + tl.cumsum(is_new.to(tl.int32), 0) - 1
        is_new = is_new & (place < CAPACITY)
        num_there += tl.sum(is_new.to(tl.int32), 0)
        is_added = (nodes[:, None] == place[None, :]) & is_new[None, :]  # [C, G]
        is_hit = tl.sum((is_same | is_added).to(tl.int32), 1) > 0  # [C]
        heard = tl.sum(tl.where(is_same | is_added, chance[None, :], 0.0), 1)
        of_model = tl.where(is_hit, heard, of_model)
        sources = tl.where(is_hit, sources | MODEL_BIT, sources)
        is_fresh = tl.sum(is_added.to(tl.int32), 1) > 0
        token = tl.where(is_fresh, tl.sum(tl.where(is_added, named[None, :], 0), 1), token)
        parent = tl.where(is_fresh, tl.sum(tl.where(is_added, node[None, :], 0), 1), parent)
        new_depth = tl.sum(tl.where(is_added, node_depth[None, :] + 1, 0), 1)
        depth = tl.where(is_fresh, new_depth, depth)
    is_there = nodes < num_there
    has_joined = is_there & (nodes >= num_old)
    nothing = tl.zeros([CAPACITY], tl.int32)
    tl.debug_barrier()  # what is overwritten has been read
    tl.store(own + TOKEN_ID * CAPACITY + nodes, token, mask=has_joined)
    tl.store(own + PARENT * CAPACITY + nodes, parent, mask=has_joined)
    tl.store(own + DEPTH * CAPACITY + nodes, depth, mask=has_joined)
    tl.store(own + DRAFT_OFFSET * CAPACITY + nodes, nothing - 1, mask=has_joined)
    tl.store(own + TEXT_CONFIDENCE * CAPACITY + nodes, nothing, mask=has_joined)
    tl.store(own + SOURCES * CAPACITY + nodes, sources, mask=is_there)
    store_bits(own + MODEL_CONFIDENCE * CAPACITY + nodes, of_model, is_there)
    tl.store(own_numbers + NUM_CANDIDATES, num_there)

    # ---- what each child comes to ----
    named_beside = tl.zeros([CAPACITY], tl.float32)  # the chances of a child and its siblings
    is_touched = nodes < 0
    for first in range(0, NUM_ROWS, GROUP):
        row = first + in_group
        node = tl.load(own_frontier + row, mask=row < NUM_ROWS, other=-1)
        is_child = (parent[:, None] == node[None, :]) & (node >= 0)[None, :]  # [C, G]
        named = tl.sum(tl.where(is_child, of_model[:, None], 0.0), 0)  # [G]
        named_beside += tl.sum(tl.where(is_child, named[None, :], 0.0), 1)
        is_touched = is_touched | (tl.sum(is_child.to(tl.int32), 1) > 0)
    of_text = load_bits(own + TEXT_CONFIDENCE * CAPACITY + nodes, is_old)
    is_silent = (of_text > 0.0) & (of_model == 0.0)
    opinion = tl.where(is_silent, tl.maximum(1.0 - named_beside, 0.0), of_model)
    both = of_text * opinion
    either = both + (1.0 - of_text) * (1.0 - opinion)
    agreed = tl.where(either > 0.0, both / tl.where(either > 0.0, either, 1.0), 0.5)
    confidence = tl.where(of_text > 0.0, agreed, of_model)
    evidence = sources & (NUM_KINDS // 2 - 1)
    evidence = tl.where(is_silent, evidence | (NUM_KINDS // 2), evidence)
    reached = tl.zeros([CAPACITY], tl.int32)
    for edge in range(NUM_BINS - 1):
        reached += (confidence >= tl.load(bin_edges + edge)).to(tl.int32)
    depth_class = tl.zeros([CAPACITY], tl.int32)
    for edge in range(NUM_DEPTH_CLASSES - 1):
        depth_class += (depth >= tl.load(depth_edges + edge)).to(tl.int32)
    kind = tl.load(own_numbers + TABLE) * NUM_KINDS + evidence
    shift = tl.load(
        shifts + (kind * NUM_DEPTH_CLASSES + depth_class) * NUM_BINS + reached,
        mask=is_touched,
        other=0.0,
    )
    fresh_edge = tl.minimum(tl.maximum(confidence + shift, least), most)
    tl.store(own + EVIDENCE * CAPACITY + nodes, evidence, mask=is_touched)
    store_bits(own + CONFIDENCE * CAPACITY + nodes, confidence, is_touched)
    tl.debug_barrier()  # nothing below is loaded before: it would take registers

    # ---- siblings together at most 1 ----
    is_old_expanded = tl.load(own + IS_EXPANDED * CAPACITY + nodes, mask=is_old, other=0)
    is_expanded = is_old_expanded
    covered = load_bits(own + COVERED * CAPACITY + nodes, is_old)
    total_beside = tl.zeros([CAPACITY], tl.float32)
    is_frontier = nodes < 0
    for first in range(0, NUM_ROWS, GROUP):
        row = first + in_group
        node = tl.load(own_frontier + row, mask=row < NUM_ROWS, other=-1)
        is_child = (parent[:, None] == node[None, :]) & (node >= 0)[None, :]  # [C, G]
        total = tl.sum(tl.where(is_child, fresh_edge[:, None], 0.0), 0)  # [G]
        total_beside += tl.sum(tl.where(is_child, total[None, :], 0.0), 1)
        is_self = nodes[:, None] == node[None, :]  # [C, G]
        is_asked = tl.sum(is_self.to(tl.int32), 1) > 0
        is_expanded = tl.where(is_asked, 1, is_expanded)
        now_covered = tl.sum(tl.where(is_self, tl.minimum(total, 1.0)[None, :], 0.0), 1)
        covered = tl.where(is_asked, now_covered, covered)
        is_frontier = is_frontier | is_asked
    edge_prob = load_bits(own + EDGE_PROB * CAPACITY + nodes, is_old)
    edge_prob = tl.where(is_touched, fresh_edge / tl.maximum(total_beside, 1.0), edge_prob)

    # ---- down the paths, a depth at a time ----
    path_prob = load_bits(own + PATH_PROB * CAPACITY + nodes, is_old)
    above = tl.maximum(parent, 0)
    last_depth = tl.max(depth, 0)
    now = tl.min(tl.where(is_frontier, depth + 1, CAPACITY), 0)
    while now <= last_depth:
        through = tl.gather(path_prob, above, 0) * edge_prob
        path_prob = tl.where(depth == now, through, path_prob)
        now += 1

    tl.debug_barrier()  # what is overwritten has been read
    tl.store(own + IS_EXPANDED * CAPACITY + nodes, is_expanded, mask=is_there)
    store_bits(own + EDGE_PROB * CAPACITY + nodes, edge_prob, is_touched)
    store_bits(own + PATH_PROB * CAPACITY + nodes, path_prob, is_there)
    store_bits(own + COVERED * CAPACITY + nodes, covered, is_there)


def expand_tree(
    state: TreeState, token_ids: Tensor, probs: Tensor, table: EdgeTable, *, min_path_prob: float
) -> None:
    """Add the small model's children of the frontier to the trees, in place.

    `token_ids`: int64 [S * W, K] with W at most `state.width`: the different tokens that the small
    model names behind the first W frontier nodes of each sequence, all W of a sequence together;
    any in rows of padding. `probs`: float32 [S * W, K], its confidences; those below
    `min_path_prob` are not named. A candidate too many for the capacity is not added. Raises
    ValueError where the shapes do not fit.
    """
    num_sequences = state.num_sequences
    num_rows = token_ids.shape[0] // max(num_sequences, 1)
    if token_ids.shape != probs.shape or token_ids.shape[0] != num_rows * num_sequences:
        raise ValueError(
            f"token_ids {tuple(token_ids.shape)} and probs {tuple(probs.shape)} must be alike, "
            f"with as many rows for each of {num_sequences} sequences"
        )
    if num_rows > state.width:
        raise ValueError(f"{num_rows} rows a sequence are beyond the frontier's {state.width}")
    if num_rows == 0:
        return
    if not uses_triton(token_ids):
        expand_tree_reference(state, token_ids, probs, table, min_path_prob=min_path_prob)
        return
    _, num_kinds, num_depth_classes, num_bins = table.shifts.shape
    launch(
        _expand_tree_kernel,
        (num_sequences,),
        state.candidates,
        state.numbers,
        state.frontier,
        token_ids.contiguous(),
        probs.contiguous(),
        table.shifts,
        table.bin_edges,
        table.depth_edges,
        float(table.least),
        float(table.most),
        float(min_path_prob),
        num_warps=num_warps_for(state.capacity),
        num_stages=1,
        MODEL_BIT=table.model_bit,
        NUM_KINDS=num_kinds,
        NUM_DEPTH_CLASSES=num_depth_classes,
        NUM_BINS=num_bins,
        BRANCHING=token_ids.shape[1],
        NUM_ROWS=num_rows,
        WIDTH=state.width,
        CAPACITY=state.capacity,
        GROUP=_GROUP,
    )
