"""Places a request at the replica where it costs the least time."""

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from outrider.engine.request import EngineRequest
from outrider.gateway.engines.fleet.block_table import Ints

Floats = npt.NDArray[np.float64]

_FIRST_ROWS: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLoad:
    """A replica as placement sees it."""

    replica_id: str
    num_queued_prompt_tokens: int = 0
    """Still to be computed there. Those that its cache has (`Placement.expected_hit`) do not
    count."""
    num_running: int = 0
    """Answers being written."""
    seconds_per_prompt_token: float = 1e-4
    """Seconds that a token of a long prompt takes."""
    seconds_per_output_token: float = 2e-2
    """Between two tokens of an answer, with the others beside it."""
    seconds_per_moved_token: float = math.inf
    """Seconds that a token's keys and values take to come from another replica. inf: never do."""
    seconds_per_stored_token: float = math.inf
    """Seconds that a token's keys and values take to come from its disk."""
    index_lane: int = 0
    """Its number in the `BlockIndex`."""


@dataclass(frozen=True, slots=True)
class Loads:
    """What the candidates for a request have to do, [n] each: one candidate a column."""

    lanes: Ints
    figures: Floats
    """[6, n]: queued prompt tokens, answers being written, and the seconds that a token of a
    prompt, one of an answer, one that comes from another replica, and one from a disk take."""

    @classmethod
    def of(cls, loads: Iterable[ReplicaLoad]) -> "Loads":
        """Return single loads as columns."""
        board = LoadBoard()
        return board.take(np.array([board.add(load) for load in loads], dtype=np.int64))

    def __len__(self) -> int:
        return len(self.lanes)

    def work_s(self, num_prompt_tokens: int | Floats) -> Floats:
        """Return the seconds until a prompt with so many tokens to compute is computed, [n].

        An answer that is being written takes its turn beside each chunk of the prompt.
        """
        num_queued, num_running, prompt_token_s, output_token_s = self.figures[:4]
        seconds: Floats = (num_queued + num_prompt_tokens) * prompt_token_s
        seconds += num_running * output_token_s
        return seconds

    @property
    def moved_token_s(self) -> Floats:
        """Return the seconds that a token from another replica takes, inf where none comes, [n]."""
        moved: Floats = self.figures[4]
        return moved

    @property
    def stored_token_s(self) -> Floats:
        """Return the seconds that a token from the candidate's own disk takes, [n]."""
        stored: Floats = self.figures[5]
        return stored


class LoadBoard:
    """The loads of a fleet's replicas as columns, so that all are weighed at once."""

    def __init__(self) -> None:
        self._lanes = np.zeros(_FIRST_ROWS, dtype=np.int64)
        self._figures = np.zeros((6, _FIRST_ROWS))
        self._free = list(range(_FIRST_ROWS - 1, -1, -1))

    def add(self, load: ReplicaLoad) -> int:
        """Return the number of a new replica's column."""
        if not self._free:
            size = len(self._lanes)
            self._lanes = np.pad(self._lanes, (0, size))
            self._figures = np.pad(self._figures, ((0, 0), (0, size)))
            self._free = list(range(2 * size - 1, size - 1, -1))
        number = self._free.pop()
        self.put(number, load)
        return number

    def put(self, number: int, load: ReplicaLoad) -> None:
        """Note a replica's load."""
        self._lanes[number] = load.index_lane
        self._figures[:, number] = (
            load.num_queued_prompt_tokens,
            load.num_running,
            load.seconds_per_prompt_token,
            load.seconds_per_output_token,
            load.seconds_per_moved_token,
            load.seconds_per_stored_token,
        )

    def remove(self, number: int) -> None:
        """Give a column back."""
        self._free.append(number)

    def take(self, numbers: Ints) -> Loads:
        """Return the columns with these numbers, in this order."""
        return Loads(self._lanes[numbers], self._figures[:, numbers])


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedElsewhere:
    """A replica that has more of a placed request's text than the chosen one."""

    lane: int
    """Its number in the `BlockIndex`."""
    num_tokens: int


class Placement(Protocol):
    """Chooses replicas, and hears what came of its choices."""

    def choose(self, request: EngineRequest, candidates: Loads) -> int:
        """Return which of the candidates, of which there is at least one, gets the request."""

    def expected_hit(self, request_id: str) -> int:
        """Return how many prompt tokens the chosen replica should have in its cache.

        Of a request that was placed and whose prompt is not computed yet; 0 for any other.
        """

    def source(self, request_id: str) -> CachedElsewhere | None:
        """Return where the chosen replica should get blocks from; None where it should compute."""

    def note_prefill(self, request_id: str, num_cached_tokens: int) -> None:
        """Hear from `PrefillDone` how many tokens the cache had. Unknown requests are ignored."""

    def note_end(self, request_id: str) -> None:
        """Hear that a request ended or left its replica. Unknown requests are ignored."""


def least(seconds: Floats, rng: random.Random) -> int:
    """Return the index of the least number; of equal ones, any by chance."""
    best = np.flatnonzero(seconds == seconds.min())
    return int(best[rng.randrange(len(best))])


class LeastWork:
    """The replica with the least work queued, whatever its cache holds."""

    def __init__(self, *, seed: int = 0) -> None:
        self._rng = random.Random(seed)

    def choose(self, request: EngineRequest, candidates: Loads) -> int:
        """Return the candidate that would have computed the whole prompt first."""
        num_tokens = len(request.prompt_token_ids) + len(request.resumed_token_ids or ())
        return least(candidates.work_s(num_tokens), self._rng)

    def expected_hit(self, request_id: str) -> int:
        """Return 0: nothing is known of caches."""
        return 0

    def source(self, request_id: str) -> CachedElsewhere | None:
        """Return None: nothing is known of caches."""
        return None

    def note_prefill(self, request_id: str, num_cached_tokens: int) -> None:
        """Learn nothing."""

    def note_end(self, request_id: str) -> None:
        """Forget nothing."""
