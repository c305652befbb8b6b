"""Texts of sessions, scaled down: a trace's conversations, and those of coding agents.

A token of a scaled text stands for `scale` tokens. What is alike in two prompts of the trace or of
a session is alike here, and comes at the same places.
"""

import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from benchmarks.simulate.fleet_trace import BLOCK, Row
from outrider.engine.cache.block_pool import prefix_hashes

_TOKEN_IDS: Final = (5, 400)
"""Of ordinary tokens in the bundled pair."""
_MOST_ANSWER: Final = 8
_TOOLS: Final = 12_000
_FIRST: Final = (24_000, 30_000)
_LAST: Final = 60_000
_RESULT: Final = (2_000, 7_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A request of a replay. `at_s`: seconds since the first one, in the trace's time."""

    at_s: float
    prompt: tuple[int, ...]
    max_tokens: int


def _text(key: str, num_tokens: int) -> tuple[int, ...]:
    rng = random.Random(key)
    return tuple(rng.randrange(*_TOKEN_IDS) for _ in range(num_tokens))


# ---- a trace ----------------------------------------------------------------------------------


def trace_calls(
    rows: Sequence[Row], *, count: int, scale: int, longest: int, least_turns: int, seed: int
) -> list[Call]:
    """Return about `count` requests of whole conversations that are drawn from a trace.

    Drawn are those of at least `least_turns` requests, none with a prompt of more than `longest`
    tokens. Raises SystemExit where there are none.
    """
    conversations: dict[int, list[Row]] = defaultdict(list)
    for number, row in enumerate(rows):
        # All begin with one block; the second one tells conversations apart.
        conversations[row[3][1] if len(row[3]) > 1 else -number].append(row)
    fitting = [
        each
        for each in conversations.values()
        if len(each) >= least_turns and max(row[1] for row in each) <= longest
    ]
    random.Random(seed).shuffle(fitting)
    ends = list(accumulate(map(len, fitting)))
    drawn = [row for each, end in zip(fitting, ends, strict=True) if end <= count for row in each]
    if not drawn:
        raise SystemExit("the trace has no such conversations: fewer turns, or longer prompts?")
    first_s = min(row[0] for row in drawn)
    return [
        Call(
            at_s=at_s - first_s,
            prompt=_trace_prompt(num_prompt, ids, scale),
            max_tokens=min(max(num_answer // scale, 1), _MOST_ANSWER),
        )
        for at_s, num_prompt, num_answer, ids in sorted(drawn, key=lambda row: row[0])
    ]


def _trace_prompt(num_prompt: int, ids: Sequence[int], scale: int) -> tuple[int, ...]:
    tokens = [token for each in ids for token in _text(f"block {each}", BLOCK // scale)]
    return tuple(tokens[: max(num_prompt // scale, 2)])


def working_set(calls: Sequence[Call], block_size: int) -> int:
    """Return the most blocks at one moment that were used and will be used again."""
    first: dict[bytes, int] = {}
    last: dict[bytes, int] = {}
    for number, call in enumerate(calls):
        for block_hash in prefix_hashes(b"", call.prompt, block_size):
            first.setdefault(block_hash, number)
            last[block_hash] = number
    changes = Counter(first.values())
    changes.subtract(last.values())
    return max(accumulate(changes[number] for number in range(len(calls))))


# ---- coding agents ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSession:
    """A coding agent's session: a first prompt, and what its tools return after each answer."""

    prompt: tuple[int, ...]
    results: tuple[tuple[int, ...], ...]

    @property
    def num_tokens(self) -> int:
        """Return the tokens of its last prompt, without the model's answers."""
        return len(self.prompt) + sum(map(len, self.results))


def agent_session(number: int, *, scale: int, seed: int) -> AgentSession:
    """Return a session whose prompt grows from some 24 to some 60 thousand tokens, by turns.

    All sessions begin with the same tools; the repository and the task are each one's own.
    """
    rng, key = random.Random(f"{seed}/{number}"), f"agent {seed}"
    total = rng.randint(*_FIRST)
    own = _text(f"{key}/{number}", (total - _TOOLS) // scale)
    results = []
    while total < _LAST:
        size = min(rng.randint(*_RESULT), max(_LAST - total, _RESULT[0]))
        results.append(_text(f"{key}/{number}/{total}", size // scale))
        total += size
    return AgentSession(prompt=_text(key, _TOOLS // scale) + own, results=tuple(results))
