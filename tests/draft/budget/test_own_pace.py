"""No request is slower for the guesses of others; those that are right lose little by it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import Any, cast

import pytest

from outrider.draft.budget.own_pace import OwnPace

MOST = 1.3  # the stretch that a step would have without accounts


@dataclass(eq=False)
class Stream:
    """As much of a sequence as is looked at. chance: that a guess of it is right."""

    request_id: str
    chance: float
    num_output_tokens: int = 0
    num_steps: int = 0
    waited: float = 0.0  # in plain steps

    @property
    def stretch(self) -> float:
        """Plain steps a token."""
        return self.waited / self.num_output_tokens


def step(stream: Stream, num_tokens: int = 1) -> None:
    """Let a step give it so many tokens."""
    stream.num_output_tokens += num_tokens
    stream.num_steps += 1


@dataclass
class Drive:
    """Steps of streams together; a step's guesses are one for each stream."""

    pace: OwnPace = field(default_factory=OwnPace)
    random: Random = field(default_factory=lambda: Random(7))
    last: float | None = None
    stretches: list[float] = field(default_factory=list)

    def run(self, streams: Sequence[Stream], num_steps: int) -> None:
        for _ in range(num_steps):
            self.pace.begin_step(cast(Any, streams), self.last)
            expected = [(cast(Any, stream), stream.chance) for stream in streams]
            has_guesses = self.pace.most_stretch(expected) >= MOST
            self.last = MOST if has_guesses else 1.0
            self.stretches.append(self.last)
            for stream in streams:
                is_right = has_guesses and self.random.random() < stream.chance
                step(stream, 1 + is_right)
                stream.waited += self.last


def test_a_request_whose_guesses_fail_is_hardly_slower() -> None:
    """Beside seven whose guesses are right: they are what the steps are stretched for."""
    failing, *others = [Stream(str(n), 0.7 if n else 0.0) for n in range(8)]
    Drive().run([failing, *others], 200)
    assert failing.stretch < 1.05
    assert all(other.stretch < 1.0 for other in others)


@pytest.mark.parametrize("num_streams", [1, 4, 16])
def test_where_guesses_are_right_few_steps_go_without(num_streams: int) -> None:
    drive = Drive()
    drive.run([Stream(str(n), 0.7) for n in range(num_streams)], 400)
    assert drive.stretches.count(MOST) > 380


@pytest.mark.parametrize("num_streams", [2, 8, 32])
def test_no_short_answer_is_much_slower_whatever_comes_and_goes(num_streams: int) -> None:
    """Answers of 30 steps, one in four with guesses that fail: their own pace, each of them."""
    drive, random = Drive(), Random(3)
    made = iter(range(10**6))

    def new() -> Stream:
        return Stream(str(next(made)), random.choice([0.0, 0.5, 0.7, 0.9]))

    streams, ended = [new() for _ in range(num_streams)], []
    for number in range(600):
        drive.run(streams, 1)
        if not number % 30:
            gone = streams.pop(0)
            ended.append(gone)
            streams.append(new())
    ended = [stream for stream in ended if stream.num_output_tokens > 30]
    paces = sorted(stream.stretch for stream in ended)
    assert paces[-1] < 1.06
    assert paces[len(paces) // 2] <= 1.02


def test_a_step_whose_time_says_nothing_is_not_booked() -> None:
    pace, stream = OwnPace(), Stream("a", 0.0)
    streams = cast(Any, [stream])

    def most() -> float:
        return pace.most_stretch([(cast(Any, stream), 0.0)])

    pace.begin_step(streams, None)
    at_first = most()
    step(stream, 5)
    pace.begin_step(streams, None)
    assert most() == at_first
    found = []
    for _ in range(4):
        step(stream)
        pace.begin_step(streams, 1.2)
        found.append(most())
    assert all(later < before for before, later in pairwise(found))
    pace.begin_step(cast(Any, [Stream("b", 0.0)]), 4.0)
    pace.begin_step(streams, 4.0)  # it was away: it begins anew
    assert most() == at_first


def balance(pace: OwnPace, stream: Stream) -> float:
    return pace.most_stretch([(cast(Any, stream), 0.0)]) - 1.0


def test_what_is_read_of_a_text_is_paid_in_parts_by_it_and_at_once_by_all_others() -> None:
    """They only wait for it."""
    pace, reader, other = OwnPace(), Stream("reader", 0.0), Stream("other", 0.0)
    both = cast(Any, [reader, other])

    def booked(stretch: float, read: dict[str, float]) -> tuple[float, float]:
        before = balance(pace, reader), balance(pace, other)
        for stream in (reader, other):
            step(stream)
        pace.begin_step(both, stretch, read)
        lost = before[0] - balance(pace, reader), before[1] - balance(pace, other)
        return lost[0] + 0.015, lost[1] + 0.015  # what every token gains

    pace.begin_step(both, None)
    assert booked(1.0, {"reader": 0.8}) == pytest.approx((0.0, 0.8))
    assert booked(1.0, {}) == pytest.approx((0.0, 0.0))  # it has no guesses: it pays nothing
    paid = [booked(1.001, {})[0] for _ in range(40)]
    assert sum(paid) == pytest.approx(0.8 + 40 * 0.001)
    assert max(paid) < 0.03


def test_a_request_may_be_a_little_slower_for_the_time_that_it_waits_for_prompts() -> None:
    """It is that much slower without guesses."""
    pace, stream = OwnPace(), Stream("a", 0.0)
    pace.begin_step(cast(Any, [stream]), None)
    before = balance(pace, stream)
    step(stream)
    pace.begin_step(cast(Any, [stream]), 1.0, {"": 1.5}, 20.0)
    assert balance(pace, stream) - before == pytest.approx(20.0 * 0.05 - 1.5 + 0.015)


def test_all_but_those_whose_texts_are_read_have_to_wait() -> None:
    pace, streams = OwnPace(), [Stream(name, 0.0) for name in "abc"]
    pace.begin_step(cast(Any, streams), None)
    for number, stream in enumerate(streams):
        step(stream, 1 + number)
    pace.begin_step(cast(Any, streams), 2.0)
    balances = [balance(pace, stream) for stream in streams]
    assert pace.patience == balances[0]
    assert pace.patience_beside(cast(Any, streams[:1])) == balances[1]
    assert pace.patience_beside(cast(Any, streams)) == float("inf")


def test_steps_between_two_that_are_booked_were_plain() -> None:
    """They are not paid for twice."""
    accounts = []
    for num_plain in (0, 1, 8):
        pace, stream = OwnPace(), Stream("a", 0.0)
        pace.begin_step(cast(Any, [stream]), None)
        for _ in range(1 + num_plain):
            step(stream)
        pace.begin_step(cast(Any, [stream]), 1.4)
        accounts.append(pace.most_stretch([(cast(Any, stream), 0.0)]))
    assert accounts == pytest.approx([accounts[0]] * 3, abs=0.25)


def test_an_answer_that_begins_anew_owes_nothing_for_that() -> None:
    pace, stream = OwnPace(), Stream("a", 0.0, num_output_tokens=90, num_steps=60)
    pace.begin_step(cast(Any, [stream]), None)
    stream.num_output_tokens = stream.num_steps = 0
    pace.begin_step(cast(Any, [stream]), 1.0)
    assert pace.patience >= 0.0
