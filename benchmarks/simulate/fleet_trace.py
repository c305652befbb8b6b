"""Arrivals with prefixes, for a fleet: Mooncake's trace, or texts with the same statistics."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from outrider.gateway.engines.fleet.block_table import Keys

BLOCK: Final = 512
"""Tokens of a block in the trace: equal ids share a prefix."""
MOONCAKE: Final = Path("traces/mooncake_conversation_trace.jsonl")


Row = tuple[float, int, int, list[int]]
"""Seconds, tokens of a prompt and of its answer, and the ids of the prompt's blocks."""


@dataclass(frozen=True, slots=True)
class Call:
    """A request of a fleet: seconds, tokens, and its prompt's blocks as keys, uint64 [n]."""

    at_s: float
    num_prompt: int
    num_answer: int
    keys: Keys


def _key_of(block: int, copy: int) -> int:
    """Return a number that looks as random as a hash."""
    mixed = (block + 1 + copy * 2**40) * 0x9E3779B97F4A7C15
    mixed ^= mixed >> 29
    return mixed * 0xBF58476D1CE4E5B9 % 2**64 or 1


def _call(at_s: float, num_prompt: int, num_answer: int, ids: Sequence[int], copy: int) -> Call:
    full = ids[: num_prompt // BLOCK]  # the engine keeps full blocks
    keys = np.array([_key_of(each, copy) for each in full], dtype=np.uint64)
    return Call(at_s, max(num_prompt, 1), max(num_answer, 1), keys)


def read_mooncake(path: Path, *, most: int | None = None) -> list[Row]:
    """Return the trace's rows. Raises SystemExit naming a line that is none."""
    found = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(line)
                found.append(
                    (
                        row["timestamp"] / 1e3,
                        int(row["input_length"]),
                        int(row["output_length"]),
                        list(row["hash_ids"]),
                    )
                )
            except (KeyError, TypeError, ValueError) as error:
                raise SystemExit(f"{path.name}:{number}: {error}") from None
            if len(found) == most:
                break
    return found


def synthetic(count: int, *, seed: int = 0) -> list[Row]:
    """Return conversations about as long, frequent and repetitive as Mooncake's are."""
    rng = random.Random(f"fleet/{seed}")
    found: list[Row] = []
    dialogues: list[list[int]] = [[0]]  # all begin alike
    at_s, fresh = 0.0, 1
    for _ in range(count):
        at_s += rng.expovariate(3.4)
        begun = dialogues[0]
        if rng.random() < 0.45:
            begun = dialogues[rng.randrange(max(len(dialogues) - 200, 0), len(dialogues))]
        num_new = max(1, int(rng.lognormvariate(2.4, 0.8)))
        ids = [*begun, *range(fresh, fresh + num_new)]
        fresh += num_new
        dialogues.append(ids)
        num_answer = max(1, int(rng.expovariate(1 / 343)))
        found.append((at_s, len(ids) * BLOCK - rng.randrange(BLOCK), num_answer, ids))
    return found


def offered(trace: Sequence[Row], *, rate: float, copies: int = 1) -> list[Call]:
    """Return a trace's requests at a rate a second of all copies together.

    Copies have other texts, and begin at other moments of the first tenth of a copy's time.
    """
    span_s = span_of(trace, rate=rate, copies=copies)
    faster = max(trace[-1][0], 1e-9) / span_s
    calls = [
        _call(at_s / faster + span_s / 10 * copy / copies, prompt, answer, ids, copy)
        for copy in range(copies)
        for at_s, prompt, answer, ids in trace
    ]
    return sorted(calls, key=lambda call: call.at_s)


def span_of(trace: Sequence[Row], *, rate: float, copies: int = 1) -> float:
    """Return the seconds of a copy. From a tenth of them on to their end all copies go on."""
    return len(trace) * copies / rate
