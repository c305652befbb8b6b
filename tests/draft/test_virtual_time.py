"""What the budget decides as machines and models change, in virtual time of recorded machines."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.simulate.processors import (
    AVX2,
    AVX512,
    H100,
    PROCESSORS,
    SMALL_AVX2,
    Processor,
)
from outrider.engine.request import SpeculationParams
from tests.draft.virtual_machine import VirtualMachine


def by_processor(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test on these machines."""
    processors = [PROCESSORS[name] for name in names]
    return pytest.mark.parametrize("processor", processors, ids=names)


def plain_rate(
    processor: Processor, seconds: float, *, slowness: float = 1.0, **options: Any
) -> float:
    """Return the tokens a second of an engine without a drafter."""
    machine = VirtualMachine(processor, agreement=0.0, speculates=False)
    machine.slowness = slowness
    return machine.run(seconds, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_streams", "num_steps"),
    [(name, 1, 1000) for name in PROCESSORS] + [("avx512", n, 400) for n in (8, 16, 32, 64)],
)
def test_guesses_that_are_never_right_cost_a_hundredth_at_most(
    name: str, num_streams: int, num_steps: int
) -> None:
    """From the first request on."""
    processor = PROCESSORS[name]
    seconds = num_steps * processor.curve("large", lambda rows: 1.0)(num_streams)
    machine = VirtualMachine(processor, agreement=0.0, sources=("model", "suffix"))
    rate = machine.run(seconds, num_streams=num_streams)
    assert rate >= 0.99 * plain_rate(processor, seconds, num_streams=num_streams)


@pytest.mark.slow
@by_processor("avx512", "small-avx2")
def test_where_guesses_do_not_pay_hardly_a_step_has_any(processor: Processor) -> None:
    """No draft pass, no tree; but now and then they are tried, for they may be right by now."""
    machine = VirtualMachine(processor, agreement=0.0, sources=("model", "suffix"))
    machine.run(600 * processor.large_s[0])
    num_tokens, num_trees = machine.num_tokens, machine.num_trees
    num_passes = machine.num_draft_passes
    machine.run(1000 * processor.large_s[0])
    num_steps = machine.num_tokens - num_tokens
    assert machine.num_trees - num_trees < 0.1 * num_steps
    assert 0 < machine.num_draft_passes - num_passes < 0.05 * num_steps


@pytest.mark.slow
@pytest.mark.parametrize("num_streams", [16, 32])
def test_among_many_answers_trees_are_not_built_only_to_be_cut_to_nothing(num_streams: int) -> None:
    """From the first request on; few steps have no prompt beside them and can be measured."""
    machine, num_steps = VirtualMachine(AVX2, agreement=0.7), 200
    for _ in range(num_steps):
        while (number := len(machine.open)) < num_streams:
            machine.submit(8 + 7 * number % 56)
        machine.step()
    assert machine.num_trees < 0.15 * num_streams * num_steps


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processor", "least"),
    [(AVX2, 2.0), (SMALL_AVX2, 2.0), (AVX512, 8.0), (H100, 15.0)],
    ids=["avx2", "small-avx2", "avx512", "h100"],
)
def test_text_that_repeats_is_drafted_at_once_after_much_that_did_not(
    processor: Processor, least: float
) -> None:
    """Plain steps are kept by then, and the first copy is as fast as any."""
    machine = VirtualMachine(processor, agreement=0.0, sources=("suffix",))
    machine.run(1000 * processor.large_s[0])
    machine.drain()
    begun_s, begun = machine.now_s, machine.num_tokens
    machine.submit(300, seed=0)  # the first stream's text
    machine.drain()
    rate = (machine.num_tokens - begun) / (machine.now_s - begun_s)
    assert rate >= least * plain_rate(processor, 300 * processor.large_s[0])


@pytest.mark.slow
def test_requests_without_guesses_teach_nothing_of_them() -> None:
    """They are plain steps, whatever was kept, and the next request with guesses goes on."""
    machine = VirtualMachine(AVX512, agreement=0.9)
    machine.run(300 * AVX512.large_s[0])
    machine.drain()
    before = machine.num_trees, machine.num_draft_passes
    for _ in range(5):
        machine.submit(100, speculation=SpeculationParams(enabled=False))
        machine.drain()
    assert (machine.num_trees, machine.num_draft_passes) == before
    assert machine.run(1.0) >= 1.5 * plain_rate(AVX512, 1.0)


@pytest.mark.slow
@by_processor(*PROCESSORS)
def test_guesses_that_are_mostly_right_pay(processor: Processor) -> None:
    seconds = 500 * processor.large_s[0]
    machine = VirtualMachine(processor, agreement=0.8)
    assert machine.run(seconds) >= 1.25 * plain_rate(processor, seconds)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_streams", "least"), [("avx512", 1, 1.3), ("avx512", 2, 1.2), ("h100", 1, 1.3)]
)
def test_guesses_behind_long_prompts_pay_for_their_reading(
    name: str, num_streams: int, least: float
) -> None:
    """The small model reads a prompt in the time of several plain steps, which then are paid for.

    In the tokens of a second are the large model's prompts.
    """
    processor = PROCESSORS[name]
    options = {"num_streams": num_streams, "max_tokens": 96, "num_prompt": 400}
    curve = processor.curve("large", lambda rows: 1.0)
    seconds = 600 * curve(1) + 8 * curve(400)
    machine = VirtualMachine(processor, agreement=0.8)
    assert machine.run(seconds, **options) >= least * plain_rate(processor, seconds, **options)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "num_streams"), [("avx512", 1), ("avx512", 4), ("h100", 16)])
def test_long_prompts_are_not_read_for_guesses_that_are_never_right(
    name: str, num_streams: int
) -> None:
    """But for the first ones."""
    processor = PROCESSORS[name]
    options = {"num_streams": num_streams, "max_tokens": 96, "num_prompt": 400}
    curve = processor.curve("large", lambda rows: 1.0)
    seconds = 600 * curve(num_streams) + 8 * num_streams * curve(400)
    machine = VirtualMachine(processor, agreement=0.0)
    machine.run(seconds, **options)
    num_passes = machine.num_draft_passes
    assert machine.run(seconds, **options) >= 0.99 * plain_rate(processor, seconds, **options)
    assert machine.num_draft_passes - num_passes <= 40


@pytest.mark.slow
def test_guesses_that_begin_to_be_right_behind_long_prompts_are_found() -> None:
    """A probe has to read a prompt first, which takes more than one request of such can lose."""
    processor = AVX512
    options = {"max_tokens": 96, "num_prompt": 200}
    curve = processor.curve("large", lambda rows: 1.0)
    seconds = 800 * curve(1) + 8 * curve(200)
    machine = VirtualMachine(processor, agreement=0.0)
    machine.run(seconds, **options)
    machine.agreement = 0.8
    machine.run(seconds, **options)
    assert machine.run(seconds, **options) >= 1.4 * plain_rate(processor, seconds, **options)


@pytest.mark.slow
@by_processor("avx2", "avx512")
@pytest.mark.parametrize("num_streams", [1, 4])
def test_guesses_that_begin_to_fail_are_left_within_two_seconds(
    processor: Processor, num_streams: int
) -> None:
    machine = VirtualMachine(processor, agreement=1.0)
    machine.run(300 * processor.large_s[0], num_streams=num_streams)
    machine.agreement = 0.0
    machine.run(2.0, num_streams=num_streams)
    plain = plain_rate(processor, 6.0, num_streams=num_streams)
    assert machine.run(6.0, num_streams=num_streams) >= 0.95 * plain


@pytest.mark.slow
@by_processor("avx2", "avx512")
@pytest.mark.parametrize("agreement", [0.0, 0.8])
def test_half_the_cores_taken_away_change_no_decision_for_long(
    processor: Processor, agreement: float
) -> None:
    """Steps take twice as long within a minute, and then as before."""
    machine = VirtualMachine(processor, agreement=agreement)
    machine.run(300 * processor.large_s[0])
    before = machine.run(200 * processor.large_s[0])
    for number in range(10):
        machine.slowness = 1.0 + 0.1 * number
        machine.run(20 * processor.large_s[0])
    machine.slowness = 2.0
    machine.run(2.0)
    assert machine.run(10.0) >= 0.9 * before / 2.0
    machine.slowness = 1.0
    machine.run(2.0)
    assert machine.run(10.0) >= 0.9 * before


@pytest.mark.slow
@by_processor("avx2", "avx512")
@pytest.mark.parametrize("slowness", [2.0, 3.0])
def test_a_core_that_is_taken_away_at_once_is_followed(
    processor: Processor, slowness: float
) -> None:
    """Or a laptop that throttles."""
    machine = VirtualMachine(processor, agreement=0.8)
    machine.run(300 * processor.large_s[0])
    before = machine.run(200 * processor.large_s[0])
    machine.slowness = slowness
    machine.run(2.0)
    assert machine.run(10.0) >= 0.85 * before / slowness


@pytest.mark.slow
@by_processor("avx512")
@pytest.mark.parametrize("jump_s", [3600.0, -3600.0])
@pytest.mark.parametrize("agreement", [0.0, 0.8])
def test_a_clock_that_jumps_changes_little(
    processor: Processor, jump_s: float, agreement: float
) -> None:
    machine = VirtualMachine(processor, agreement=agreement)
    machine.run(300 * processor.large_s[0])
    before = machine.run(200 * processor.large_s[0])
    machine.lag_s = jump_s
    machine.run(2.0)
    assert machine.run(200 * processor.large_s[0]) >= 0.9 * before


@pytest.mark.slow
@by_processor("avx512")
def test_clients_that_come_and_go_at_once_lose_nothing(processor: Processor) -> None:
    """64 of them with short answers, then nobody, then one: beside plain decoding of the same."""
    rates = []
    for speculates in (True, False):
        machine = VirtualMachine(processor, agreement=0.3, speculates=speculates)
        for _ in range(3):
            machine.run(3.0, num_streams=64, max_tokens=30)
            machine.drain()
            machine.run(2.0)
            machine.drain()
        rates.append(machine.num_tokens / machine.now_s)
        answers = machine.deliveries.values()
        assert {sum(each.num_tokens for each in answer) for answer in answers} == {30, 450}
    assert rates[0] >= 0.98 * rates[1]


@pytest.mark.slow
@by_processor("avx2", "avx512")
@pytest.mark.parametrize("seed", [1, 4, 5])
def test_a_lone_client_is_drafted_for_at_once_after_a_crowd_for_which_guesses_did_not_pay(
    processor: Processor, seed: int
) -> None:
    machine = VirtualMachine(processor, agreement=0.8, seed=seed)
    machine.run(200 * processor.large_s[-2], num_streams=64, max_tokens=60)
    machine.drain()
    seconds = 60 * processor.large_s[0]
    assert machine.run(seconds) >= 1.4 * plain_rate(processor, seconds)


@pytest.mark.slow
@by_processor("avx512")
def test_guesses_saved_three_times_too_slow_are_tried_in_the_end(processor: Processor) -> None:
    """Saved as of a quiet machine, and alone their start can tell."""
    machine = VirtualMachine(
        processor, agreement=0.8, believed=lambda rows: 3.0 if rows > 1 else 1.0
    )
    machine.run(1200 * processor.large_s[0])
    seconds = 400 * processor.large_s[0]
    assert machine.run(seconds) >= 1.5 * plain_rate(processor, seconds)


@pytest.mark.slow
@by_processor("avx2", "avx512")
def test_what_was_learnt_before_a_restart_is_used_and_soon_doubted(processor: Processor) -> None:
    """A pair that was never right costs less; one that is right now is found in two seconds."""
    seconds, sources = 1000 * processor.large_s[0], ("model", "suffix")
    earlier = VirtualMachine(processor, agreement=0.0, sources=sources)
    earlier.run(seconds)
    found = json.loads(json.dumps(earlier.choice.learnt()))
    failing, right = (
        VirtualMachine(processor, agreement=agreement, sources=sources) for agreement in (0.0, 0.8)
    )
    failing.choice.recall(found)
    assert failing.run(seconds) >= 0.994 * plain_rate(processor, seconds)
    right.choice.recall(found)
    right.run(2.0)
    assert right.run(4.0) >= 1.25 * plain_rate(processor, 4.0)


@pytest.mark.slow
def test_a_pair_that_was_right_drafts_at_once_after_a_restart() -> None:
    """What is kept of it says nothing: guesses are tried first in any case."""
    machine = VirtualMachine(AVX512, agreement=0.8)
    machine.run(300 * AVX512.large_s[0])
    assert not machine.choice.learnt()
