"""Chooses by the clock what a step's guesses come from: a head, the small model, text, or nothing.

Pass times say what a tree costs in passes. What it costs beside them (ranking, trees, verdicts) is
most of a tree's cost where the large model's pass is short or sequences are many. So a few steps of
every other kind are run now and then, and the kind that yields most tokens a second stays. Groups
of similar steps choose apart: about as many sequences, greedy or sampled, with or without a
grammar, of about the same length. The choice never changes a request's text.

The machine's speed drifts, so seconds are compared only with those of neighbouring steps. Each kind
has a place on a scale of log seconds. A probe moves that place by how it differed from the steps
around it. Tokens a step do not depend on the machine and are remembered as they are.
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from math import exp, inf, log
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
# Measured steps of the kept kind in front of a probe.
_STEPS_BETWEEN: Final = 16
# A kind is probed again when so many steps have passed, and when what its last probe lost is at
# most so small a share of the time since then.
_LEAST_STEPS: Final = 32
_LOST_SHARE: Final = 0.004
# One that loses for the first time may have been held up: waits grow up to that share.
_BACK_OFF: Final = 4
_MOST_LOST: Final = 8
_LONGEST_WAIT_S: Final = 300.0
_KEPT: Final = 0.99  # of older steps' tokens, with every new one
_KEPT_RECENT: Final = 0.95  # of older steps' seconds
_KEPT_OF_PROBES: Final = 0.7  # of what is known of a kind, with every new probe
_PROBE_WEIGHT: Final = 0.4  # of a probe's seconds against those of earlier ones
# A kind is left between probes if another one was so much faster: tokens come in bursts.
_MARGIN: Final = 0.05
# A step that took longer was held up by something else.
_LONGEST_STRETCH: Final = 4.0

_Company = tuple[int, bool, bool, bool, int]


@dataclass(slots=True)
class _Known:
    """Measurements of one kind of step."""

    pace: Pace = field(default_factory=lambda: Pace(kept=_KEPT))
    """Its tokens; those of probes fade."""
    log_s: float | None = None
    """Its seconds on the scale; None: never measured."""
    due_s: float = 0.0
    """The group's time (`_Choice.seconds`) of the next probe."""
    num_lost: int = 0
    """Its last probes that lost time, in a row."""

    @property
    def value(self) -> float:
        """Logarithm of tokens a second, on the scale."""
        if self.log_s is None or not self.pace.tokens:
            return -inf
        return log(self.pace.step_tokens) - self.log_s


@dataclass(slots=True)
class _Probe:
    """A probe under way."""

    kind: StepKind
    pace: Pace = field(default_factory=lambda: Pace(kept=1.0))
    steps_left: int = _PROBE_STEPS
    lost_s: float = 0.0
    """Its seconds, less those that its tokens take usually."""


@dataclass(slots=True)
class _Choice:
    """Measurements of one group of similar steps."""

    known: dict[StepKind, _Known]
    kept: StepKind
    recent: Pace = field(default_factory=lambda: Pace(kept=_KEPT_RECENT))
    """Steps of the kept kind."""
    seconds: float = 0.0
    """Time of all steps of the group."""
    num_between: int = -_STEPS_BETWEEN
    """Steps since the last probe; below 0 at first, while the worth of guesses is still learnt."""
    probe: _Probe | None = None

    def like(self) -> "_Choice":
        """Return a choice that begins with what this one knows."""
        known = {
            kind: _Known(
                pace=replace(known.pace),
                log_s=known.log_s,
                due_s=0.0 if known.log_s is None else self._least_wait_s,
            )
            for kind, known in self.known.items()
        }
        for each in known.values():
            each.pace.fade(_KEPT_OF_PROBES)
        return _Choice(known=known, kept=self.kept)

    def next_kind(self, offered: SequenceOf[StepKind]) -> StepKind:
        """Choose the kind of the next step among those that are possible."""
        if self.kept not in offered:
            return max(offered, key=lambda kind: self.known[kind].value)
        if self.probe is None and self.num_between >= _STEPS_BETWEEN:
            others = [kind for kind in offered if kind != self.kept]
            next_one = min(others, key=lambda kind: self.known[kind].due_s)
            if self.known[next_one].due_s <= self.seconds:
                self.probe = _Probe(next_one)
        if self.probe is None or self.probe.kind not in offered:
            return self.kept
        return self.probe.kind

    def note(self, kind: StepKind, tokens: float, seconds: float, *, is_settled: bool) -> None:
        """Learn from a step: a sequence's tokens, and seconds.

        `is_settled`: the steps in front of it were of its kind, too.
        """
        self.seconds += seconds
        is_measured = is_settled and tokens > 0
        if kind == self.kept:
            if is_measured:
                self.num_between += 1
                self.known[kind].pace.add(tokens, seconds)
                self.recent.add(tokens, seconds)
                if not self.num_between % _STEPS_BETWEEN:
                    self._keep_best(_MARGIN)
        elif self.probe is not None and kind == self.probe.kind:
            self._note_probe(self.probe, tokens, seconds, is_measured=is_measured)

    def stretch(self, kind: StepKind, seconds: float) -> float | None:
        """Return how many plain steps a step took; None while the plain ones are not known."""
        if kind == "plain":
            return 1.0
        kept, plain = self.known[self.kept], self.known["plain"]
        if kept.log_s is None or plain.log_s is None or not self.recent.steps:
            return None
        plain_s = self.recent.step_s * exp(plain.log_s - kept.log_s)
        return min(seconds / plain_s, _LONGEST_STRETCH)

    def _note_probe(
        self, probe: _Probe, tokens: float, seconds: float, *, is_measured: bool
    ) -> None:
        usual = self.known[self.kept].pace.step_tokens
        probe.lost_s += seconds - tokens / usual * self.recent.step_s
        probe.steps_left -= 1
        if is_measured:
            probe.pace.add(tokens, seconds)
        if probe.steps_left:
            return
        self.probe, self.num_between = None, 0
        other = self.known[probe.kind]
        other.num_lost = other.num_lost + 1 if probe.lost_s > 0 else 0
        longest_s = min(
            self._least_wait_s * _BACK_OFF ** min(other.num_lost, _MOST_LOST), _LONGEST_WAIT_S
        )
        wait_s = min(probe.lost_s / _LOST_SHARE, longest_s)
        other.due_s = self.seconds + max(self._least_wait_s, wait_s)
        if probe.pace.steps:
            self._compare(other, probe.pace)
            self._keep_best()

    def _compare(self, other: _Known, found: Pace) -> None:
        """Learn from the measured steps of a probe."""
        kept = self.known[self.kept]
        if kept.log_s is None:
            kept.log_s = 0.0
        log_s = kept.log_s + log(found.step_s / self.recent.step_s)
        known = log_s if other.log_s is None else other.log_s
        other.log_s = known + _PROBE_WEIGHT * (log_s - known)
        other.pace.fade(_KEPT_OF_PROBES)
        other.pace.tokens += found.tokens
        other.pace.steps += found.steps

    def _keep_best(self, margin: float = 0.0) -> None:
        """Keep another kind, if it is faster."""
        kept = self.known[self.kept]
        best = max(self.known, key=lambda kind: self.known[kind].value)
        log_s = self.known[best].log_s
        if self.known[best].value <= kept.value + margin or kept.log_s is None or log_s is None:
            return
        # So many steps of the new kind.
        kept.due_s = self.seconds + self._least_wait_s * exp(log_s - kept.log_s)
        kept.num_lost = 0
        self.kept, self.recent = best, Pace(kept=_KEPT_RECENT)
        self.num_between, self.probe = 0, None

    @property
    def _least_wait_s(self) -> float:
        return _LEAST_STEPS * self.recent.step_s if self.recent.steps else 0.0


class StepChoice:
    """Chooses what the guesses of the next step come from. `clock`: seconds, as the engine's."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._choices: dict[_Company, _Choice] = {}
        self._last: _Choice | None = None  # of the last step that was chosen for
        # Of the step under way, with the tokens and steps that its sequences had at its begin.
        self._sequences: SequenceOf[Sequence] = ()
        self._num_tokens = self._num_steps = 0
        self._kind: StepKind = "plain"
        self._is_measured = False
        self._num_in_row = 0
        self._begin_s = 0.0
        self.stretch: float | None = None
        """The time of the last step in plain ones; None where it says nothing."""
        self.stretches = StretchCounts()

    def choose(
        self,
        sequences: SequenceOf[Sequence],
        offered: SequenceOf[StepKind],
        *,
        has_prompts: bool = False,
    ) -> StepKind:
        """Return the kind of the step of these sequences, which begins now.

        `offered`: the kinds that are possible, in the order of `STEP_KINDS`. `has_prompts`: the
        step's time will say nothing of its kind, for prompts are computed beside.
        """
        now_s = self._clock()
        self.stretch = self._learn(now_s - self._begin_s, sequences)
        if self.stretch is not None and self._kind != "plain":
            self.stretches.add(self.stretch)
        choice = self._choices.get(company := _company(sequences))
        if choice is None:
            known = {kind: _Known() for kind in STEP_KINDS}
            last = self._last or _Choice(known=known, kept=offered[0])
            choice = self._choices[company] = last.like()
        kind = choice.next_kind(offered) if len(offered) > 1 else offered[0]
        self._num_in_row = self._num_in_row + 1 if kind == self._kind else 1
        self._begin_s, self._kind, self._last = now_s, kind, choice
        self._is_measured = not has_prompts and len(offered) > 1
        self._sequences = sequences
        self._num_tokens, self._num_steps = _counts(sequences)
        return kind

    def _learn(self, seconds: float, sequences: SequenceOf[Sequence]) -> float | None:
        """Learn from what ends now, if it is one step, and of decodes alone; return its stretch.

        `sequences`: of the step that begins; without one of the old ones time may have passed.
        """
        old = self._sequences
        if self._last is None or not self._is_measured or seconds <= 0:
            return None
        if not any(sequence in sequences for sequence in old):
            return None
        num_tokens, num_steps = _counts(old)
        if num_steps - self._num_steps > len(old):
            return None
        self._last.note(
            self._kind,
            (num_tokens - self._num_tokens) / len(old),
            seconds,
            is_settled=self._num_in_row > _UNMEASURED_STEPS,
        )
        return self._last.stretch(self._kind, seconds)


def _counts(sequences: SequenceOf[Sequence]) -> tuple[int, int]:
    """Tokens and steps of all of them."""
    num_tokens = num_steps = 0
    for sequence in sequences:
        num_tokens += sequence.num_output_tokens
        num_steps += sequence.num_steps
    return num_tokens, num_steps


def _company(sequences: SequenceOf[Sequence]) -> _Company:
    """Return the group of similar steps that a step of these sequences belongs to.

    Roughly how many there are; whether some are greedy, some are sampled, some have a grammar; and
    how long their texts are on average: to 256 tokens, 1024, …
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
    return len(sequences).bit_length(), are_greedy, are_sampled, have_grammar, bucket
