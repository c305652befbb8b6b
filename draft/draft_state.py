"""A drafter's state of one sequence: between steps, and within one."""

from dataclasses import dataclass, field

from outrider.draft.budget.budget import FIRST_ACCEPTANCE, AcceptanceEstimate, DraftGain
from outrider.draft.config import DraftLimits
from outrider.draft.forecast import TreeForecast
from outrider.draft.text.token_map import TokenMap
from outrider.draft.trees.tree_batch import DraftTree
from outrider.engine.cache.kv_view import KVView
from outrider.engine.passes.runner import ForwardSlice, ModelRunner
from outrider.engine.protocols import DraftModel
from outrider.engine.sequences.sequence import Sequence
from outrider.verifier.params import Source
from outrider.verifier.verdict import Verdict

# How far a request's pace may count for or against its nodes.
_LEAST_URGENCY, _MOST_URGENCY = 0.5, 4.0


@dataclass(eq=False, slots=True, kw_only=True)
class DraftState:
    """A sequence's draft view and, from its proposal until its verdict, its tree."""

    sequence: Sequence
    limits: DraftLimits
    token_map: TokenMap | None = None
    view: KVView | None = None
    """None before the first draft pass and after its blocks were reclaimed."""
    tree: DraftTree | None = None
    acceptance: AcceptanceEstimate = field(default_factory=AcceptanceEstimate)
    """Share of the small model's best guesses that are right."""
    head_acceptance: AcceptanceEstimate = field(default_factory=AcceptanceEstimate)
    """Share of the head's best guesses that are right."""
    model: DraftModel = "small"
    """The one that drafts in this step."""
    forecast: TreeForecast | None = None
    partial_tokens: int = 0
    """The end of a catch-up chunk in flight that does not reach the root, else 0."""
    was_asked: bool = False
    """True once `model` has made guesses in this step."""
    old_token_ids: list[int] | None = None
    """What an adopted view holds while it has not been compared with the text since then. None when
    it holds the text."""
    _draft_ids: list[int] = field(default_factory=list)

    def acceptance_of(self, model: DraftModel) -> AcceptanceEstimate:
        """Return how often a model's best guess is right."""
        return self.head_acceptance if model == "head" else self.acceptance

    @property
    def num_missing_tokens(self) -> int:
        """Tokens that the small model has to take in before it can draft, the last one included."""
        return len(self.sequence.token_ids) - self._num_known_tokens

    @property
    def _num_known_tokens(self) -> int:
        """Tokens of the text that the view holds; the last is not counted, for it is wanted."""
        if self.view is None:
            return 0
        num_computed = self.view.num_computed_tokens
        if self.old_token_ids is None:
            return num_computed
        tokens = self.draft_ids()
        limit = min(num_computed, len(tokens) - 1)
        return _num_common(self.old_token_ids, tokens, limit)

    def adopt(self, view: KVView) -> None:
        """Take over the view of a small answer, which holds the sequence's present tokens."""
        self.release()
        if not view.block_table:  # its blocks were taken away
            return
        self.view = view
        self.old_token_ids = self.sequence.token_ids[: view.num_computed_tokens]

    def open(self, runner: ModelRunner) -> KVView:
        """Return the view; a new one holds what the prefix cache knows."""
        if self.view is None:
            self.view = runner.new_view(self.sequence.request.cache_salt)
            self.view.match_prefix(self.draft_ids())
        return self.view

    def rewind(self) -> None:
        """Forget in an adopted view what the text does not say."""
        if self.view is not None and self.old_token_ids is not None:
            self.view.rewind(self._num_known_tokens)
        self.old_token_ids = None

    def draft_ids(self) -> list[int]:
        """The sequence's tokens as the small model knows them."""
        tokens = self.sequence.token_ids
        if self.token_map is None:
            return tokens
        if len(self._draft_ids) > len(tokens):  # the answer began anew
            self._draft_ids.clear()
        for token in tokens[len(self._draft_ids) :]:
            self._draft_ids.append(self.token_map.to_draft[token])
        return self._draft_ids

    def can_be_read(self, vocab_size: int) -> bool:
        """True if the small model knows every token that it has to catch up with.

        Models of a family share a tokenizer, but pad their vocabularies differently.
        """
        return max(self.draft_ids()[self._num_known_tokens :]) < vocab_size

    def catch_up_slice(self, num_tokens: int) -> ForwardSlice:
        """Rows for the next tokens that the small model lacks; their slots must be reserved.

        Only if they reach the root, which is the last of them, logits are wanted.
        """
        assert self.view is not None
        tokens = self.draft_ids()
        start = self.view.num_computed_tokens
        end = start + num_tokens
        is_complete = end == len(tokens)
        self.partial_tokens = 0 if is_complete else end
        return ForwardSlice(
            view=self.view,
            token_ids=tokens[start:end],
            start_slot=start,
            num_logit_rows=int(is_complete),
        )

    def caught_up(self) -> bool:
        """Note that a catch-up slice was computed; whether it reached the root."""
        assert self.view is not None
        if self.partial_tokens:
            self.view.advance(self.partial_tokens, self.draft_ids())
            return False
        num_tokens = len(self.sequence.token_ids)
        if self.view.num_computed_tokens < num_tokens:
            self.view.advance(num_tokens, self.draft_ids())
        return True

    def keep_accepted(self, verdict: Verdict, offsets: list[int]) -> tuple[list[int], list[int]]:
        """Keep the accepted path in the view; returns (source, destination) slots to move.

        `offsets`: how far each of the verdict's tokens lies behind the root, -1 where the small
        model did not compute it. Called before the emitted tokens join the sequence.
        """
        view = self.view
        root_slot = len(self.sequence.token_ids) - 1
        is_old = self.old_token_ids is not None
        if view is None or is_old or view.num_computed_tokens != root_slot + 1:
            return [], []  # the small model did not take part in this step
        sources, destinations = [], []
        num_valid = 1  # the root
        for offset in offsets[: verdict.num_accepted_tokens]:
            if offset < 0:
                break
            if offset != num_valid:
                sources.append(view.slot(root_slot + offset))
                destinations.append(view.slot(root_slot + num_valid))
            num_valid += 1
        # The text's last token stays to be computed: its logits will be wanted. What is valid is
        # published with the next catch-up, when the sequence has these tokens.
        view.num_computed_tokens = root_slot + min(num_valid, len(verdict.token_ids))
        view.trim()
        return sources, destinations

    def keep_computed(self, root_slot: int, offsets: list[int]) -> None:
        """Note that the keys of an accepted path were moved right behind its root's.

        `offsets`: where each of its guesses lay; from the first below 0 on nothing was computed.
        """
        view = self.view
        assert view is not None
        assert view.num_computed_tokens == root_slot + 1
        num_valid = next(
            (place for place, offset in enumerate(offsets) if offset < 0), len(offsets)
        )
        view.num_computed_tokens = root_slot + 1 + num_valid
        view.trim()

    def release(self) -> None:
        """Give the view back."""
        if self.view is not None:
            self.view.release()
            self.view = None
        self.old_token_ids = None


def _num_common(left: list[int], right: list[int], limit: int) -> int:
    """Count how many first tokens agree, of at most `limit`."""
    if left[:limit] == right[:limit]:
        return limit
    return next(place for place in range(limit) if left[place] != right[place])


@dataclass(eq=False, slots=True, kw_only=True)
class Draft:
    """A sequence's part in one step: its tree and the limits on it."""

    state: DraftState
    tree: DraftTree
    sources: frozenset[Source]
    urgency: float
    """The weight of one of its tokens."""
    max_text_depth: int
    """Levels that guesses other than the small model's may have."""
    max_answer_depth: int
    """Levels that guesses from an answer that it wrote before may have."""
    needs_root: bool
    """It is a cascade, which judges no position whose small distribution is unknown."""
    expected_tokens: float = 0.0
    """Tokens that its guesses should bring, as they were weighed last."""
    sequence: Sequence = field(init=False)
    """The sequence that the tree is for."""

    def __post_init__(self) -> None:
        """Take from the state what every part of a step asks for."""
        self.sequence = self.state.sequence

    @property
    def acceptance(self) -> AcceptanceEstimate:
        """Return how often the best guess is right, of the model that drafts in this step."""
        return self.state.acceptance_of(self.state.model)

    def gain(self, num_missing: int, *, is_probe: bool) -> DraftGain:
        """Return what asking the model may gain. A cascade accepts no text that it has not read.

        `num_missing`: tokens that it has to take in first. A probe has paid for that, and finds out
        whether guesses that were wrong still are.
        """
        acceptance = self.acceptance.value
        return DraftGain(
            acceptance=max(acceptance, FIRST_ACCEPTANCE) if is_probe else acceptance,
            catch_up_rows=1 if is_probe else num_missing,
            num_steps=self.sequence.num_remaining_tokens,
            text_tokens=0.0 if self.needs_root else self.expected_tokens,
            urgency=self.urgency,
        )

    @property
    def may_ask_model(self) -> bool:
        """True if the model that drafts in this step may add to the tree."""
        return self.may_ask(self.state.model)

    def may_ask(self, model: DraftModel) -> bool:
        """True if this model may add to the tree."""
        source: Source = "head" if model == "head" else "model"
        return source in self.sources and min(self.tree.max_nodes, self.tree.max_depth) > 0


def urgency_of(sequence: Sequence, now_s: float) -> float:
    """Weight of a token: greater for a request that is behind the pace it asked for."""
    wanted_s = sequence.request.speculation.inter_token_s
    if wanted_s is None or sequence.first_token_s is None:
        return 1.0
    pace_s = (now_s - sequence.first_token_s) / max(sequence.num_own_tokens, 1)
    return min(max(pace_s / wanted_s, _LEAST_URGENCY), _MOST_URGENCY)
