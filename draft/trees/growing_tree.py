"""One sequence's tree while it grows: guesses of all sources in one prefix tree, best-first.

This is the reference of the four implementations (`outrider.draft.trees` lists them), and what runs
where the compiled library was not built. `outrider.draft.trees.compiled_tree` does the same to the
last bit.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor

from outrider.draft.budget.budget import MOST_BELIEVED
from outrider.draft.budget.calibration import MODEL_SILENT, Calibrate, as_confident
from outrider.draft.trees.guess_tree import GuessTree
from outrider.draft.trees.tree_candidate import TreeCandidate
from outrider.engine.cache.kv_view import KVView
from outrider.engine.passes.runner import ForwardSlice
from outrider.engine.sequences.sequence import Rivals
from outrider.kernels.tree_bounds import MAX_TREE_NODES
from outrider.verifier.token_tree import SOURCE_BIT

# A text's chain may have to be computed before the model can go on behind it.
_ROWS_PER_TARGET = 4

_MODEL, _GRAMMAR = SOURCE_BIT["model"], SOURCE_BIT["grammar"]


def _agreed(first: float, second: float) -> float:
    """Return what two independent opinions of one event come to (the odds are multiplied)."""
    both, neither = first * second, (1.0 - first) * (1.0 - second)
    return both / (both + neither) if both + neither > 0.0 else 0.5


@dataclass(slots=True, kw_only=True)
class GrowingTree(GuessTree):
    """See `GuessTree`; `calibrate`: gives the chances of guesses."""

    root_token_id: int
    root_slot: int
    max_nodes: int
    max_depth: int
    calibrate: Calibrate = as_confident
    keeps_logits: bool = False
    model_bit: int = _MODEL
    is_stepwise: bool = False
    candidates: list[TreeCandidate] = field(default_factory=list)
    frontier: list[int] = field(default_factory=list)
    num_slots: int = 1
    num_passes: int = 1
    kept_logits: dict[int, Tensor] = field(default_factory=dict)
    _ancestors: list[int] = field(default_factory=list)
    _ranking: list[tuple[float, int]] | None = None

    def __post_init__(self) -> None:
        """Begin with the root, which is expanded first."""
        root = TreeCandidate(token_id=self.root_token_id, parent=-1, depth=0, offset=0, mask=1)
        self.candidates.append(root)
        self.frontier.append(0)

    # ---- guesses come in -------------------------------------------------------------------

    def add_chain(
        self,
        source_bit: int,
        token_ids: Iterable[int],
        confidences: Iterable[float],
        node: int = 0,
        *,
        min_path_prob: float = 0.0,
        is_recalled: bool = False,
    ) -> None:
        """Merge a chain of guesses below a node, as far as its path is at least so likely."""
        self._ranking = None
        for token_id, confidence in zip(token_ids, confidences, strict=True):
            child = self._add_child(node, token_id, confidence, source_bit)
            self.candidates[node].is_forced |= source_bit == _GRAMMAR
            self._share_out(node, then=child)
            found = self.candidates[child]
            found.is_recalled |= is_recalled
            node = child
            if found.path_prob < min_path_prob:
                break
        self._multiply_down(node)

    def add_answer(
        self, token_ids: Iterable[int], places: Iterable[Rivals], *, min_path_prob: float
    ) -> None:
        """Merge what the small model wrote here before, and what else it had in mind there.

        `places`: for each token, the candidates that it was among, with the chances that the small
        model gave them: they are its guesses, only that no pass has to make them again.
        """
        self._ranking = None
        node = 0
        for token_id, named in zip(token_ids, places, strict=False):
            parent = self.candidates[node]
            parent.is_expanded = True
            for rival, confidence in named:
                if rival == token_id or parent.path_prob * confidence >= min_path_prob:
                    self._add_child(node, rival, confidence, _MODEL)
            node = parent.children[token_id]
            self._share_out(self.candidates[node].parent, then=node)
            self.candidates[node].is_recalled = True
            if self.candidates[node].path_prob < min_path_prob:
                break
        self._multiply_down(node)

    def grow(self, children: list[list[tuple[int, float]]]) -> list[int]:
        """Add the drafting model's children of the frontier: per node (token id, confidence).

        Returns the candidates that were not there before.
        """
        self._ranking = None
        first_new = len(self.candidates)
        for node, found in zip(self.frontier, children, strict=True):
            self.candidates[node].is_expanded = True
            for token_id, confidence in found:
                self._add_child(node, token_id, confidence, self.model_bit)
            self._share_out(node)
        self.frontier = []
        return list(range(first_new, len(self.candidates)))

    def _add_child(self, node: int, token_id: int, confidence: float, source_bit: int) -> int:
        parent = self.candidates[node]
        child = parent.children.get(token_id)
        if child is None:
            child = parent.children[token_id] = len(self.candidates)
            self.candidates.append(
                TreeCandidate(token_id=token_id, parent=node, depth=parent.depth + 1)
            )
        found = self.candidates[child]
        found.sources |= source_bit
        if source_bit == self.model_bit:
            found.model_confidence = confidence
        else:
            found.text_confidence = max(found.text_confidence, confidence)
        return child

    def _share_out(self, node: int, *, then: int | None = None) -> None:
        """Work out the children's probabilities: calibrated, and together at most 1.

        What lies below them follows, but for the child `then`, whose own turn is next.
        """
        candidates, calibrate = self.candidates, self.calibrate
        parent = candidates[node]
        path_prob, is_expanded = parent.path_prob, parent.is_expanded
        children = [candidates[child] for child in parent.children.values()]
        total = 0.0
        named: float | None = None
        for child in children:
            evidence, text = child.sources, child.text_confidence
            confidence = text or child.model_confidence
            if is_expanded and text:
                of_model = child.model_confidence
                if not of_model:
                    if named is None:  # not `sum`, which from Python 3.12 on rounds in its own way
                        named = 0.0
                        for each in children:
                            named += each.model_confidence
                    of_model = max(1.0 - named, 0.0)
                    evidence |= MODEL_SILENT
                confidence = _agreed(text, of_model)
            child.evidence, child.confidence = evidence, confidence
            child.edge_prob = edge_prob = calibrate(confidence, evidence, child.depth)
            total += edge_prob
        parent.covered = min(total, 1.0)
        for child in children:
            if total > 1.0:
                child.edge_prob /= total
            child.path_prob = path_prob * child.edge_prob
        for index, child in zip(parent.children.values(), children, strict=True):
            if child.children and index != then:
                self._multiply_down(index)

    def _multiply_down(self, node: int) -> None:
        """Work out the path probabilities below a node."""
        pending = [node]
        while pending:
            parent = self.candidates[pending.pop()]
            for index in parent.children.values():
                child = self.candidates[index]
                child.path_prob = parent.path_prob * child.edge_prob
                if child.children:
                    pending.append(index)

    # ---- the next level --------------------------------------------------------------------

    def choose_frontier(self, *, max_frontier: int, min_path_prob: float) -> float | None:
        """Pick the nodes at which the drafting model could add most.

        That is the chance that the text gets there and that it then goes on in none of the ways
        already guessed. Returns the sum of these chances; None, and the frontier stays empty,
        where nothing is worth a pass.
        """
        if self.num_passes >= self.max_depth:
            return None
        limit = min(max_frontier * _ROWS_PER_TARGET, MAX_TREE_NODES - self.num_slots)
        gains: list[float] = []
        for negative, node in self._worthy(min_path_prob)[:max_frontier]:
            missing = self._missing(node)
            if len(self.frontier) + len(self._ancestors) + len(missing) <= limit:
                if node in self._ancestors:  # of an earlier one; now its logits are wanted too
                    self._ancestors.remove(node)
                self._ancestors.extend(missing[:-1])
                self.frontier.append(node)
                gains.append(-negative)
        if self.keeps_logits:  # every computed node's are wanted
            self.frontier = self._ancestors + self.frontier
            self._ancestors = []
            # A cascade emits a token behind every accepted node that the small model has computed.
            gains = [self.candidates[node].path_prob for node in self.frontier]
        total = 0.0
        for gain in gains:
            total += gain
        return total if gains else None

    def _worthy(self, min_path_prob: float) -> list[tuple[float, int]]:
        """Return (gain, negative, and node) of what is worth a row of a pass, the best first."""
        # A child ranks behind its parent, so the last node that still fits cannot have one.
        worthy = []
        candidates = self.candidates
        for path_prob, node in self.ranked()[: self.max_nodes - 1]:
            if path_prob < min_path_prob:
                break
            candidate = candidates[node]
            if candidate.is_expanded or not self._is_open(candidate):  # most are expanded
                continue
            # What only text says is worth a look of the model, however sure it seems.
            covered = candidate.covered
            gain = path_prob * (1.0 - (covered if covered < MOST_BELIEVED else MOST_BELIEVED))
            if gain >= min_path_prob and gain > 0.0:
                worthy.append((-gain, node))
        worthy.sort()
        return worthy

    def choose_open(self, *, most: int, min_path_prob: float) -> bool:
        """Pick the likeliest nodes whose children are not named yet; False where there are none."""
        self.frontier = [
            node
            for path_prob, node in self.ranked()[: self.max_nodes - 1]
            if path_prob >= min_path_prob and self._is_open(self.candidates[node])
        ][:most]
        return bool(self.frontier)

    def _is_open(self, candidate: TreeCandidate) -> bool:
        """True if the drafting model may name a candidate's children."""
        if candidate.is_expanded or candidate.is_forced or candidate.depth >= self.max_depth:
            return False
        return not self.is_stepwise or self.candidates[candidate.parent].offset is not None

    def _missing(self, node: int) -> list[int]:
        """Return those of the node and its ancestors that no pass computes yet, root first."""
        candidates = self.candidates
        missing = [node]
        parent = candidates[node].parent
        while candidates[parent].offset is None:
            if parent in self.frontier or parent in self._ancestors:
                break
            missing.append(parent)
            parent = candidates[parent].parent
        return missing[::-1]

    @property
    def num_frontier_rows(self) -> int:
        """Rows that the frontier's slice will have, its missing ancestors included."""
        return len(self._ancestors) + len(self.frontier)

    def frontier_slice(self, view: KVView) -> ForwardSlice:
        """Rows that compute the frontier in the small model; its slots must be reserved."""
        rows = self._ancestors + self.frontier
        self._ancestors = []
        first = self.num_slots
        for offset, node in enumerate(rows, start=first):
            self.candidates[node].offset = offset
        if len(rows) > 1:  # parents first: their masks are needed
            rows_by_depth = sorted(rows, key=lambda node: self.candidates[node].depth)
        else:
            rows_by_depth = rows
        for node in rows_by_depth:
            candidate = self.candidates[node]
            assert candidate.offset is not None
            candidate.mask = self.candidates[candidate.parent].mask | 1 << candidate.offset
        self.num_slots += len(rows)
        self.num_passes += 1
        chosen = [self.candidates[node] for node in rows]
        return ForwardSlice(
            view=view,
            token_ids=[candidate.token_id for candidate in chosen],
            start_slot=self.root_slot + first,
            num_logit_rows=len(self.frontier),
            positions=[self.root_slot + candidate.depth for candidate in chosen],
            tree_start=self.root_slot,
            ancestor_masks=[candidate.mask for candidate in chosen],
        )

    def stop(self) -> None:
        """Grow no further; what was found so far stays."""
        self.frontier, self._ancestors = [], []
        self.max_depth = 0

    # ---- what it has come to ---------------------------------------------------------------

    def ranked(self) -> list[tuple[float, int]]:
        """(path probability, node) of the likeliest guesses, parents before children."""
        if self._ranking is None:
            # An index alone would rank a merged chain's child before a later parent as likely.
            order = [
                (-candidate.path_prob, candidate.depth, node)
                for node, candidate in enumerate(self.candidates)
            ]
            order = sorted(order[1:])[: self.max_nodes]
            self._ranking = [(-negative, node) for negative, _, node in order]
        return self._ranking
