"""The one acceptance rule's walk: follow the child that equals the token chosen at its parent."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeVerdicts:
    """What became of every tree of a step, on the device of its inputs.

    is_accepted: bool [num_nodes], roots included. last_node: int64 [num_trees], the deepest
    accepted node, as an index into the flat nodes. num_accepted_tokens: int64 [num_trees], roots
    not counted. next_token: int64 [num_trees], the token chosen at the last node.
    """

    is_accepted: Tensor
    last_node: Tensor
    num_accepted_tokens: Tensor
    next_token: Tensor


def verify_tree(
    chosen: Tensor,
    token_ids: Tensor,
    parent_index: Tensor,
    depth: Tensor,
    tree_index: Tensor,
    *,
    num_trees: int,
    max_depth: int,
) -> TreeVerdicts:
    """Walk all trees at once, without a host synchronisation.

    chosen: [num_nodes], argmax(log target + noise) at each node. token_ids: [num_nodes].
    parent_index: [num_nodes] into the flat nodes, -1 for roots; parents stand before children and
    the children of one parent differ in their tokens. depth, tree_index: [num_nodes]. All int64.
    """
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
    return TreeVerdicts(
        is_accepted=is_accepted,
        last_node=last_node,
        num_accepted_tokens=num_accepted,
        next_token=chosen[last_node],
    )
