"""The one acceptance rule's walk: follow the child that equals the token chosen at its parent."""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from outrider.kernels.tree_bounds import MAX_TREE_NODES
from outrider.kernels.triton_support import jit, launch, tl, uses_triton

_SCANNED_NODES: Final = 256
# A walk is a chain of short steps: within a warp each costs a few shuffles and no barrier.
_NUM_WARPS: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Walk:
    """The end of each tree's walk."""

    is_accepted: Tensor
    """bool [num_nodes], roots included."""
    last_node: Tensor
    """int64 [num_trees], the deepest accepted node, as an index into the flat nodes."""
    num_accepted_tokens: Tensor
    """int64 [num_trees], roots not counted."""
    next_token: Tensor
    """int64 [num_trees], the token chosen at the last node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForestPaths(_Walk):
    """The verdicts on all trees of a step, on the device of its inputs.

    The host knows all sizes.
    """

    accepted_path: Tensor
    """int64 [num_trees, max_depth], the flat node accepted at depth d + 1; -1 beyond the last."""
    emitted_tokens: Tensor
    """int64 [num_trees, max_depth + 1], the accepted nodes' tokens and the next token; -1 beyond
    it."""


def _reference_walk(
    chosen: Tensor,
    token_ids: Tensor,
    parent_index: Tensor,
    depth: Tensor,
    tree_index: Tensor,
    *,
    num_trees: int,
    max_depth: int,
) -> _Walk:
    """Walk trees without padding."""
    is_root = parent_index < 0
    parents = parent_index.clamp(min=0)
    matches = (token_ids == chosen[parents]) | is_root
    is_accepted = matches
    for _ in range(max_depth):
        is_accepted = matches & (is_accepted[parents] | is_root)
    # Only one child of a parent can match, so the deepest accepted node of a tree is unique.
    accepted_depth = depth.where(is_accepted, -1)
    num_accepted = accepted_depth.new_zeros(num_trees).scatter_reduce_(
        0, tree_index, accepted_depth, "amax"
    )
    is_last = is_accepted & (depth == num_accepted[tree_index])
    flat_index = torch.arange(chosen.shape[0], device=chosen.device)
    last_node = num_accepted.new_zeros(num_trees).scatter_reduce_(
        0, tree_index, flat_index.where(is_last, 0), "amax"
    )
    return _Walk(
        is_accepted=is_accepted,
        last_node=last_node,
        num_accepted_tokens=num_accepted,
        next_token=chosen[last_node],
    )


def _reference_paths(
    chosen: Tensor,
    token_ids: Tensor,
    parent_index: Tensor,
    depth: Tensor,
    tree_index: Tensor,
    *,
    num_trees: int,
    max_depth: int,
) -> ForestPaths:
    """The specification of `verify_tree`: padding is a tree more, which is dropped."""
    trees = tree_index.where(tree_index >= 0, num_trees)
    flat = _reference_walk(
        chosen,
        token_ids,
        parent_index,
        depth,
        trees,
        num_trees=num_trees + 1,
        max_depth=max_depth,
    )
    is_accepted = flat.is_accepted & (tree_index >= 0)
    flat_index = torch.arange(chosen.shape[0], device=chosen.device)
    # [num_trees + 1, max_depth + 2]; the last column takes what lies on no path
    columns = (depth - 1).where(is_accepted & (depth > 0), max_depth + 1)
    path = chosen.new_full((num_trees + 1, max_depth + 2), -1)
    emitted = path.clone()
    path[trees, columns] = flat_index
    emitted[trees, columns] = token_ids
    is_there = torch.zeros_like(flat.last_node, dtype=torch.bool)
    is_there[trees] = True
    next_token = flat.next_token.where(is_there, -1)
    emitted.scatter_(1, flat.num_accepted_tokens[:, None], next_token[:, None])
    return ForestPaths(
        is_accepted=is_accepted,
        last_node=flat.last_node.where(is_there, -1)[:num_trees],
        num_accepted_tokens=flat.num_accepted_tokens[:num_trees],
        next_token=next_token[:num_trees],
        accepted_path=path[:num_trees, :max_depth].contiguous(),
        emitted_tokens=emitted[:num_trees, : max_depth + 1].contiguous(),
    )


@jit
def _verify_tree_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    is_accepted_ptr,
    last_node_ptr,
    num_accepted_ptr,
    next_token_ptr,
    path_ptr,
    emitted_ptr,
    chosen_ptr,
    token_ids_ptr,
    parent_ptr,
    tree_ptr,
    num_nodes,
    max_depth,
    SCANNED: tl.constexpr,
    NODES: tl.constexpr,
    DEPTHS: tl.constexpr,
):
    tree = tl.program_id(0)
    firsts = tl.full([SCANNED], 0x7FFFFFFF, tl.int32)
    counts = tl.zeros([SCANNED], tl.int32)
    start = 0
    while start < num_nodes:
        nodes = start + tl.arange(0, SCANNED)
        is_own = tl.load(tree_ptr + nodes, mask=nodes < num_nodes, other=-1) == tree
        firsts = tl.where(is_own, tl.minimum(firsts, nodes), firsts)
        counts += is_own.to(tl.int32)
        start += SCANNED
    first, num_own = tl.min(firsts, axis=0), tl.sum(counts, axis=0)

    node = tl.arange(0, NODES)  # within the tree; all of one tree's rows stand together
    is_node = node < num_own
    tokens = tl.load(token_ids_ptr + first + node, mask=is_node, other=-1)
    parents = tl.load(parent_ptr + first + node, mask=is_node, other=-1)
    is_child = is_node & (parents >= 0)
    is_right = is_child & (tl.load(chosen_ptr + parents, mask=is_child, other=-1) == tokens)
    own_parents = (parents - first).to(tl.int32)

    step = tl.arange(0, DEPTHS)
    path = tl.full([DEPTHS], -1, tl.int64)
    emitted = tl.full([DEPTHS], -1, tl.int64)
    is_accepted = tl.zeros([NODES], tl.int32)
    here = tl.where(num_own > 0, 0, -1).to(tl.int32)
    length = here  # a tree without nodes ends before its root
    while (here >= 0) & (length <= max_depth):
        is_here = node == here
        is_accepted = tl.where(is_here, 1, is_accepted)
        # The root, length 0, is on no path.
        token = tl.sum(tl.where(is_here, tokens, 0), axis=0)
        path = tl.where(step == length - 1, (first + here).to(tl.int64), path)
        emitted = tl.where(step == length - 1, token, emitted)
        here = tl.max(tl.where(is_right & (own_parents == here), node, -1), axis=0)
        length += 1

    # Parents stand before children. Not kept by the loop: Triton 3.6 takes a value that its body
    # assigns and never reads for one that does not change.
    last = tl.max(tl.where(is_accepted != 0, node, -1), axis=0)
    is_there = last >= 0
    last_node = tl.where(is_there, first + last, -1).to(tl.int64)
    next_token = tl.load(chosen_ptr + last_node, mask=is_there, other=-1)
    emitted = tl.where(step == length - 1, next_token, emitted)
    tl.store(is_accepted_ptr + first + node, is_accepted.to(tl.int8), mask=is_node)
    tl.store(last_node_ptr + tree, last_node)
    tl.store(num_accepted_ptr + tree, tl.maximum(length - 1, 0).to(tl.int64))
    tl.store(next_token_ptr + tree, next_token)
    tl.store(path_ptr + tree * max_depth + step, path, mask=step < max_depth)
    tl.store(emitted_ptr + tree * (max_depth + 1) + step, emitted, mask=step <= max_depth)


def _launch_walk(
    chosen: Tensor,
    token_ids: Tensor,
    parent_index: Tensor,
    tree_index: Tensor,
    *,
    num_trees: int,
    max_depth: int,
) -> ForestPaths:
    num_nodes = chosen.shape[0]
    is_accepted = torch.zeros(num_nodes, dtype=torch.int8, device=chosen.device)  # padding's, too
    last_node = chosen.new_empty(num_trees)
    num_accepted, next_token = torch.empty_like(last_node), torch.empty_like(last_node)
    path = chosen.new_empty(num_trees, max_depth)
    emitted = chosen.new_empty(num_trees, max_depth + 1)
    launch(
        _verify_tree_kernel,
        (num_trees,),
        is_accepted,
        last_node,
        num_accepted,
        next_token,
        path,
        emitted,
        chosen.contiguous(),
        token_ids.contiguous(),
        parent_index.contiguous(),
        tree_index.contiguous(),
        num_nodes,
        max_depth,
        num_warps=_NUM_WARPS,
        # The same for all trees: another shape would be compiled while streams wait.
        SCANNED=_SCANNED_NODES,
        NODES=MAX_TREE_NODES,
        DEPTHS=MAX_TREE_NODES,
    )
    return ForestPaths(
        is_accepted=is_accepted.view(torch.bool),
        last_node=last_node,
        num_accepted_tokens=num_accepted,
        next_token=next_token,
        accepted_path=path,
        emitted_tokens=emitted,
    )


def verify_tree(
    chosen: Tensor,
    token_ids: Tensor,
    parent_index: Tensor,
    depth: Tensor,
    tree_index: Tensor,
    *,
    num_trees: int,
    max_depth: int,
) -> ForestPaths:
    """Walk all trees at once, without a host synchronisation.

    chosen: [num_nodes], argmax(log target + noise) at each node. token_ids: [num_nodes].
    parent_index: [num_nodes] into the flat nodes, -1 for roots; parents stand before children and
    the children of one parent differ in their tokens. depth, tree_index: [num_nodes], a tree_index
    of -1 for padding. All int64. Each tree's nodes stand together, the root first; at most 256 of
    them, none deeper than `max_depth`. A tree may have no nodes: then it has no last node and no
    next token, both are -1.
    """
    if uses_triton(chosen):
        return _launch_walk(
            chosen, token_ids, parent_index, tree_index, num_trees=num_trees, max_depth=max_depth
        )
    return _reference_paths(
        chosen,
        token_ids,
        parent_index,
        depth,
        tree_index,
        num_trees=num_trees,
        max_depth=max_depth,
    )
