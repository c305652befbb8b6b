"""Guesses that cost no pass: what grammars force, clients predict, and text repeats."""

from collections.abc import Sequence as SequenceOf
from typing import Final

from outrider.draft.config import DraftConfig
from outrider.draft.draft_state import Draft
from outrider.draft.text.text_sources import TextSources
from outrider.engine.sequences.sequence import Sequence
from outrider.verifier.own_failure import OwnFailure
from outrider.verifier.token_tree import SOURCE_BIT

# The chance that a grammar's only token is the right one: the text may end before it.
_FORCED: Final = 1.0
# A guess that the text hardly gets to is not worth a look at the grammar behind it.
_WORTH_FORCING: Final = 0.1
# Seconds of a look for text that surely repeats, and the share of a step that looks may take.
_LOOK_S: Final = 1e-5
_MOST_LOOKING: Final = 0.005


class TextGuesses:
    """Adds to trees what needs no model."""

    def __init__(self, text: TextSources, config: DraftConfig) -> None:
        self._text = text
        self._config = config

    def is_sure(self, sequences: SequenceOf[Sequence], step_s: float) -> bool:
        """True if it is hardly chance how one of the texts goes on.

        Text comes in bursts: what is tried of it now and then says little of what repeats now.
        False where looking would take too much of a step, which takes `step_s`.
        """
        if len(sequences) * _LOOK_S > _MOST_LOOKING * step_s:
            return False
        asked = [
            (sequence, self._config.sources_of(own))
            for sequence in sequences
            if (own := sequence.request.speculation).may_guess
        ]
        return self._text.is_any_sure(asked)

    def add_all(self, drafts: SequenceOf[Draft]) -> None:
        """Add the guesses that cost no pass; where they cannot be made, the request fails alone."""
        looks = [
            (draft.sequence, draft.max_text_depth)
            for draft in drafts
            if draft.max_text_depth > 0 and "suffix" in draft.sources
        ]
        repeating = self._text.look(looks) if looks else ()
        for draft in drafts:
            sequence = draft.sequence
            expects = sequence.proposal_token_ids or sequence.request.prediction_token_ids
            if sequence.grammar is not None or expects or sequence.request_id in repeating:
                self.add(draft)

    def add(self, draft: Draft) -> None:
        """Add the guesses that cost no pass; where they cannot be made, the request fails alone."""
        with OwnFailure(draft.sequence):
            self._add(draft)

    def _add(self, draft: Draft) -> None:
        """Add what a grammar forces, what the client predicted and what the text repeats."""
        limit = draft.max_text_depth
        if limit <= 0:
            return
        grammar = draft.sequence.grammar
        if grammar is not None:
            self.force(draft, [0])
        if draft.sequence.proposal_rivals and "model" in draft.sources:
            self._retrace(draft)
        guesses = self._text.guess(draft.sequence, draft.sources, limit)
        floor = self._config.min_path_prob
        for source, chains in guesses.items():
            for chain in chains:
                tokens, confidences = chain.token_ids, chain.edge_probs
                if grammar is not None:
                    num_valid = grammar.num_valid(draft.sequence.token_ids, [], tokens)
                    tokens, confidences = tokens[:num_valid], confidences[:num_valid]
                draft.tree.add_chain(
                    SOURCE_BIT[source],
                    tokens,
                    confidences,
                    min_path_prob=floor,
                    is_recalled=chain.is_recalled,
                )

    def _retrace(self, draft: Draft) -> None:
        """Add what the small model wrote before the answer changed its tier, and its rivals."""
        sequence = draft.sequence
        place = self._text.num_retraced(sequence)
        if place is not None:
            draft.tree.add_answer(
                sequence.proposal_token_ids[place:],
                sequence.proposal_rivals[place : place + draft.max_answer_depth],
                min_path_prob=self._config.min_path_prob,
            )

    def force(self, draft: Draft, nodes: SequenceOf[int]) -> None:
        """Add, behind these nodes, the tokens that the grammar leaves no choice about."""
        grammar, tree = draft.sequence.grammar, draft.tree
        if grammar is None or "grammar" not in draft.sources:
            return
        for node in nodes if draft.sequence.failure is None else ():
            depth, path_prob = tree.depth_and_chance(node)
            limit = draft.max_text_depth - depth
            if limit > 0 and path_prob >= _WORTH_FORCING:
                with OwnFailure(draft.sequence):
                    forced = grammar.forced_tokens(draft.sequence.token_ids, tree.path(node), limit)
                    tree.add_chain(SOURCE_BIT["grammar"], forced, [_FORCED] * len(forced), node)
