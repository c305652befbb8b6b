"""Every kernel of growing trees, launched once: each capacity is compiled apart.

Which capacities a load needs follows from what its texts repeat. So no sample of requests would
meet all of them. The first request that does would hold up every stream for a second.
"""

import torch

from outrider.draft.budget.budget import MOST_BELIEVED
from outrider.draft.budget.calibration import EdgeCalibration
from outrider.draft.config import DraftConfig
from outrider.draft.device.device_trees import MAX_BRANCHING, DeviceCalibration
from outrider.draft.trees.tree_candidate import TreeCandidate
from outrider.kernels.trees.choose_frontier import choose_frontier
from outrider.kernels.trees.expand_tree import expand_tree
from outrider.kernels.trees.initial_trees import InitialTree, init_trees
from outrider.kernels.trees.select_trees import select_trees
from outrider.kernels.trees.tree_state import MAX_CAPACITY, MIN_CAPACITY
from outrider.verifier.token_tree import RECALLED_BIT


def warm_up_trees(config: DraftConfig, device: torch.device) -> None:
    """Grow a tree of a root by a level at each capacity; nothing is kept."""
    table = DeviceCalibration(EdgeCalibration(), device).table()
    width, branching = config.max_frontier, min(config.max_branching, MAX_BRANCHING)
    root = InitialTree(
        candidates=[TreeCandidate(token_id=0, parent=-1, depth=0)],
        root_slot=0,
        max_nodes=width,
        max_depth=2,
    )
    floor = config.min_path_prob
    capacity = MIN_CAPACITY
    while capacity <= MAX_CAPACITY:
        state = init_trees(
            [root], capacity=capacity, width=width, recalled_bit=RECALLED_BIT, device=device
        )
        for num_rows in (1, width):
            token_ids = torch.arange(branching, device=device).repeat(num_rows, 1)
            probs = torch.full((num_rows, branching), 1.0 / branching, device=device)
            expand_tree(state, token_ids, probs, table, min_path_prob=floor)
            choose_frontier(state, min_path_prob=floor, most_believed=MOST_BELIEVED)
        select_trees(state, num_nodes=width, caps=[width])
        capacity *= 2
