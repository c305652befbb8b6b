"""One sequence's tree while it grows: best-first, a level per pass of the small model."""

from dataclasses import dataclass, field

from engine.kv_view import KVView
from engine.runner import ForwardSlice
from engine.token_tree import TokenTree

# Bits of the attention kernels' ancestor masks.
MAX_TREE_SLOTS = 256


@dataclass(slots=True, kw_only=True)
class _Candidate:
    """A guess: `path_prob` is the probability that its whole path is accepted.

    `offset` and `mask`: its place behind the root's slot in the draft view and the slots it sees
    (bit 0 is the root); None and 0 until the small model has computed it.
    """

    token_id: int
    parent: int
    depth: int
    path_prob: float
    offset: int | None = None
    mask: int = 0


@dataclass(slots=True, kw_only=True)
class GrowingTree:
    """Candidates below a root that stands at logical slot and position `root_slot`.

    Candidate 0 is the root. `num_slots` counts the draft slots in use, the root's included, and
    `num_passes` the small passes that computed them: at most `max_depth`.
    """

    root_token_id: int
    root_slot: int
    max_nodes: int
    max_depth: int
    candidates: list[_Candidate] = field(default_factory=list)
    frontier: list[int] = field(default_factory=list)
    num_slots: int = 1
    num_passes: int = 1

    def __post_init__(self) -> None:
        """Plant the root; it is the first to be expanded."""
        root = _Candidate(
            token_id=self.root_token_id, parent=-1, depth=0, path_prob=1.0, offset=0, mask=1
        )
        self.candidates.append(root)
        self.frontier.append(0)

    def frontier_depths(self) -> list[int]:
        """The depth of each frontier node, which decides the token behind it."""
        return [self.candidates[node].depth for node in self.frontier]

    def frontier_paths(self) -> list[list[int]]:
        """The tokens from below the root down to each frontier node."""
        return [self.path(node) for node in self.frontier]

    def path(self, node: int) -> list[int]:
        """The tokens from below the root down to a node; [] for the root."""
        tokens = []
        while node > 0:
            tokens.append(self.candidates[node].token_id)
            node = self.candidates[node].parent
        return tokens[::-1]

    def grow(self, children: list[list[tuple[int, float]]]) -> None:
        """Add the children of the frontier: per frontier node (token id, edge probability)."""
        for node, found in zip(self.frontier, children, strict=True):
            parent = self.candidates[node]
            for token_id, edge_prob in found:
                self.candidates.append(
                    _Candidate(
                        token_id=token_id,
                        parent=node,
                        depth=parent.depth + 1,
                        path_prob=parent.path_prob * edge_prob,
                    )
                )
        self.frontier = []

    def choose_frontier(self, *, max_frontier: int, min_path_prob: float) -> list[float]:
        """Pick the likeliest unexpanded nodes that could still have children in the tree.

        Returns their path probabilities; the frontier stays empty where nothing is worth a pass.
        """
        if self.num_passes >= self.max_depth:
            return []
        # A child ranks behind its parent, so the last node that still fits cannot have one.
        worthy = [
            node
            for path_prob, node in self.ranked()[: self.max_nodes - 1]
            if self.candidates[node].offset is None
            and self.candidates[node].depth < self.max_depth
            and path_prob >= min_path_prob
        ]
        self.frontier = worthy[: min(max_frontier, MAX_TREE_SLOTS - self.num_slots)]
        return [self.candidates[node].path_prob for node in self.frontier]

    def frontier_slice(self, view: KVView) -> ForwardSlice:
        """Rows that compute the frontier in the small model; its slots must be reserved."""
        first = self.num_slots
        for offset, node in enumerate(self.frontier, start=first):
            candidate = self.candidates[node]
            candidate.offset = offset
            candidate.mask = self.candidates[candidate.parent].mask | 1 << offset
        self.num_slots += len(self.frontier)
        self.num_passes += 1
        chosen = [self.candidates[node] for node in self.frontier]
        return ForwardSlice(
            view=view,
            token_ids=[candidate.token_id for candidate in chosen],
            start_slot=self.root_slot + first,
            num_logit_rows=len(chosen),
            positions=[self.root_slot + candidate.depth for candidate in chosen],
            tree_start=self.root_slot,
            ancestor_masks=[candidate.mask for candidate in chosen],
        )

    def ranked(self) -> list[tuple[float, int]]:
        """(path probability, node) of all guesses, likeliest first, parents before children."""
        order = [(-candidate.path_prob, node) for node, candidate in enumerate(self.candidates)]
        order = sorted(order[1:])[: self.max_nodes]
        return [(-negative, node) for negative, node in order]

    def harvest(self, nodes: list[int]) -> tuple[TokenTree, list[int | None]]:
        """The tree of the root and `nodes` (parents first), and each node's draft offset."""
        place = {0: 0}
        tokens, parents, offsets = [self.root_token_id], [-1], [self.candidates[0].offset]
        for node in nodes:
            candidate = self.candidates[node]
            place[node] = len(tokens)
            tokens.append(candidate.token_id)
            parents.append(place[candidate.parent])
            offsets.append(candidate.offset)
        return TokenTree(token_ids=tokens, parent_index=parents), offsets
