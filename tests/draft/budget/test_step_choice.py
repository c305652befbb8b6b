"""Of the kinds of steps, the one with most tokens a second is kept; the others are tried rarely."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from random import Random
from typing import Any, cast

import pytest

from outrider.draft.budget.group_choice import STEP_KINDS, StepKind
from outrider.draft.budget.step_choice import StepChoice
from outrider.verifier.params import SamplingParams

Step = tuple[int, float]  # tokens of a stream, and hundredths of a second


@dataclass
class Request:
    """As much of a request as is looked at."""

    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(max_tokens=9))


@dataclass(eq=False)
class Stream:
    """As much of a sequence as is looked at."""

    num_output_tokens: int = 0
    num_steps: int = 0
    grammar: object = None
    token_ids: Sequence[int] = range(100)
    request: Request = field(default_factory=Request)


@dataclass
class Drive:
    """A choice, driven by a clock that only steps move."""

    step: Callable[[StepKind, int], Step]
    offered: tuple[StepKind, ...] = STEP_KINDS
    now_s: float = 0.0
    num_tokens: int = 0
    kinds: list[StepKind] = field(default_factory=list)
    chosen: StepKind = "plain"
    """The last step's kind as it was chosen, even where it was plain in the end."""
    plain_s: Callable[[int], float] = lambda index: 0.01
    """What a plain step should take, by the step's number."""
    in_debt: Callable[[int], bool] = lambda index: False
    """Whether a request may not wait for guesses, by the step's number."""
    is_empty: Callable[[int], bool] = lambda index: False
    """Tells by a step's number whether the budget finds no guess worth its time."""
    is_bound: bool = False
    """True if it finds none only because a request may not wait."""

    def __post_init__(self) -> None:
        self.choice = StepChoice(lambda: self.now_s)

    def run(
        self,
        number: int,
        num_steps: int,
        *,
        answer: int = 10**9,
        pause_s: float = 0.0,
        sampled: bool = False,
    ) -> list[StepKind]:
        """Steps of so many streams, whose answers have so many tokens; returns their kinds."""
        sampling = SamplingParams(max_tokens=9, temperature=float(sampled))
        found: list[StepKind] = []
        streams: list[Stream] = []
        for _ in range(num_steps):
            streams = [stream for stream in streams if stream.num_output_tokens < answer]
            num_prompts = number - len(streams)
            self.now_s += num_prompts * pause_s
            tokens, seconds = 1, 1.0
            if streams:
                self.choice.learn(cast(Any, streams))
                found.append(
                    self.choice.choose(
                        cast(Any, streams),
                        self.offered,
                        plain_s=self.plain_s(len(self.kinds)),
                        num_prompts=num_prompts,
                    )
                )
                self.chosen = found[-1]
                if self.in_debt(len(self.kinds)):
                    self.choice.turn_plain()
                    found[-1] = "plain"
                else:
                    has_guesses = not self.is_empty(len(self.kinds))
                    self.choice.note_guesses(has_guesses=has_guesses, is_bound=self.is_bound)
                    found[-1] = found[-1] if has_guesses else "plain"
                tokens, seconds = self.step(found[-1], len(self.kinds))
                self.kinds.append(found[-1])
            self.now_s += seconds / 100 * (3 if num_prompts else 1)
            for stream in streams:
                stream.num_output_tokens += tokens
                stream.num_steps += 1
            self.num_tokens += tokens * len(streams) + num_prompts
            new = (Stream(1, 1, request=Request(sampling)) for _ in range(num_prompts))
            streams = [*streams, *new]
        return found

    def beside_prompts(self) -> StepKind:
        """Choose a step of three streams beside a fourth's prompt."""
        streams = cast(Any, [Stream() for _ in range(3)])
        self.choice.learn(streams)
        return self.choice.choose(streams, self.offered, plain_s=0.01, num_prompts=1)


def share(found: list[StepKind], kind: StepKind) -> float:
    return found.count(kind) / len(found)


def steps(**of: Step) -> Callable[[StepKind, int], Step]:
    """A kind's tokens and time; what is not named costs what plain decoding does."""
    return lambda kind, _: of.get(kind, (1, 1.0))


@pytest.mark.slow_cases
@pytest.mark.parametrize("number", [1, 4, 16])
def test_models_that_do_not_pay_are_left_to_rare_probes(number: int) -> None:
    """A head at 0.56 times plain decoding, and a small model at 0.77, cost two percent together."""
    drive = Drive(steps(head=(2, 3.6), small=(2, 2.6)))
    drive.run(number, 1000)
    drive.num_tokens, begun_s = 0, drive.now_s
    found = drive.run(number, 20_000)
    assert drive.num_tokens / number / (100 * (drive.now_s - begun_s)) > 0.98
    assert {"head", "small"} <= set(found)


@pytest.mark.slow_cases
@pytest.mark.parametrize("number", [1, 4, 16])
@pytest.mark.parametrize("best", STEP_KINDS)
def test_the_fastest_kind_is_kept_and_probes_cost_little(number: int, best: StepKind) -> None:
    drive = Drive(steps(**{"head": (2, 2.5), "small": (3, 4.0), best: (3, 1.0)}))
    drive.run(number, 500)
    drive.num_tokens, begun_s = 0, drive.now_s
    assert share(drive.run(number, 10_000), best) > 0.95
    assert drive.num_tokens / number / (100 * (drive.now_s - begun_s)) > 3 * 0.98


@pytest.mark.parametrize(("small_s", "found"), [(2.0, 2.0), (9.0, 4.0)])
def test_a_step_is_known_in_plain_ones(small_s: float, found: float) -> None:
    """What is far too long was held up."""
    stretches: dict[StepKind, list[float | None]] = {"small": [], "plain": []}

    def step(kind: StepKind, number: int) -> Step:
        if number:
            stretches[drive.kinds[-1]].append(drive.choice.stretch)
        return (12, small_s) if kind == "small" else (1, 1.0)

    drive = Drive(step, offered=("small", "plain"))
    drive.run(2, 400)
    assert stretches["small"][-1] == pytest.approx(found)
    assert stretches["plain"] == pytest.approx([1.0] * len(stretches["plain"]))
    compared = [each for each in stretches["small"] if each is not None]
    counts = drive.choice.stretches
    assert (counts.num_steps, counts.plain_steps) == (len(compared), pytest.approx(sum(compared)))


def test_a_first_short_answer_has_guesses() -> None:
    found = Drive(steps(head=(3, 1.0))).run(1, 16)
    assert set(found) == {"head"}


def test_what_was_found_holds_for_later_answers_however_short() -> None:
    drive = Drive(steps(small=(2, 4.0)), offered=("small", "text", "plain"))
    drive.run(1, 2000, answer=12, pause_s=5.0)
    assert share(drive.run(1, 2000, answer=12, pause_s=5.0), "small") < 0.05


def test_steps_that_are_plain_for_a_debt_say_what_plain_ones_are_worth() -> None:
    """No probe is needed."""
    drive = Drive(steps(small=(1, 1.5)), offered=("small", "plain"))
    drive.in_debt = lambda index: index < 22 and index % 2 > 0
    found = drive.run(1, 32)
    assert set(found[:10]) == {"small", "plain"}
    assert set(found[22:]) == {"plain"}


def test_steps_beside_prompts_belong_to_the_company_that_they_lead_to() -> None:
    """Three streams beside a prompt are never seen without one: what four found is known."""
    drive = Drive(steps(small=(4, 1.0)), offered=("small", "plain"))
    drive.run(1, 100)
    drive.step = steps(small=(2, 4.0))
    assert drive.run(4, 300)[-1] == "plain"
    drive.step = steps(small=(4, 1.0))
    assert drive.run(1, 10)[-1] == "small"
    assert drive.beside_prompts() == "plain"


def test_beside_prompts_nothing_is_tried() -> None:
    drive = Drive(steps(), offered=("small", "plain"))
    assert drive.beside_prompts() == "plain"
    drive.step = steps(small=(4, 1.0))
    assert drive.run(4, 100)[0] == "small"
    assert drive.beside_prompts() == "small"


def test_larger_companies_begin_with_what_smaller_ones_found() -> None:
    drive = Drive(steps(small=(2, 4.0)), offered=("small", "plain"))
    drive.run(1, 300)
    assert set(drive.run(4, 30)) == {"plain"}


def test_smaller_companies_begin_with_guesses_whatever_larger_ones_found() -> None:
    drive = Drive(steps(small=(2, 3.0)), offered=("small", "plain"))
    assert drive.run(16, 100)[-1] == "plain"
    assert drive.run(1, 2)[0] == "small"


def test_companies_between_begin_with_what_the_nearest_smaller_one_found() -> None:
    drive = Drive(steps(small=(2, 3.0)), offered=("small", "plain"))
    drive.run(4, 100)
    drive.step = steps(small=(2, 1.0))
    drive.run(64, 300)
    drive.step = steps(small=(2, 3.0))
    assert drive.run(8, 2)[0] == "plain"


def test_guesses_that_bring_nothing_are_no_longer_tried_than_a_probe_takes() -> None:
    drive = Drive(steps(small=(2, 3.0), text=(1, 0.98)), offered=("small", "text", "plain"))
    drive.run(1, 300)
    assert share(drive.run(1, 400), "text") < 0.05


@pytest.mark.parametrize("number", [1, 4, 16])
def test_guesses_that_seem_faster_than_plain_steps_win_by_their_tokens_alone(number: int) -> None:
    """They do more in a step: the shorter time is noise of the plain ones."""

    def step(every: int) -> Callable[[StepKind, int], Step]:
        return lambda kind, index: (1 + (index % every == 0), 1.05) if kind == "text" else (1, 1.12)

    drive = Drive(step(every=100), offered=("text", "plain"))
    drive.run(number, 300)
    assert share(drive.run(number, 600), "text") < 0.1
    drive = Drive(step(every=2), offered=("text", "plain"))
    drive.run(number, 300)
    assert share(drive.run(number, 600), "text") > 0.8


def test_greedy_and_sampled_requests_are_told_apart() -> None:
    drive = Drive(steps(), offered=("small", "plain"))
    fast: dict[bool, StepKind] = {False: "small", True: "plain"}
    for is_sampled in islice(cycle([False, True]), 40):
        drive.step = steps(small=(4, 1.0 if fast[is_sampled] == "small" else 8.0))
        found = drive.run(2, 200, sampled=is_sampled)
    for is_sampled in (False, True):
        drive.step = steps(small=(4, 1.0 if fast[is_sampled] == "small" else 8.0))
        found = drive.run(2, 400, sampled=is_sampled)
        assert share(found, fast[is_sampled]) > 0.9


def test_what_pays_may_change() -> None:
    def step(kind: StepKind, index: int) -> Step:
        return ((2, 2.6) if index < 1000 else (2, 0.7)) if kind == "small" else (1, 1.0)

    drive = Drive(step, offered=("small", "text", "plain"))
    assert share(drive.run(12, 1000)[100:], "small") < 0.2
    assert share(drive.run(12, 3000)[-1000:], "small") > 0.9


def test_guesses_that_begin_to_fail_are_left_before_the_next_probe() -> None:
    def step(kind: StepKind, index: int) -> Step:
        return (4 if index < 2000 else 1, 2.0) if kind == "small" else (1, 1.0)

    drive = Drive(step, offered=("small", "plain"))
    assert share(drive.run(1, 2000)[100:], "small") > 0.9
    assert share(drive.run(1, 400)[-200:], "small") < 0.2


def test_one_slow_probe_is_not_the_last_word() -> None:
    def step(kind: StepKind, index: int) -> Step:
        return (4, 40.0 if index < 80 else 2.0) if kind == "small" else (1, 1.0)

    found = Drive(step, offered=("small", "plain")).run(1, 1500)
    assert share(found[20:80], "plain") > 0.5
    assert share(found[-500:], "small") > 0.9


def test_a_machine_whose_speed_drifts_misleads_nothing() -> None:
    """A step is measured in plain ones of its time."""
    noise = Random(3)

    def step(kind: StepKind, index: int) -> Step:
        drift = 1.0 + 0.8 * ((index // 150) % 2)
        tokens = noise.randint(1, 5) if kind == "small" else 1
        return tokens, drift * (1.7 if kind == "small" else 1.0)

    drive = Drive(step, offered=("small", "text", "plain"))
    drive.plain_s = lambda index: 0.01 + 0.008 * ((index // 150) % 2)
    assert share(drive.run(1, 10_000)[200:], "small") > 0.9


def test_steps_beside_prompts_and_pauses_between_answers_say_nothing() -> None:
    drive = Drive(steps(small=(4, 2.0)), offered=("small", "plain"))
    found = drive.run(1, 6000, answer=20, pause_s=50.0)
    assert share(found[200:], "small") > 0.9


def test_a_step_that_was_held_up_says_little() -> None:
    def step(kind: StepKind, index: int) -> Step:
        seconds = 50.0 if index % 9 == 0 else 1.0
        return (2, seconds) if kind == "small" else (1, 1.0)

    found = Drive(step, offered=("small", "plain")).run(16, 3000)
    assert share(found[100:], "small") > 0.8


def test_a_kind_that_is_not_possible_is_never_chosen() -> None:
    drive = Drive(steps(head=(4, 1.0)))
    drive.run(2, 500)
    drive.offered = ("small", "text")
    assert set(drive.run(2, 300)) <= {"small", "text"}
    drive.offered = ("text",)
    assert set(drive.run(2, 300)) == {"text"}


def test_a_clock_that_stands_still_teaches_nothing() -> None:
    assert set(Drive(lambda kind, _: (1, 0.0)).run(4, 300)) == {"head"}


@pytest.mark.parametrize("number", [4, 32])
def test_a_model_none_of_whose_guesses_is_worth_its_time_is_left(number: int) -> None:
    """However few steps can be measured: looking for guesses takes time as well."""
    drive = Drive(steps(small=(2, 1.5)), offered=("small", "text", "plain"))
    drive.run(number, 20, answer=6)
    assert drive.chosen == "small"
    drive.is_empty = lambda index: True
    drive.run(number, 6, answer=6)
    assert drive.chosen == "plain"


@pytest.mark.parametrize("is_bound", [False, True])
def test_single_steps_without_a_guess_and_those_of_a_request_in_debt_say_nothing(
    is_bound: bool,
) -> None:
    drive = Drive(steps(small=(2, 1.2)), offered=("small", "text", "plain"), is_bound=is_bound)
    drive.is_empty = lambda index: is_bound or index % 4 > 0
    drive.run(4, 12)
    assert drive.chosen == "small"


def test_empty_steps_of_another_model_say_nothing_of_the_kept_one() -> None:
    """Such as a head that cannot draft for these requests: the small model stands in for it."""
    choice, streams = StepChoice(lambda: 0.0), cast(Any, [Stream() for _ in range(4)])
    assert choice.choose(streams, STEP_KINDS, plain_s=0.01) == "head"
    for _ in range(8):
        assert choice.choose(streams, ("small", "text", "plain"), plain_s=0.01) == "small"
        choice.note_guesses(has_guesses=False, is_bound=False)
    assert choice.choose(streams, STEP_KINDS, plain_s=0.01) == "head"
