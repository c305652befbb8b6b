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

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from outrider.draft.budget.pace import Pace
from outrider.engine.protocols import DraftModel, StretchCounts
from outrider.engine.sequences.sequence import Sequence

StepKind = Literal["head", "small", "text", "plain"]

# Taken in this order while nothing is known: models, and text with all of them, are worth a try.
STEP_KINDS: Final[tuple[StepKind, ...]] = ("head", "small", "text", "plain")
MODELS: Final[dict[StepKind, DraftModel]] = {"head": "head", "small": "small"}

# Steps of another kind in a row, of which the first say nothing: the small model catches up.
_PROBE_STEPS: Final = 8
_UNMEASURED_STEPS: Final = 2
# More of them while they win: tokens come in bursts, and a gain is believed at its least.
_MORE_STEPS: Final = 56
# A probe ends when its measured steps have lost so many plain ones.
_ENOUGH_LOST: Final = 1.0
# Measured steps of the kept kind in front of a probe.
_STEPS_BETWEEN: Final = 16
# A kind is probed again after so many steps, and twice as many with each probe that lost.
_LEAST_STEPS: Final = 32
_MOST_LOST: Final = 6
# All probes together may lose this share of all steps, and so many steps at first. At most so many
# are saved up, for a probe that has to begin with a long text.
_LOST_SHARE: Final = 0.003
_FIRST_CREDIT: Final = 3.0
_MOST_CREDIT: Final = 32.0
_KEPT: Final = 0.99  # of older steps, with every new one
_KEPT_OF_PROBES: Final = 0.7  # of what is known of a kind, with every new probe
# Guesses have to be faster than plain steps by these shares while they are off, and while they are
# on; and any kind than the kept one between probes, for tokens come in bursts.
_GAIN_TO_BEGIN: Final = 0.03
_GAIN_TO_STAY: Final = 0.01
_MARGIN: Final = 0.05
# A step that took longer was held up by something else.
_LONGEST_STRETCH: Final = 4.0

_Company = tuple[int, bool, bool, bool, int]


@dataclass(slots=True)
class _Known:
    """Measurements of one kind of step."""

    pace: Pace = field(default_factory=lambda: Pace(kept=_KEPT))
    """In plain steps; that of probes fades."""
    due: int = 0
    """The number of the group's step from which it may be probed again."""
    num_lost: int = 0
    """Its last probes that lost time, in a row."""

    @property
    def value(self) -> float:
        """Tokens a plain step at least; 0 while nothing is known."""
        return self.pace.least_step_tokens / self.pace.step_s if self.pace.steps else 0.0


@dataclass(slots=True)
class _Probe:
    """A probe under way."""

    kind: StepKind
    pace: Pace = field(default_factory=lambda: Pace(kept=1.0))
    steps_left: int = _PROBE_STEPS
    lost: float = 0.0
    """Plain steps that it took, less those that its tokens take usually."""
    lost_measured: float = 0.0
    """The same of its measured steps alone."""


@dataclass(slots=True)
class _Credit:
    """What probes of all groups may lose at present, in plain steps."""

    num_steps: float = _FIRST_CREDIT

    def earn(self) -> None:
        """Count a step."""
        self.num_steps = min(self.num_steps + _LOST_SHARE, _MOST_CREDIT)


@dataclass(slots=True)
class _Choice:
    """Measurements of one group of similar steps."""

    known: dict[StepKind, _Known]
    kept: StepKind
    credit: _Credit
    num_steps: int = 0
    """Steps of the group."""
    num_between: int = -_STEPS_BETWEEN
    """Steps since the last probe; below 0 at first, while the worth of guesses is still learnt."""
    probe: _Probe | None = None

    def like(self) -> "_Choice":
        """Return a choice that begins with what this one knows."""
        known: dict[StepKind, _Known] = {}
        for kind, each in self.known.items():
            pace, num_lost = replace(each.pace), each.num_lost // 2
            pace.fade(_KEPT_OF_PROBES)
            due = _wait(num_lost) if pace.steps else 0
            known[kind] = _Known(pace=pace, due=due, num_lost=num_lost)
        return _Choice(known=known, kept=self.kept, credit=self.credit)

    def next_kind(
        self, offered: SequenceOf[StepKind], begin_steps: Callable[[StepKind], float]
    ) -> StepKind:
        """Choose the kind of the next step among those that are possible.

        `begin_steps`: the plain steps that a model of this kind takes to catch up.
        """
        if self.kept not in offered:
            return max(offered, key=lambda kind: self.known[kind].value)
        if self.probe is None and self.num_between >= _STEPS_BETWEEN:
            self._begin_probe(offered, begin_steps)
        if self.probe is None or self.probe.kind not in offered:
            return self.kept
        return self.probe.kind

    def proven_kind(self, offered: SequenceOf[StepKind]) -> StepKind:
        """Choose the kind of a step whose time will say nothing: one that is known to pay."""
        is_known = self.kept in offered and self.known[self.kept].pace.steps > 0
        return self.kept if is_known else "plain"

    def _begin_probe(
        self, offered: SequenceOf[StepKind], begin_steps: Callable[[StepKind], float]
    ) -> None:
        """Begin a probe of the kind that has been due for longest, if there is credit for it."""
        known = self.known
        due = [kind for kind in offered if kind != self.kept and known[kind].due <= self.num_steps]
        for kind in sorted(due, key=lambda kind: known[kind].due):
            if begin_steps(kind) < self.credit.num_steps:
                self.probe = _Probe(kind)
                return

    def note(self, kind: StepKind, tokens: float, stretch: float, *, is_settled: bool) -> None:
        """Learn from a step: a sequence's tokens, and its time in plain steps.

        `is_settled`: the steps in front of it were of its kind, too.
        """
        self.num_steps += 1
        self.credit.earn()
        is_measured = is_settled and tokens > 0
        if kind == self.kept:
            if is_measured:
                self._note_usual(kind, tokens, stretch)
        elif self.probe is not None and kind == self.probe.kind:
            self._note_probe(self.probe, tokens, stretch, is_measured=is_measured)
        elif is_measured:  # plain, for somebody was in debt
            self._note_usual(kind, tokens, stretch)

    def _note_usual(self, kind: StepKind, tokens: float, stretch: float) -> None:
        self.num_between += 1
        self.known[kind].pace.add(tokens, stretch)
        if not self.num_between % _STEPS_BETWEEN:
            self._keep_best(_MARGIN)

    def _note_probe(
        self, probe: _Probe, tokens: float, stretch: float, *, is_measured: bool
    ) -> None:
        usual = self.known[self.kept].pace
        lost = stretch - tokens * usual.seconds / usual.tokens
        probe.lost += lost
        probe.steps_left -= 1
        if is_measured:
            probe.pace.add(tokens, stretch)
            probe.lost_measured += lost
        most_lost = _ENOUGH_LOST if probe.steps_left > 0 else 0.0
        if probe.steps_left > -_MORE_STEPS and probe.lost_measured < most_lost:
            return
        self.probe, self.num_between = None, 0
        other = self.known[probe.kind]
        other.num_lost = other.num_lost + 1 if probe.lost > 0 else 0
        other.due = self.num_steps + _wait(other.num_lost)
        self.credit.num_steps -= max(probe.lost, 0.0)
        other.pace.fade(_KEPT_OF_PROBES)
        other.pace.join(probe.pace)
        self._keep_best()

    def _keep_best(self, margin: float = 0.0) -> None:
        """Keep another kind, if it is faster by more than `margin`."""
        best = max(self.known, key=self._worth)
        if best == "plain":  # whose tokens do not come in bursts
            margin = 0.0
        if self._worth(best) <= (1.0 + margin) * self._worth(self.kept):
            return
        kept = self.known[self.kept]
        kept.due, kept.num_lost = self.num_steps + _wait(0), 0
        self.kept = best
        self.num_between, self.probe = 0, None

    def _worth(self, kind: StepKind) -> float:
        """Return a kind's value. Guesses count from a gain on, a greater one to begin with."""
        if kind == "plain":
            return self.known[kind].value
        gain = _GAIN_TO_STAY if kind == self.kept else _GAIN_TO_BEGIN
        return self.known[kind].value / (1.0 + gain)


def _wait(num_lost: int) -> int:
    """Return the steps between two probes of a kind whose last ones lost."""
    return _LEAST_STEPS << min(num_lost, _MOST_LOST)


class StepChoice:
    """Chooses what the guesses of the next step come from. `clock`: seconds, as the engine's."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._choices: dict[_Company, _Choice] = {}
        self._credit = _Credit()
        self._last: _Choice | None = None  # of the last step that was chosen for
        # Of the step under way, with the tokens and steps that its sequences had at its begin.
        self._sequences: SequenceOf[Sequence] = ()
        self._num_tokens = self._num_steps = 0
        self._kind: StepKind = "plain"
        self._is_plain = True
        self._is_measured = False
        self._num_in_row = 0
        self._begin_s = 0.0
        self._plain_s = 1.0
        self.seconds: float | None = None
        """The time of the last step; None where it says nothing."""
        self.stretch: float | None = None
        """The same in plain steps."""
        self.is_probe = False
        """The step tries what has not paid so far."""
        self.stretches = StretchCounts()

    def choose(
        self,
        sequences: SequenceOf[Sequence],
        offered: SequenceOf[StepKind],
        *,
        plain_s: float,
        num_prompts: int = 0,
        begin_s: Callable[[StepKind], float] = lambda kind: 0.0,
    ) -> StepKind:
        """Return the kind of the step of these sequences, which begins now.

        `offered`: the kinds that are possible, in the order of `STEP_KINDS`. `plain_s`: what a
        plain step of them should take. `num_prompts`: so many are computed beside, whose sequences
        soon decode as well; the step's time will say nothing of its kind. `begin_s`: what a kind's
        model takes to catch up with the texts, which a probe has to be worth.
        """
        now_s = self._clock()
        self._learn(now_s - self._begin_s, sequences)
        choice = self._choices.get(company := _company(sequences, num_prompts))
        if choice is None:
            known = {kind: _Known() for kind in STEP_KINDS}
            last = self._last or _Choice(known=known, kept=offered[0], credit=self._credit)
            choice = self._choices[company] = last.like()
        kind = offered[0]
        if len(offered) > 1:
            kind = choice.next_kind(offered, lambda kind: begin_s(kind) / plain_s)
        self._num_in_row = self._num_in_row + 1 if kind == self._kind else 1
        self._begin_s, self._plain_s = now_s, plain_s
        self._kind, self._last, self._is_plain = kind, choice, kind == "plain"
        if num_prompts and "plain" in offered:  # steps around this one are still of one kind
            kind = choice.proven_kind(offered)
        self.is_probe = choice.probe is not None and kind == choice.probe.kind
        self._is_measured = not num_prompts and len(offered) > 1
        self._sequences = sequences
        self._num_tokens, self._num_steps = _counts(sequences)
        return kind

    def guess_after_all(self) -> None:
        """Note that the step has guesses of text though it was to have none; it counts for none."""
        self._kind, self._num_in_row, self._is_plain = "text", 0, False

    def turn_plain(self) -> None:
        """Note that the step is plain after all. Steps around it are still of one kind."""
        self._is_plain = True

    def _learn(self, seconds: float, sequences: SequenceOf[Sequence]) -> None:
        """Learn from what ends now, if it is one step, and of decodes alone.

        `sequences`: of the step that begins; without one of the old ones time may have passed.
        """
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
            is_settled=self._num_in_row > _UNMEASURED_STEPS,
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
