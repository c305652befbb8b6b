"""Texts of the sessions' benchmark: what repeats in them, and how much of it comes back at once."""

from typing import Any

import pytest

from benchmarks.sessions.bench_moved_blocks import goals as moved_blocks_goals
from benchmarks.sessions.bench_sessions import goals
from benchmarks.sessions.moved_conversations import WAYS
from benchmarks.sessions.session_texts import Call, agent_session, trace_calls, working_set
from benchmarks.simulate.fleet_trace import Row

ROWS: list[Row] = [
    (10.0, 1500, 64, [0, 1, 2]),
    (11.0, 1000, 64, [0, 9]),
    (12.0, 2048, 6400, [0, 1, 2, 3]),
    (13.0, 1100, 64, [0, 9, 7]),
    (14.0, 9000, 64, [0, 5]),
    (15.0, 9000, 64, [0, 5]),
    (16.0, 1000, 64, [0, 6]),
]


def calls_of(**options: int) -> list[Call]:
    given = {"count": 10, "scale": 32, "longest": 4000, "least_turns": 2, "seed": 0, **options}
    return trace_calls(ROWS, **given)


def test_conversations_are_drawn_whole_and_their_blocks_repeat() -> None:
    calls = calls_of()
    assert [call.at_s for call in calls] == [0.0, 1.0, 2.0, 3.0]
    assert [len(call.prompt) for call in calls] == [46, 31, 64, 34]
    assert calls[2].prompt[:46] == calls[0].prompt
    assert calls[3].prompt[:31] == calls[1].prompt
    assert calls[0].prompt[:16] == calls[1].prompt[:16], "all begin with the same block"
    assert calls[0].prompt[16:31] != calls[1].prompt[16:31]
    assert [call.max_tokens for call in calls] == [2, 2, 8, 2]
    assert len(calls_of(count=3)) == 2
    with pytest.raises(SystemExit, match="no such conversations"):
        calls_of(longest=100)


def test_the_working_set_is_what_will_be_used_again() -> None:
    first, second = tuple(range(32)), tuple(range(100, 148))
    once = tuple(range(200, 264))
    calls = [Call(at_s=0.0, prompt=prompt, max_tokens=1) for prompt in (first, second, once)]
    assert working_set([*calls, calls[1], calls[0]], 16) == 2 + 3
    assert working_set(calls, 16) == 0


def test_agents_begin_with_the_same_tools_and_grow() -> None:
    one, other = (agent_session(number, scale=32, seed=0) for number in range(2))
    assert one.prompt[:375] == other.prompt[:375]
    assert one.prompt[375:400] != other.prompt[375:400]
    assert 24_000 // 32 - 1 <= len(one.prompt) <= 30_000 // 32
    assert 59_000 // 32 <= one.num_tokens <= 62_000 // 32
    assert one == agent_session(0, scale=32, seed=0)


def test_goals_name_the_part_and_the_arm() -> None:
    arms = {
        name: {"mean_gain": 6.0, "p95_gain": 1.5, "equal_answers": 1.0}
        for name in ("off", "disk", "restart")
    }
    met = {goal.words: goal.is_met for goal in goals({"parts": {"replay": {"arms": arms}}})}
    assert met == {
        "replay: p95 off / disk": False,
        "replay: p95 off / restart": False,
        "replay: answers that are equal": True,
    }


def test_one_wrong_answer_one_damaged_file_and_a_way_not_taken_are_goals_missed() -> None:
    def missed(**changes: Any) -> set[str]:
        ways = {
            f"{way}, {mode}": {"answers": 5, "different": 0, "moved_tokens": 95 * (way != "cold")}
            for way in WAYS
            for mode in ("with guesses", "without")
        }
        ways["disk, without"] |= changes
        left = {"num_garbage": 0, "num_damaged": 0, "num_others_left": 0, "num_bytes_later": 9}
        results = {
            "conversations": {"ways": ways, "prompt_tokens": 100},
            "kills": {**left, "budget_bytes": 9, **changes},
            "start": {"open_s": 0.5, **changes},
        }
        return {goal.words for goal in moved_blocks_goals(results) if not goal.is_met}

    assert missed() == set()
    assert missed(different=1) == {"answers that differ"}
    assert missed(moved_tokens=10) == {"moved / all prompt tokens"}
    assert missed(num_damaged=1) == {"kills: garbage, damage, rests"}
    assert missed(num_bytes_later=10) == {"kills: bytes over the budget"}
    assert missed(open_s=2.0) == {"start, s"}
