"""Chooses by the clock what a step's guesses come from: a head, the small model, text, or nothing.

What a tree costs beside passes (ranking, trees, verdicts) is most of its cost where the large
model's pass is short or sequences are many. So a few steps of every other kind are run now and
then, and the kind that yields most tokens a second stays. Groups of similar steps choose apart:
about as many sequences, greedy or sampled, with or without a grammar, of about the same length. The
choice never changes a request's text.

The machine's speed drifts, so a step's time is measured in plain steps: what one of the same
sequences would take now, by what passes and the host's work take. Guesses have to gain something to
begin, and less to go on. Their tokens are believed at their least.
"""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from math import inf
from typing import Any, Final

from outrider.draft.budget.group_choice import (
    STEP_KINDS,
    UNMEASURED_STEPS,
    Credit,
    GroupChoice,
    Known,
    StepKind,
)
from outrider.engine.protocols import DraftModel, StretchCounts
from outrider.engine.sequences.sequence import Sequence

MODELS: Final[dict[StepKind, DraftModel]] = {"head": "head", "small": "small"}

# A step that took longer was held up by something else.
_LONGEST_STRETCH: Final = 4.0

# What was found of so many groups outlasts a restart, and what probes may lose at first then.
_MOST_GROUPS: Final = 64
_RECALLED_CREDIT: Final = 1.0

# A kind has been measured in a group once it has had so many steps.
_ENOUGH_STEPS: Final = 8.0

_Company = tuple[int, bool, bool, bool, int]


class StepChoice:
    """Chooses what the guesses of the next step come from. `clock`: seconds, as the engine's."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._choices: dict[_Company, GroupChoice] = {}
        self._credit = Credit()
        self._last: GroupChoice | None = None  # of the last step that was chosen for
        # Of the step under way, with the tokens and steps that its sequences had at its begin.
        self._sequences: SequenceOf[Sequence] = ()
        self._num_tokens = self._num_steps = 0
        self._kind: StepKind = "plain"
        self._is_plain = True
        self._is_measured = False
        self._num_in_row = 0
        self._begin_s = self._now_s = 0.0
        self._plain_s = 1.0
        self.seconds: float | None = None
        """The time of the last step; None where it says nothing."""
        self.stretch: float | None = None
        """The same in plain steps."""
        self.is_probe = False
        """The step tries what has not paid so far."""
        self.probe_s = inf
        """The seconds that the small model may take to catch up, as far as the step is a probe."""
        self.stretches = StretchCounts()

    def choose(
        self,
        sequences: SequenceOf[Sequence],
        offered: SequenceOf[StepKind],
        *,
        plain_s: float,
        num_prompts: int = 0,
        begin_s: Callable[[StepKind], float] = lambda kind: 0.0,
        patience: float = inf,
        begin_patience: float = inf,
    ) -> StepKind:
        """Return the kind of the step of these sequences, which begins now.

        `offered`: the kinds that are possible, in the order of `STEP_KINDS`. `plain_s`: what a
        plain step of them should take. `num_prompts`: so many are computed beside, whose sequences
        soon decode as well; the step's time will say nothing of its kind. `begin_s`: what a kind's
        model takes to catch up with a text, which a probe has to be worth. `patience`: the plain
        steps that every request can wait for guesses; `begin_patience`: that others can wait while
        a model catches up.
        """
        choice = self._choices.get(company := _company(sequences, num_prompts))
        if choice is None:
            choice = self._new_choice(company, len(sequences) + num_prompts, offered[0])
            self._choices[company] = choice
        kind = offered[0]
        if len(offered) > 1:
            kind = choice.next_kind(
                offered, lambda kind: begin_s(kind) / plain_s, patience, begin_patience
            )
        self._num_in_row = self._num_in_row + 1 if kind == self._kind else 1
        self._begin_s, self._plain_s = self._now_s, plain_s
        self._kind, self._last, self._is_plain = kind, choice, kind == "plain"
        if num_prompts and "plain" in offered:  # steps around this one are still of one kind
            kind = choice.proven_kind(offered)
        self.is_probe = choice.probe is not None and kind == choice.probe.kind
        self.probe_s = choice.begin_credit(begin_patience) * plain_s
        self._is_measured = not num_prompts and len(offered) > 1
        self._sequences = sequences
        self._num_tokens, self._num_steps = _counts(sequences)
        return kind

    def gain_of(
        self, kind: StepKind, sequences: SequenceOf[Sequence], *, first: StepKind
    ) -> float | None:
        """Return the plain steps that a step of these sequences gains by being of a kind.

        0 if another kind is kept; None while this one is kept and not measured. `first`: the kind
        that a choice which knows nothing begins with.
        """
        company = _company(sequences, 0)
        nearest = min(self._choices, key=lambda other: _distance(other, company), default=None)
        if nearest is None:
            return None if kind == first else 0.0
        choice = self._choices[nearest]
        known = choice.known[kind]
        if choice.kept != kind:
            return 0.0
        return known.value - 1.0 if known.pace.steps >= _ENOUGH_STEPS else None

    def _new_choice(self, company: _Company, num_sequences: int, first: StepKind) -> GroupChoice:
        """Return the choice of a new group, which begins with what the nearest one knows.

        Guesses that do not pay among many may pay among few, so such a group begins with them.
        """
        nearest = min(self._choices, key=lambda other: _distance(other, company), default=None)
        if nearest is not None:
            known = self._choices[nearest]
            if known.kept != "plain" or nearest[0] <= company[0]:
                return known.like(num_sequences)
        return GroupChoice(
            known={kind: Known() for kind in STEP_KINDS},
            kept=first,
            credit=self._credit,
            num_sequences=num_sequences,
        )

    def learnt(self) -> list[dict[str, Any]]:
        """Return the groups where guesses do not pay, for `recall`; the most frequent ones first.

        Guesses that pay are the first that is tried in any case.
        """
        found = [
            {"company": company, **choice.learnt()}
            for company, choice in list(self._choices.items())
            if choice.kept == "plain"
        ]
        found.sort(key=lambda group: -group["num_steps"])
        return found[:_MOST_GROUPS]

    def recall(self, groups: SequenceOf[Mapping[str, Any]]) -> None:
        """Begin with what an earlier choice found.

        Raises ValueError, TypeError or KeyError for what no choice has found.
        """
        found: dict[_Company, GroupChoice] = {}
        for group in groups[:_MOST_GROUPS]:
            number, are_greedy, are_sampled, have_grammar, bucket = group["company"]
            company = int(number), bool(are_greedy), bool(are_sampled), bool(have_grammar)
            found[*company, int(bucket)] = GroupChoice.recall(group, self._credit)
        if found:
            self._choices = found
            self._credit.num_steps = _RECALLED_CREDIT

    def guess_after_all(self) -> None:
        """Note that the step has guesses of text though it was to have none; it counts for none."""
        self._kind, self._num_in_row, self._is_plain = "text", 0, False

    def turn_plain(self) -> None:
        """Note that the step is plain after all. Steps around it are still of one kind."""
        self._is_plain = True

    def note_reading(self) -> None:
        """Note that a text is read in the step, which so says little of its kind.

        What a probe reads counts all the same: it has to be worth it.
        """
        self._is_measured = self._is_measured and self.is_probe

    def note_guesses(self, *, has_guesses: bool, is_bound: bool) -> None:
        """Note whether a guess was worth its time; the step is plain after all where none was.

        `is_bound`: a request that has waited for long may be the reason. Only a model that is kept
        is noted: a probe goes on, and text repeats now and then.
        """
        last, kind = self._last, self._kind
        if last is None or self.is_probe or kind not in MODELS or kind != last.kept:
            return
        self._is_plain = not has_guesses
        if not is_bound:
            last.note_guesses(has_guesses=has_guesses)

    def learn(self, sequences: SequenceOf[Sequence]) -> None:
        """Learn from what ends now, if it is one step, and of decodes alone.

        `sequences`: of the step that begins; without one of the old ones time may have passed.
        """
        self._now_s = self._clock()
        seconds = self._now_s - self._begin_s
        self.seconds = self.stretch = None
        old = self._sequences
        if self._last is None or not self._is_measured or seconds <= 0:
            return
        if not any(sequence in sequences for sequence in old):
            return
        num_tokens, num_steps = _counts(old)
        if num_steps - self._num_steps > len(old):
            return
        self.seconds = seconds
        self.stretch = min(seconds / self._plain_s, _LONGEST_STRETCH)
        self._last.note(
            "plain" if self._is_plain else self._kind,
            (num_tokens - self._num_tokens) / len(old),
            self.stretch,
            is_settled=self._num_in_row > UNMEASURED_STEPS,
        )
        if not self._is_plain:
            self.stretches.add(self.stretch)


def _counts(sequences: SequenceOf[Sequence]) -> tuple[int, int]:
    """Tokens and steps of all of them."""
    num_tokens = num_steps = 0
    for sequence in sequences:
        num_tokens += sequence.num_output_tokens
        num_steps += sequence.num_steps
    return num_tokens, num_steps


def _company(sequences: SequenceOf[Sequence], num_prompts: int) -> _Company:
    """Return the group of similar steps that a step of these sequences belongs to.

    Roughly how many there are, with those whose prompts are computed; whether some are greedy, some
    are sampled, some have a grammar; and how long their texts are on average: to 256 tokens, 1024,
    …
    """
    length, are_greedy, are_sampled, have_grammar = 0, False, False, False
    for sequence in sequences:
        length += len(sequence.token_ids)
        if sequence.request.sampling.is_greedy:
            are_greedy = True
        else:
            are_sampled = True
        have_grammar = have_grammar or sequence.grammar is not None
    mean = (length - 1) // len(sequences)
    bucket = (max(mean.bit_length() - 8, 0) + 1) // 2
    number = (len(sequences) + num_prompts).bit_length()
    return number, are_greedy, are_sampled, have_grammar, bucket


def _distance(one: _Company, other: _Company) -> tuple[int, int, int, int]:
    """Return how unlike two groups are: in their kinds of requests, then numbers, then lengths.

    Of two that are as far off, the one with fewer sequences is nearer.
    """
    num_kinds = sum(a != b for a, b in zip(one[1:4], other[1:4], strict=True))
    return num_kinds, abs(one[0] - other[0]), abs(one[4] - other[4]), one[0]
