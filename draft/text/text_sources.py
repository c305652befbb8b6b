"""Guesses that need no model: text that repeats, and text that was predicted."""

from collections import Counter, OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from outrider.draft.text.prediction import PredictionCursor
from outrider.draft.text.suffix_index import (
    MAX_CHAIN_DEPTH,
    Continuation,
    Match,
    SuffixIndex,
    continuation,
    vote,
)
from outrider.draft.trees.guess import Guess
from outrider.engine.sequences.sequence import Sequence
from outrider.verifier.params import Source

__all__ = ["Guess", "TextSources"]

# Remembered with an answer, so that how it began is found again: mostly the template's own tokens
# and the end of the question.
_NUM_CONTEXT_TOKENS: Final = 8
# Matches shorter than the best one by this factor say nothing more, nor do more than so many.
_MIN_LENGTH_SHARE: Final = 0.25
_MAX_VOTERS: Final = 6

# Sources of predictions: the client, and the answer retracted at a change of tier.
_Expected = Literal["client", "retracted"]
# A request's cache_salt and memory_group: only requests that share both see each other's answers.
_Owner = tuple[str, str]


@dataclass(eq=False, slots=True)
class _SequenceState:
    """The state of a sequence's text."""

    proposal: list[int]
    """The sequence's own list, which is another one after every change of tier."""
    index: SuffixIndex | None = None
    best: tuple[SuffixIndex, Match] | None = None
    """The last best match and where it was found."""
    best_at: int = 0
    """The text's length then."""
    cursors: dict[_Expected, PredictionCursor] = field(default_factory=dict)
    num_followed: int = 0
    """Output tokens that the cursors have seen."""


class _TenantMemory:
    """A tenant's latest answers in two generations: when the young one is full, the old one goes.

    So forgetting is one assignment, and at least half of the capacity is always the latest text.
    """

    def __init__(self, max_tokens: int) -> None:
        self._generation_size = max_tokens // 2
        self._young = SuffixIndex()
        self._old: SuffixIndex | None = None

    @property
    def generations(self) -> list[SuffixIndex]:
        """The latest first."""
        return [self._young] if self._old is None else [self._young, self._old]

    @property
    def num_tokens(self) -> int:
        """Tokens held, with a break behind each answer."""
        return sum(len(generation.token_ids) for generation in self.generations)

    def add(self, token_ids: list[int]) -> None:
        """Remember an answer, or of one beyond a generation's size its end."""
        token_ids = token_ids[-max(self._generation_size - 1, 0) :]
        if self._generation_size < 2:
            return
        if len(self._young.token_ids) + len(token_ids) + 1 > self._generation_size:
            self._old, self._young = self._young, SuffixIndex()
        self._young.extend(token_ids)
        self._young.end_document()


class TextSources:
    """Guesses from text: one per engine. Not thread-safe.

    What is kept for a sequence is made when it is first asked for and grows with its text. Building
    it reads the whole prompt once.
    """

    def __init__(
        self,
        *,
        max_depth: int = 32,
        max_branches: int = 4,
        max_remembered_tokens: int = 65536,
        max_tenants: int = 64,
    ) -> None:
        """`max_branches` chains for repeated text, each `max_depth` tokens at most.

        `max_remembered_tokens`, per tenant and `memory_group`, of answers that have ended; 0
        remembers none. There are at most `max_tenants` such memories: of more, the one that was
        idle longest is forgotten, of a tenant that has the most.
        """
        for name, value, least, largest in (
            ("max_depth", max_depth, 0, MAX_CHAIN_DEPTH),
            ("max_branches", max_branches, 1, 64),
            ("max_remembered_tokens", max_remembered_tokens, 0, 2**31 - 1),
            ("max_tenants", max_tenants, 1, 2**31 - 1),
        ):
            if not least <= value <= largest:
                raise ValueError(f"{name}={value} must be in [{least}, {largest}]")
        self._max_depth = max_depth
        self._max_branches = max_branches
        self._max_remembered_tokens = max_remembered_tokens
        self._max_tenants = max_tenants
        self._states: dict[str, _SequenceState] = {}
        self._memories: OrderedDict[_Owner, _TenantMemory] = OrderedDict()  # the idlest first

    @property
    def num_remembered_tokens(self) -> int:
        """Tokens of ended answers that are held, over all tenants."""
        return sum(memory.num_tokens for memory in self._memories.values())

    def guess(
        self, sequence: Sequence, sources: Collection[Source], max_depth: int
    ) -> dict[Source, list[Guess]]:
        """Chains of at most `max_depth` tokens by source, likeliest first.

        suffix: what followed the text's end where it stood before, in the prompt, in this answer or
        in remembered answers of the same `cache_salt` and `memory_group`. prediction: how the
        request's prediction goes on, or where it has none, an earlier answer of the other tier;
        where it has one, that answer is text that repeats. A source without guesses is left out. So
        is the retracted answer while the small model's own chances for it are known
        (`num_retraced`).
        """
        depth = min(max_depth, self._max_depth)
        if depth < 1:
            return {}
        state = self._state(sequence)
        guesses: dict[Source, list[Guess]] = {}
        if "suffix" in sources and (chains := self._repeated(sequence, state, depth)):
            guesses["suffix"] = chains
        self._follow(sequence, state)
        for expected, cursor in state.cursors.items():
            if expected == "retracted" and "model" in sources and _is_retraced(sequence, cursor):
                continue
            # Beside a client's prediction, so that what is counted as predicted is the client's.
            is_second = expected == "retracted" and "client" in state.cursors
            source: Source = "suffix" if is_second else "prediction"
            chains = cursor.guesses(depth) if source in sources else []
            if expected == "retracted":
                chains = [replace(chain, is_recalled=True) for chain in chains]
            if chains:
                guesses.setdefault(source, []).extend(chains)
        return guesses

    def is_sure(self, sequence: Sequence, sources: Collection[Source]) -> bool:
        """True if it is hardly chance where the text goes on: eight tokens repeat, or a prediction.

        This takes a few microseconds, so it can be asked in steps that make no guesses.
        """
        state = self._state(sequence)
        if "suffix" in sources:
            own = self._read(sequence, state)
            if any(
                each.holds(own.end_keys) for each in (own, *self._generations(_owner(sequence)))
            ):
                return True
        if "prediction" not in sources:
            return False
        self._follow(sequence, state)
        return any(cursor.is_aligned for cursor in state.cursors.values())

    def num_retraced(self, sequence: Sequence) -> int | None:
        """Length of the answer while the retracted one (`proposal_token_ids`) says the same."""
        state = self._state(sequence)
        self._follow(sequence, state)
        cursor = state.cursors.get("retracted")
        return None if cursor is None else cursor.num_retraced

    def remember(self, sequence: Sequence) -> None:
        """A finished answer joins what its tenant may see again."""
        num_output = sequence.num_output_tokens
        if not num_output or not self._max_remembered_tokens:
            return
        owner = _owner(sequence)
        memory = self._memories.pop(owner, None) or _TenantMemory(self._max_remembered_tokens)
        self._memories[owner] = memory
        if len(self._memories) > self._max_tenants:
            self._forget_one()
        memory.add(sequence.token_ids[-(num_output + _NUM_CONTEXT_TOKENS) :])

    def _forget_one(self) -> None:
        """Forget the idlest memory of a tenant with the most: many groups cost no other tenant."""
        counts = Counter(salt for salt, _ in self._memories)
        most = max(counts.values())
        del self._memories[next(owner for owner in self._memories if counts[owner[0]] == most)]

    def release(self, sequence: Sequence) -> None:
        """Forget a sequence that ended, was pre-empted or changed its tier."""
        self._states.pop(sequence.request_id, None)

    def _state(self, sequence: Sequence) -> _SequenceState:
        """The sequence's state; a new one where its text does not continue the old one."""
        state = self._states.get(sequence.request_id)
        if state is None or _was_retracted(state, sequence):
            state = _SequenceState(sequence.proposal_token_ids)
            self._states[sequence.request_id] = state
        return state

    # ---- repeated text --------------------------------------------------------------------

    def _repeated(self, sequence: Sequence, state: _SequenceState, max_depth: int) -> list[Guess]:
        own, text = self._read(sequence, state), sequence.token_ids
        found: list[tuple[SuffixIndex, Match]] = []
        hinted, hint = self._hint(state, len(text))
        for index in (own, *self._generations(_owner(sequence))):
            place = hint if index is hinted else None
            found += [(index, match) for match in index.find(text, own.end_keys, place)]
        if not found:
            state.best = None
            return []
        found.sort(key=_length_of, reverse=True)  # stable: the latest stay first
        state.best, state.best_at = found[0], len(text)
        least = found[0][1].length * _MIN_LENGTH_SHARE
        continuations: list[Continuation] = [
            continuation(index, match, max_depth=max_depth, repeats=index is own)
            for index, match in found[:_MAX_VOTERS]
            if match.length >= least
        ]
        return vote(continuations, self._max_branches)

    @staticmethod
    def _read(sequence: Sequence, state: _SequenceState) -> SuffixIndex:
        """The index of the sequence's own text, with all of it."""
        if state.index is None:
            state.index = SuffixIndex()
        state.index.extend(sequence.token_ids[len(state.index.token_ids) :])
        return state.index

    def _hint(
        self, state: _SequenceState, num_tokens: int
    ) -> tuple[SuffixIndex | None, int | None]:
        """Return where the last best match stands now if the text went on as it did there.

        Among many places that share the last tokens, only the latest are looked at; the one that
        has been right all along need not be among them.
        """
        if state.best is None:
            return None, None
        index, match = state.best
        return index, match.position + num_tokens - state.best_at

    def _generations(self, owner: _Owner) -> list[SuffixIndex]:
        memory = self._memories.get(owner)
        if memory is None:
            return []
        self._memories.move_to_end(owner)
        return memory.generations

    # ---- predicted text -------------------------------------------------------------------

    def _follow(self, sequence: Sequence, state: _SequenceState) -> None:
        """Move along in what is expected."""
        if not state.cursors:
            predicted, retracted = sequence.request.prediction_token_ids, state.proposal
            if not (predicted or retracted):
                return
            if predicted:
                state.cursors["client"] = PredictionCursor(predicted)
            if retracted:
                state.cursors["retracted"] = PredictionCursor(retracted)
        num_output = sequence.num_output_tokens
        if num_output > state.num_followed:
            for cursor in state.cursors.values():
                cursor.advance(sequence.token_ids, num_output - state.num_followed)
            state.num_followed = num_output


def _owner(sequence: Sequence) -> _Owner:
    return sequence.request.cache_salt, sequence.request.memory_group


def _is_retraced(sequence: Sequence, cursor: PredictionCursor) -> bool:
    """True if the next tokens of the retracted answer have chances of their own."""
    place = cursor.num_retraced
    return place is not None and place < len(sequence.proposal_rivals)


def _length_of(found: tuple[SuffixIndex, Match]) -> int:
    return found[1].length


def _was_retracted(state: _SequenceState, sequence: Sequence) -> bool:
    """True if tokens are gone that were taken in."""
    if state.proposal is not sequence.proposal_token_ids:
        return True
    if state.num_followed > sequence.num_output_tokens:
        return True
    if state.index is None:
        return False
    known, text = state.index.token_ids, sequence.token_ids
    return len(known) > len(text) or (bool(known) and known[-1] != text[len(known) - 1])
