"""Reads a sequence's tree of guesses, however it grew."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torch import Tensor

from outrider.draft.budget.calibration import RequestCalibration
from outrider.draft.trees.tree_candidate import TreeCandidate
from outrider.verifier.token_tree import RECALLED_BIT, TokenTree


class JudgedGuess(NamedTuple):
    """A guess whose parent was accepted, and whether it was right."""

    confidence: float
    evidence: int
    depth: int
    was_right: bool


class GuessTree:
    """Candidates below a root. Candidate 0 is the root."""

    __slots__ = ()

    root_token_id: int
    root_slot: int
    """The root's logical slot and position."""
    max_nodes: int
    max_depth: int
    """Bounds what the drafting model adds."""
    keeps_logits: bool
    """True if `kept_logits` is filled."""
    model_bit: int
    """The source that the drafting model is."""
    is_stepwise: bool
    """The model can only compute a node whose parent is computed. A head is so: its rows carry what
    the parent's gave."""
    candidates: list[TreeCandidate]
    frontier: list[int]
    num_slots: int
    """Draft slots in use, the root's included."""
    num_passes: int
    """Passes of the drafting model that computed the slots: at most `max_depth`."""
    kept_logits: dict[int, Tensor]
    """The logits of computed candidates."""

    @property
    def num_candidates(self) -> int:
        """Candidates, the root included."""
        return len(self.candidates)

    def path(self, node: int) -> list[int]:
        """The tokens from below the root down to a node; [] for the root."""
        tokens, candidates = [], self.candidates
        while node > 0:
            tokens.append(candidates[node].token_id)
            node = candidates[node].parent
        return tokens[::-1]

    def frontier_depths(self) -> list[int]:
        """The depth of each frontier node, which decides the token behind it."""
        candidates = self.candidates
        return [candidates[node].depth for node in self.frontier]

    def frontier_parents(self) -> list[int]:
        """The candidate above each frontier node."""
        candidates = self.candidates
        return [candidates[node].parent for node in self.frontier]

    def frontier_paths(self) -> list[list[int]]:
        """The tokens from below the root down to each frontier node."""
        return [self.path(node) for node in self.frontier]

    def depth_and_chance(self, node: int) -> tuple[int, float]:
        """Return a candidate's depth and path probability."""
        candidate = self.candidates[node]
        return candidate.depth, candidate.path_prob

    def keep_logits(self, logits: Tensor) -> None:
        """Keep the frontier's logits, [len(frontier), vocab_size]."""
        # The tensor may be the runner's own, which its next pass fills anew.
        for node, row in zip(self.frontier, logits.clone(), strict=True):
            self.kept_logits[node] = row

    # ---- what it has come to ---------------------------------------------------------------

    def ranked(self) -> list[tuple[float, int]]:
        """(path probability, node) of the likeliest guesses, parents before children."""
        raise NotImplementedError

    def verifiable(self) -> list[tuple[float, int]]:
        """The part of `ranked` that may be accepted.

        A cascade accepts nothing behind a node that the small model has not computed.
        """
        ranked = self.ranked()
        if not self.keeps_logits:
            return ranked
        known, candidates = self.kept_logits, self.candidates
        return [(prob, node) for prob, node in ranked if candidates[node].parent in known]

    def to_token_tree(self, nodes: list[int]) -> TokenTree:
        """The tree of the root and `nodes` (parents first)."""
        candidates, index_of = self.candidates, {0: 0}
        tokens, parents, sources = [self.root_token_id], [-1], [0]
        for node in nodes:
            candidate = candidates[node]
            index_of[node] = len(tokens)
            tokens.append(candidate.token_id)
            parents.append(index_of[candidate.parent])
            sources.append(candidate.sources | (RECALLED_BIT if candidate.is_recalled else 0))
        return TokenTree(
            token_ids=tokens,
            parent_index=parents,
            sources=sources,
            draft_logits=self.logits_of(index_of),
        )

    def logits_of(self, nodes: Iterable[int]) -> list[Tensor | None]:
        """Return the kept logits of these candidates; none at all where none are kept."""
        return [self.kept_logits.get(node) for node in nodes] if self.keeps_logits else []

    # ---- what was right of it --------------------------------------------------------------

    def follow(self, token_ids: list[int]) -> list[int]:
        """The candidates that spell these tokens from the root on, as far as there are any."""
        nodes: list[int] = []
        node, candidates = 0, self.candidates
        for token_id in token_ids:
            child = candidates[node].children.get(token_id)
            if child is None:
                break
            nodes.append(child)
            node = child
        return nodes

    def offsets(self, token_ids: list[int]) -> list[int]:
        """Return how far the guesses that say these tokens lie behind the root's slot.

        -1 for what was not computed, and for what no guess says.
        """
        candidates = self.candidates
        found = [candidates[node].offset for node in self.follow(token_ids)]
        known = [-1 if offset is None else offset for offset in found]
        return known + [-1] * (len(token_ids) - len(known))

    def first_guess(self) -> int | None:
        """The token that the model thought likeliest behind the root; None: it named none."""
        candidates = self.candidates
        children = [candidates[child] for child in candidates[0].children.values()]
        named = [child for child in children if child.sources & self.model_bit]
        best = max(named, key=lambda guess: guess.model_confidence, default=None)
        return None if best is None else best.token_id

    def teach(self, calibration: RequestCalibration, token_ids: list[int]) -> None:
        """Let a calibration learn from every guess whose parent these tokens reach."""
        for guess in self.judged(token_ids):
            calibration.of.observe(
                guess.confidence,
                guess.was_right,
                sources=guess.evidence,
                depth=guess.depth,
                is_greedy=calibration.is_greedy,
            )

    def judged(self, token_ids: list[int]) -> Iterator[JudgedGuess]:
        """Every guess whose parent these tokens reach, and whether it was right."""
        candidates = self.candidates
        for parent, token_id in zip([0, *self.follow(token_ids)], token_ids, strict=False):
            for child_token, child in candidates[parent].children.items():
                guess = candidates[child]
                yield JudgedGuess(
                    confidence=guess.confidence,
                    evidence=guess.evidence,
                    depth=guess.depth,
                    was_right=child_token == token_id,
                )
