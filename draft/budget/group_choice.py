"""Chooses the kind of step for one group of similar steps, by what each kind gave there.

A few steps of every other kind are run now and then (a probe), and the kind that yields most tokens
a second stays. Guesses have to gain something to begin, and less to go on. Their tokens are
believed at their least.
"""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, Final, Literal

from outrider.draft.budget.pace import Pace

StepKind = Literal["head", "small", "text", "plain"]

# Taken in this order while nothing is known: models, and text with all of them, are worth a try.
STEP_KINDS: Final[tuple[StepKind, ...]] = ("head", "small", "text", "plain")

# The first steps of a kind in a row say nothing: the small model catches up. A probe has some more,
# fewer where every step has many verdicts.
UNMEASURED_STEPS: Final = 2
_MEASURED_STEPS: Final = 6
_FEWEST_MEASURED_STEPS: Final = 2
# More of them while they win: tokens come in bursts, and a gain is believed at its least.
_MORE_STEPS: Final = 56
# A probe ends when its measured steps have lost so many plain ones.
_ENOUGH_LOST: Final = 1.0
# Among many a model is left after so many steps in a row in which no guess was worth its time.
_MOST_EMPTY: Final = 4
# Measured steps of the kept kind in front of a probe.
_STEPS_BETWEEN: Final = 16
# Guesses of a group that is new are left once they have lost as much in their first steps.
_TRIAL_STEPS: Final = 32
# What was learnt before a start counts as so many steps, and as so many probes that lost, at most.
_RECALLED_STEPS: Final = 8.0
_MOST_LOST_RECALLED: Final = 2
# A kind is probed again after so many steps, and twice as many with each probe that lost.
_LEAST_STEPS: Final = 32
_MOST_LOST: Final = 6
# All probes together may lose this share of all steps, and so many steps at first. At most so many
# are saved up, for a probe that has to begin with a long text.
_LOST_SHARE: Final = 0.003
_FIRST_CREDIT: Final = 3.0
_MOST_CREDIT: Final = 32.0
# Of what every request can wait, the small model may take this share to read what it has missed.
_BEGIN_SHARE: Final = 0.5
# Streams from which on a lost step costs more credit: they all wait, and learn faster.
_MANY: Final = 4
_PRICE_OF_MANY: Final = 2.0
_KEPT: Final = 0.99  # of older steps, with every new one
_KEPT_OF_PROBES: Final = 0.7  # of what is known of a kind, with every new probe
# Guesses have to be faster than plain steps by these shares while they are off, and while they are
# on; and any kind than the kept one between probes, for tokens come in bursts.
_GAIN_TO_BEGIN: Final = 0.03
_GAIN_TO_STAY: Final = 0.01
_MARGIN: Final = 0.05


@dataclass(slots=True)
class Known:
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
    steps_left: int
    pace: Pace = field(default_factory=lambda: Pace(kept=1.0))
    lost: float = 0.0
    """Plain steps that it took, less those that its tokens take usually."""
    lost_measured: float = 0.0
    """The same of its measured steps alone."""


@dataclass(slots=True)
class _Trial:
    """The first steps of what a group began with."""

    pace: Pace = field(default_factory=lambda: Pace(kept=1.0))
    """Since it last was as good as plain steps."""
    lost: float = 0.0
    """Plain steps that it took since then, less its tokens' worth in plain steps."""
    steps_left: int = _TRIAL_STEPS
    enough_lost: float = _ENOUGH_LOST
    """It has failed when it has lost as much."""

    def add(self, tokens: float, stretch: float, token_steps: float) -> None:
        """Learn from a step. `token_steps`: the plain steps that a token takes."""
        self.steps_left -= 1
        # One step may have been held up by something else.
        self.lost += min(stretch - tokens * token_steps, self.enough_lost / 2)
        self.pace.add(tokens, stretch)
        if self.lost <= 0.0:
            self.lost, self.pace = 0.0, Pace(kept=1.0)


@dataclass(slots=True)
class Credit:
    """What probes of all groups may lose at present, in plain steps."""

    num_steps: float = _FIRST_CREDIT

    def earn(self) -> None:
        """Count a step."""
        self.num_steps = min(self.num_steps + _LOST_SHARE, _MOST_CREDIT)


@dataclass(slots=True)
class GroupChoice:
    """Measurements of one group of similar steps."""

    known: dict[StepKind, Known]
    kept: StepKind
    credit: Credit
    num_sequences: int
    """About as many decode together in a step of the group."""
    num_steps: int = 0
    """Steps of the group."""
    num_between: int = -_STEPS_BETWEEN
    """Steps since the last probe; below 0 at first, while the worth of guesses is still learnt."""
    num_empty: int = 0
    """Steps of the kept kind in a row in which no guess was worth its time."""
    probe: _Probe | None = None
    trial: _Trial | None = field(init=False)
    """Of `kept`, until it has passed."""

    def __post_init__(self) -> None:
        # Of few streams a bad moment says little.
        is_tried = self.num_sequences >= _MANY
        self.trial = _Trial(enough_lost=_ENOUGH_LOST / self._price) if is_tried else None

    def like(self, num_sequences: int) -> "GroupChoice":
        """Return a choice that begins with what this one knows."""
        known: dict[StepKind, Known] = {}
        for kind, each in self.known.items():
            pace, num_lost = replace(each.pace), each.num_lost // 2
            pace.fade(_KEPT_OF_PROBES)
            due = _wait(num_lost) if pace.steps else 0
            known[kind] = Known(pace=pace, due=due, num_lost=num_lost)
        return GroupChoice(
            known=known, kept=self.kept, credit=self.credit, num_sequences=num_sequences
        )

    def learnt(self) -> dict[str, Any]:
        """Return what is known, for `recall`."""
        known = {kind: each.pace.learnt() for kind, each in self.known.items()}
        return {
            "known": known,
            "num_lost": {kind: each.num_lost for kind, each in self.known.items()},
            "num_steps": self.num_steps,
            "num_sequences": self.num_sequences,
        }

    @classmethod
    def recall(cls, learnt: Mapping[str, Any], credit: Credit) -> "GroupChoice":
        """Return a group that begins with plain steps, as an earlier one found, and soon doubts it.

        Raises ValueError, TypeError or KeyError for what no group has learnt.
        """
        num_sequences = int(learnt["num_sequences"])
        if num_sequences < 1:
            raise ValueError("group")
        known = {kind: Known() for kind in STEP_KINDS}
        for kind, each in known.items():
            each.pace.recall(learnt["known"][kind], _RECALLED_STEPS)
            each.num_lost = min(max(int(learnt["num_lost"][kind]), 0), _MOST_LOST_RECALLED)
            each.due = _wait(each.num_lost)
        # The first probe is of what it would be worst to be wrong about: a model that did not pay.
        models = [kind for kind in STEP_KINDS[:2] if known[kind].pace.steps]
        if models:
            known[models[0]].due = 0
        return cls(
            known=known, kept="plain", credit=credit, num_sequences=num_sequences, num_between=0
        )

    def next_kind(
        self,
        offered: SequenceOf[StepKind],
        begin_steps: Callable[[StepKind], float],
        patience: float = inf,
        begin_patience: float = inf,
    ) -> StepKind:
        """Choose the kind of the next step among those that are possible.

        `begin_steps`: the plain steps that a model of this kind takes to catch up, at least.
        `patience`: the plain steps that every request can wait for guesses; `begin_patience`: that
        others can wait while a model catches up with a text.
        """
        if self.kept not in offered:
            return max(offered, key=lambda kind: self.known[kind].value)
        if self.probe is not None and patience < 0.0 and self.probe.lost_measured >= 0.0:
            self._end_probe(self.probe)
        if self.probe is None and self.num_between >= _STEPS_BETWEEN:
            self._begin_probe(offered, begin_steps, begin_patience)
        if self.probe is None or self.probe.kind not in offered:
            return self.kept
        return self.probe.kind

    @property
    def _price(self) -> float:
        """Return what a lost step takes of the credit."""
        return 1.0 if self.num_sequences < _MANY else _PRICE_OF_MANY

    def begin_credit(self, patience: float) -> float:
        """Return the plain steps that a model may take to catch up, of a probe's; see `next_kind`.

        Of the probe under way, or of a new one.
        """
        lost = self.probe.lost if self.probe is not None else 0.0
        return min(self.credit.num_steps / self._price - lost, _BEGIN_SHARE * patience)

    def proven_kind(self, offered: SequenceOf[StepKind]) -> StepKind:
        """Choose the kind of a step whose time will say nothing: one that is known to pay."""
        is_known = self.kept in offered and self.known[self.kept].pace.steps > 0
        return self.kept if is_known else "plain"

    def _begin_probe(
        self,
        offered: SequenceOf[StepKind],
        begin_steps: Callable[[StepKind], float],
        patience: float,
    ) -> None:
        """Begin a probe of the kind that has been due for longest, if there is credit for it."""
        known = self.known
        due = [kind for kind in offered if kind != self.kept and known[kind].due <= self.num_steps]
        due.reverse()  # of those that are due for as long, the cheapest first
        for kind in sorted(due, key=lambda kind: known[kind].due):
            if begin_steps(kind) < self.begin_credit(patience):
                measured = max(_MEASURED_STEPS // self.num_sequences, _FEWEST_MEASURED_STEPS)
                self.probe = _Probe(kind, steps_left=UNMEASURED_STEPS + measured)
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

    def note_guesses(self, *, has_guesses: bool) -> None:
        """Note whether a guess of the kept model is worth its time in the step that begins.

        Of few streams a bad moment says little, and looking for guesses takes next to nothing.
        """
        if self.num_sequences < _MANY:
            return
        self.num_empty = 0 if has_guesses else self.num_empty + 1
        if self.num_empty >= _MOST_EMPTY:
            self._keep("plain")
            self.trial = None

    def _note_usual(self, kind: StepKind, tokens: float, stretch: float) -> None:
        self.num_between += 1
        self.known[kind].pace.add(tokens, stretch)
        if kind == self.kept and self._has_failed(tokens, stretch):
            return
        if not self.num_between % _STEPS_BETWEEN:
            self._keep_best(_MARGIN)

    def _has_failed(self, tokens: float, stretch: float) -> bool:
        """Note a step of the kept kind; give it up in its first steps if it has lost enough."""
        trial, plain = self.trial, self.known["plain"].pace
        if trial is None or self.kept == "plain":
            return False
        trial.add(tokens, stretch, plain.seconds / plain.tokens if plain.steps >= 1 else 1.0)
        has_failed = trial.lost >= trial.enough_lost
        if has_failed:  # what was known before is no longer true
            failed = self.known[self.kept]
            failed.pace = trial.pace
            self._keep("plain")
            failed.due, failed.num_lost = self.num_steps + _wait(1), 1
        if has_failed or trial.steps_left <= 0:
            self.trial = None
        return has_failed

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
        if self._may_go_on(probe):
            return
        self._end_probe(probe)

    def _may_go_on(self, probe: _Probe) -> bool:
        """Tell whether a probe still has to find something out."""
        if probe.steps_left > 0:
            return probe.lost_measured < _ENOUGH_LOST / self._price
        if probe.steps_left <= -_MORE_STEPS or probe.lost_measured >= 0.0:
            return False
        return not self._is_vain(probe)

    def _is_vain(self, probe: _Probe) -> bool:
        """Tell whether a probe's guesses bring hardly a token: they have not won by being there."""
        is_of_guesses = probe.kind != "plain" and self.kept == "plain"
        return is_of_guesses and probe.pace.tokens <= (1.0 + _GAIN_TO_BEGIN) * probe.pace.steps

    def _end_probe(self, probe: _Probe) -> None:
        """Learn from a probe that is over."""
        self.probe, self.num_between = None, 0
        other = self.known[probe.kind]
        has_lost = probe.lost > 0 or self._is_vain(probe)
        other.num_lost = other.num_lost + 1 if has_lost else 0
        other.due = self.num_steps + _wait(other.num_lost)
        self.credit.num_steps -= max(probe.lost, 0.0) * self._price
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
        self._keep(best)

    def _keep(self, kind: StepKind) -> None:
        """Keep another kind."""
        kept = self.known[self.kept]
        kept.due, kept.num_lost = self.num_steps + _wait(0), 0
        self.kept = kind
        self.num_between, self.num_empty, self.probe = 0, 0, None

    def _worth(self, kind: StepKind) -> float:
        """Return a kind's value. Guesses count from a gain on, a greater one to begin with."""
        if kind == "plain":
            return self.known[kind].value
        gain = _GAIN_TO_STAY if kind == self.kept else _GAIN_TO_BEGIN
        pace, plain = self.known[kind].pace, self.known["plain"].pace
        if not pace.steps:
            return 0.0
        # A step with guesses does more than a plain one: where it seems shorter, that is noise.
        step_s = max(pace.step_s, plain.step_s) if plain.steps else pace.step_s
        return pace.least_step_tokens / step_s / (1.0 + gain)


def _wait(num_lost: int) -> int:
    """Return the steps between two probes of a kind whose last ones lost."""
    return _LEAST_STEPS << min(num_lost, _MOST_LOST)
