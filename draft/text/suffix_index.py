"""Finds earlier occurrences of a text's end in growing texts, and what followed them.

Suffix decoding (Oliaro et al., "SuffixDecoding: A Model-Free Approach to Speeding Up Large Language
Model Inference", 2024) does this with suffix trees. The hash chains of LZ77 (Deutsch, "DEFLATE
Compressed Data Format Specification", RFC 1951, section 4) are faster and as good: a table from the
hash of the last 8, 4 and 2 tokens to the latest place, and from each place to the one before it; a
candidate is then compared backwards to its true length.

This is the reference, and what runs where the library is not built. kernels/cpu/text.cpp does the
same in less time and memory (`outrider.draft.text.compiled_repeats`).
"""

from array import array
from collections.abc import Sequence
from typing import Final, NamedTuple

from outrider.draft.trees.guess import Guess

MAX_MATCH: Final = 64
"""Matches are not measured beyond this length: 100 tokens give no more certainty than 64."""

MIN_MATCH: Final = 2

BREAK: Final = -1
"""Stands behind each document: equal to no token, so that no match and no guess runs across."""

MAX_CHAIN_DEPTH: Final = 256

_GRAMS: Final = (8, 4, 2)
_NOWHERE: Final = -1

# How likely the token is that followed the same `length` tokens before: weak behind two, strong
# behind twelve. Only the order matters much, since drafts are calibrated to what is accepted.
_TRUST: Final = [length * length / (length * length + 8.0) for length in range(512)]
_RECENCY: Final = 0.9  # an occurrence counts that much less than the one after it
_MIN_EDGE_PROB: Final = 0.05  # less likely alternatives are left out
_DEPTH_PER_TOKEN: Final = 4  # a chain is at most so many times as long as its match
# Matches shorter than the best one by this factor say nothing more, nor do more than so many.
_MIN_LENGTH_SHARE: Final = 0.25
_MAX_VOTERS: Final = 6


class Match(NamedTuple):
    """A place in the index's tokens that ends as the text does."""

    length: int
    """The number of the text's last tokens that are the same."""
    position: int
    """Their end among the index's tokens."""


class SuffixIndex:
    """A growing text in which the latest occurrences of n-grams are found in constant time.

    A place is entered once it is known what follows it.
    """

    def __init__(self, *, max_candidates: int = 6) -> None:
        """`max_candidates`: places that a search compares, the latest first."""
        self.token_ids: list[int] = []
        self._max_candidates = max_candidates
        self._document_start = 0
        self._latest: tuple[dict[int, int], ...] = tuple({} for _ in _GRAMS)
        # [num_tokens] each: the place before with the same hash
        self._earlier: tuple[array[int], ...] = tuple(array("i") for _ in _GRAMS)

    @property
    def end_keys(self) -> tuple[int | None, ...]:
        """Hashes of the last 8, 4 and 2 tokens, None where the document is shorter."""
        tokens, length = self.token_ids, len(self.token_ids) - self._document_start
        return tuple(hash(tuple(tokens[-gram:])) if length >= gram else None for gram in _GRAMS)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append to the current document."""
        for token_id in token_ids:
            if len(self.token_ids) > self._document_start:
                self._enter_last()
            self._append(token_id)

    def end_document(self) -> None:
        """Note that the next token belongs to another text."""
        if len(self.token_ids) > self._document_start:
            self._append(BREAK)
            self._document_start = len(self.token_ids)

    def _append(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        for earlier in self._earlier:
            earlier.append(_NOWHERE)

    def _enter_last(self) -> None:
        """The last place has a continuation now."""
        place = len(self.token_ids) - 1
        for key, latest, earlier in zip(self.end_keys, self._latest, self._earlier, strict=True):
            if key is not None:
                earlier[place] = latest.get(key, _NOWHERE)
                latest[key] = place

    def find(
        self, text: list[int], end_keys: Sequence[int | None], hint: int | None = None
    ) -> list[Match]:
        """The latest places where `text` ends likewise, in at least `MIN_MATCH` tokens.

        Only places that share the longest n-gram found (8, 4 or 2 tokens) are given, the latest
        first. `end_keys` are the hashes of the text's end. `hint`: a place to look at first, such
        as the last match moved on by what the text has grown by.
        """
        tokens = self.token_ids
        matches: list[Match] = []
        if hint is not None and hint < len(tokens) - 1 and tokens[hint + 1] != BREAK:
            length = _common_end(tokens, hint, text)
            if length >= MIN_MATCH:
                matches.append(Match(length, hint))
        for level, gram in enumerate(_GRAMS):
            key = end_keys[level]
            if key is None:
                continue
            found = self._walk(level, key, text, hint)
            matches += found
            if found or (matches and matches[0].length >= gram):
                break
        return matches

    def holds(self, end_keys: Sequence[int | None]) -> bool:
        """True if the last 8 tokens of the text with these hashes stand here, followed by more."""
        return end_keys[0] in self._latest[0]

    def _walk(self, level: int, key: int, text: list[int], hint: int | None) -> list[Match]:
        """Compare the latest places with this hash; `hint` was compared already."""
        earlier, gram = self._earlier[level], _GRAMS[level]
        position = self._latest[level].get(key, _NOWHERE)
        found: list[Match] = []
        num_looked_at = 0
        while position != _NOWHERE and num_looked_at < self._max_candidates:
            if position != hint:
                length = _common_end(self.token_ids, position, text)
                if length >= gram:  # or two n-grams have the same hash
                    found.append(Match(length, position))
            position = earlier[position]
            num_looked_at += 1
        return found


def _common_end(tokens: list[int], position: int, text: list[int]) -> int:
    """Count how many tokens up to `position` equal the text's last ones; at most MAX_MATCH."""
    end, text_end = position + 1, len(text)
    limit = min(end, text_end, MAX_MATCH)
    length = 0
    while length < limit and tokens[end - length - 1] == text[text_end - length - 1]:
        length += 1
    return length


# ---- what follows ---------------------------------------------------------------------------


class Repeats:
    """A text that grows, and what followed its end where it stood before.

    The reference of `outrider.draft.text.compiled_repeats`.
    """

    def __init__(self) -> None:
        self.index = SuffixIndex()
        # The last best match, and the text's length then.
        self._best: tuple[SuffixIndex, Match] | None = None
        self._best_at = 0

    def chains(
        self, memories: Sequence[SuffixIndex], *, max_depth: int, max_branches: int
    ) -> list[Guess]:
        """Return at most `max_branches` chains of at most `max_depth` tokens, likeliest first.

        `memories`: other texts that are looked through, the latest first.
        """
        if max_depth < 1:
            return []
        own, text = self.index, self.index.token_ids
        found: list[tuple[SuffixIndex, Match]] = []
        for index in (own, *memories):
            hint = self._hint(index, len(text))
            found += [(index, match) for match in index.find(text, own.end_keys, hint)]
        if not found:
            self._best = None
            return []
        found.sort(key=lambda each: -each[1].length)  # stable: the latest stay first
        self._best, self._best_at = found[0], len(text)
        least = found[0][1].length * _MIN_LENGTH_SHARE
        continuations = [
            continuation(index, match, max_depth=max_depth, repeats=index is own)
            for index, match in found[:_MAX_VOTERS]
            if match.length >= least
        ]
        return vote(continuations, max_branches)

    def is_sure(self, memories: Sequence[SuffixIndex]) -> bool:
        """True if the last 8 tokens stand somewhere, followed by more."""
        return any(index.holds(self.index.end_keys) for index in (self.index, *memories))

    def _hint(self, index: SuffixIndex, num_tokens: int) -> int | None:
        """Return where the last best match stands now if the text went on as it did there.

        Among many places that share the last tokens, only the latest are looked at; the one that
        has been right all along need not be among them.
        """
        if self._best is None or self._best[0] is not index:
            return None
        return self._best[1].position + num_tokens - self._best_at


class Continuation(NamedTuple):
    """The text behind an occurrence that had `length` tokens in common with the text's end."""

    length: int
    token_ids: list[int]


def continuation(
    index: SuffixIndex, match: Match, *, max_depth: int, repeats: bool
) -> Continuation:
    """The tokens behind a match, as far as they are worth it.

    `repeats`: the index holds the text itself, so a match that runs into the text's end goes on
    with what it has just said (a copy that overlaps itself, as in LZ77).
    """
    depth = min(max_depth, _DEPTH_PER_TOKEN * match.length)
    tokens = index.token_ids[match.position + 1 : match.position + 1 + depth]
    if repeats and len(tokens) < depth:
        tokens = (tokens * (depth // len(tokens) + 1))[:depth]
    elif BREAK in tokens:
        tokens = tokens[: tokens.index(BREAK)]
    return Continuation(match.length, tokens)


def vote(continuations: list[Continuation], max_branches: int) -> list[Guess]:
    """Merge continuations, best first, into at most `max_branches` chains, likeliest first.

    Each occurrence has a vote that grows with its length and its place in the list. A token's
    confidence is its share of the votes of all occurrences that agree so far, times the trust in a
    match of that length; a match grows with every token that it foretells.
    """
    first, *others = continuations
    if all(other.token_ids == first.token_ids for other in others):
        return [Guess(token_ids=first.token_ids, edge_probs=_trust(first, 0))]
    groups = [
        _Group(
            [
                (_RECENCY**rank * one.length * one.length, one)
                for rank, one in enumerate(continuations)
            ]
        )
    ]
    guesses: list[Guess] = []
    while groups and len(guesses) < max_branches:
        groups.sort(key=lambda group: group.weight)
        guess, dissenters = groups.pop().split()
        guesses.append(guess)
        groups += dissenters
    return guesses


class _Group:
    """Occurrences that agree in their first tokens, `edge_probs` many; the leader comes first."""

    __slots__ = ("edge_probs", "voters", "weight")

    def __init__(
        self, voters: list[tuple[float, Continuation]], edge_probs: list[float] | None = None
    ) -> None:
        self.voters = voters
        self.edge_probs = edge_probs or []
        self.weight = sum(weight for weight, _ in voters)

    def split(self) -> tuple[Guess, list["_Group"]]:
        """The leader's chain, and those that leave it on the way, by where and with which token."""
        leader = self.voters[0][1]
        start = len(self.edge_probs)
        edge_probs = self.edge_probs + _trust(leader, start)
        leavers: dict[tuple[int, int], list[tuple[float, Continuation]]] = {}
        lost_at: dict[int, float] = {}  # weight that says something else
        ended_at: dict[int, float] = {}  # weight that has nothing more to say
        for weight, voter in self.voters[1:]:
            depth = _common_start(leader.token_ids, voter.token_ids, start)
            if depth == len(voter.token_ids):
                ended_at[depth] = ended_at.get(depth, 0.0) + weight
            elif depth < len(leader.token_ids):
                lost_at[depth] = lost_at.get(depth, 0.0) + weight
                leavers.setdefault((depth, voter.token_ids[depth]), []).append((weight, voter))
        heard: dict[int, float] = {}  # the weight of all votes at a depth
        weight = self.weight
        for depth in sorted(lost_at.keys() | ended_at.keys()):
            weight -= ended_at.get(depth, 0.0)
            if depth in lost_at:
                heard[depth] = weight
                weight -= lost_at[depth]
                edge_probs[depth] *= weight / heard[depth]
        groups = []
        for (depth, _), voters in leavers.items():
            share = sum(vote for vote, _ in voters) / heard[depth]
            edge_prob = share * _TRUST[voters[0][1].length + depth]
            if edge_prob >= _MIN_EDGE_PROB:
                groups.append(_Group(voters, [*edge_probs[:depth], edge_prob]))
        return Guess(token_ids=leader.token_ids, edge_probs=edge_probs), groups


def _trust(source: Continuation, start: int) -> list[float]:
    """Confidence of each token from `start` on, if no continuation disagrees."""
    return _TRUST[source.length + start : source.length + len(source.token_ids)]


def _common_start(left: list[int], right: list[int], start: int) -> int:
    """Count how many first tokens agree, given that `start` do."""
    size = min(len(left), len(right))
    if left[start:size] == right[start:size]:
        return size
    for depth in range(start, size):
        if left[depth] != right[depth]:
            return depth
    return size
