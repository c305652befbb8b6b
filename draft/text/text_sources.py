"""Guesses that need no model: text that repeats, and text that was predicted."""

from collections import Counter, OrderedDict
from collections.abc import Collection
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from outrider.draft.text.prediction import PredictionCursor
from outrider.draft.text.repeats import (
    AnyRepeats,
    Memories,
    is_any_sure,
    look_all,
    new_index,
    new_repeats,
)
from outrider.draft.text.suffix_index import MAX_CHAIN_DEPTH
from outrider.draft.trees.guess import Guess
from outrider.engine.sequences.sequence import Sequence
from outrider.verifier.params import Source

__all__ = ["Guess", "TextSources"]

# Remembered with an answer, so that how it began is found again: mostly the template's own tokens
# and the end of the question.
_NUM_CONTEXT_TOKENS: Final = 8

# Sources of predictions: the client, and the answer retracted at a change of tier.
_Expected = Literal["client", "retracted"]
# A request's cache_salt and memory_group: only requests that share both see each other's answers.
_Owner = tuple[str, str]


@dataclass(eq=False, slots=True)
class _SequenceState:
    """The state of a sequence's text."""

    proposal: list[int]
    """The sequence's own list, which is another one after every change of tier."""
    text: AnyRepeats | None = None
    num_read: int = 0
    """Tokens that `text` has, the last of which is `last_token_id`."""
    last_token_id: int = -1
    chains: list[Guess] = field(default_factory=list)
    """The guesses from repeated text that were looked up last."""
    found_for: tuple[int, int] = (-1, 0)
    """The text's length, and the depth, for which `chains` were found."""
    cursors: dict[_Expected, PredictionCursor] = field(default_factory=dict)
    num_followed: int = 0
    """Output tokens that the cursors have seen."""


@dataclass(eq=False, slots=True)
class _Reading:
    """The new tokens of several texts, and the memories that each is looked up in."""

    states: list[_SequenceState] = field(default_factory=list)
    texts: list[AnyRepeats] = field(default_factory=list)
    new: list[list[int]] = field(default_factory=list)
    memories: list[Memories] = field(default_factory=list)

    def end(self) -> None:
        """Note that the texts have it."""
        for state, new in zip(self.states, self.new, strict=True):
            if new:
                state.num_read += len(new)
                state.last_token_id = new[-1]


class _TenantMemory:
    """A tenant's latest answers in two generations: when the young one is full, the old one goes.

    So forgetting is one assignment, and at least half of the capacity is always the latest text.
    """

    def __init__(self, max_tokens: int) -> None:
        self._generation_size = max_tokens // 2
        self.generations: Memories = (new_index(),)
        """The latest first."""
        self._sizes = [0]

    @property
    def num_tokens(self) -> int:
        """Tokens held, with a break behind each answer."""
        return sum(self._sizes)

    def add(self, token_ids: list[int]) -> None:
        """Remember an answer, or of one beyond a generation's size its end."""
        token_ids = token_ids[-max(self._generation_size - 1, 0) :]
        if self._generation_size < 2:
            return
        young = self.generations[0]
        if self._sizes[0] + len(token_ids) + 1 > self._generation_size:
            young, old, self._sizes = new_index(), young, [0, self._sizes[0]]
            self.generations = (young, old)
        young.extend(token_ids)
        young.end_document()
        self._sizes[0] += len(token_ids) + 1


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
        if "suffix" in sources:
            if state.found_for != (len(sequence.token_ids), depth):
                self.look([(sequence, depth)])
            if state.chains:
                guesses["suffix"] = [*state.chains]
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

    def look(self, asked: SequenceOf[tuple[Sequence, int]]) -> set[str]:
        """Look up what repeats of many at once, for `guess`; with each comes the depth of it.

        Returns the ids of the requests whose texts repeat.
        """
        depths = [min(depth, self._max_depth) for _, depth in asked]
        reading = self._reading([sequence for sequence, _ in asked])
        found = look_all(reading.texts, reading.new, reading.memories, depths, self._max_branches)
        reading.end()
        for state, chains, depth in zip(reading.states, found, depths, strict=True):
            state.chains, state.found_for = chains, (state.num_read, depth)
        return {
            sequence.request_id
            for (sequence, _), chains in zip(asked, found, strict=True)
            if chains
        }

    def is_any_sure(self, asked: SequenceOf[tuple[Sequence, Collection[Source]]]) -> bool:
        """True if it is hardly chance where one of the texts goes on.

        That is where eight tokens repeat, or a prediction is right. This takes a few microseconds
        for each, so it can be asked in steps that make no guesses.
        """
        repeating = [sequence for sequence, sources in asked if "suffix" in sources]
        if repeating:
            reading = self._reading(repeating)
            is_sure = is_any_sure(reading.texts, reading.new, reading.memories)
            reading.end()
            if is_sure:
                return True
        return any(self._is_aligned(each) for each, sources in asked if "prediction" in sources)

    def _is_aligned(self, sequence: Sequence) -> bool:
        """True if it is known where in what is expected the text is."""
        state = self._state(sequence)
        self._follow(sequence, state)
        return any(cursor.is_aligned for cursor in state.cursors.values())

    def _reading(self, sequences: SequenceOf[Sequence]) -> "_Reading":
        """Gather what a look takes in of these texts, and where it looks."""
        reading = _Reading()
        for sequence in sequences:
            state = self._state(sequence)
            if state.text is None:
                state.text = new_repeats()
            reading.states.append(state)
            reading.texts.append(state.text)
            reading.new.append(sequence.token_ids[state.num_read :])
            memory = self._memories.get(owner := _owner(sequence))
            if memory is not None:
                self._memories.move_to_end(owner)
            reading.memories.append(() if memory is None else memory.generations)
        return reading

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


def _was_retracted(state: _SequenceState, sequence: Sequence) -> bool:
    """True if tokens are gone that were taken in."""
    if state.proposal is not sequence.proposal_token_ids:
        return True
    if state.num_followed > sequence.num_output_tokens:
        return True
    known, text = state.num_read, sequence.token_ids
    return known > len(text) or (known > 0 and text[known - 1] != state.last_token_id)
