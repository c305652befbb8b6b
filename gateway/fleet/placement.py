"""Which replica a request is sent to: the one where it costs the least time."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.request import EngineRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLoad:
    """A replica as placement sees it.

    `num_queued_prompt_tokens`: prompt tokens that are still to be computed there; those that its
    cache has (`Placement.expected_hit`) are none. `num_running`: answers being written.
    `seconds_per_prompt_token`: of a long prompt. `seconds_per_output_token`: between two tokens of
    an answer, with the others beside it. `index_lane`: its number in the `BlockIndex`.
    """

    replica_id: str
    num_queued_prompt_tokens: int = 0
    num_running: int = 0
    seconds_per_prompt_token: float = 1e-4
    seconds_per_output_token: float = 2e-2
    index_lane: int = 0

    def work_s(self, num_prompt_tokens: int) -> float:
        """Return the seconds until a prompt with so many tokens to compute is computed there.

        An answer that is being written takes its turn beside each chunk of the prompt.
        """
        num_tokens = self.num_queued_prompt_tokens + num_prompt_tokens
        prompts_s = num_tokens * self.seconds_per_prompt_token
        return prompts_s + self.num_running * self.seconds_per_output_token


class Placement(Protocol):
    """Chooses replicas, and hears what came of its choices."""

    def choose(self, request: EngineRequest, candidates: Sequence[ReplicaLoad]) -> int:
        """Return which of the candidates, of which there is at least one, gets the request."""

    def expected_hit(self, request_id: str) -> int:
        """Return how many prompt tokens the chosen replica should have in its cache.

        Of a request that was placed and whose prompt is not computed yet; 0 for any other.
        """

    def note_prefill(self, request_id: str, num_cached_tokens: int) -> None:
        """Hear from `PrefillDone` how many tokens the cache had. Unknown requests are ignored."""

    def note_end(self, request_id: str) -> None:
        """Hear that a request ended or left its replica. Unknown requests are ignored."""


def least(seconds: Sequence[float], rng: random.Random) -> int:
    """Return the index of the least number; of equal ones, any by chance."""
    best = min(seconds)
    return rng.choice([index for index, each in enumerate(seconds) if each == best])


class LeastWork:
    """The replica with the least work queued, whatever its cache holds."""

    def __init__(self, *, seed: int = 0) -> None:
        self._rng = random.Random(seed)

    def choose(self, request: EngineRequest, candidates: Sequence[ReplicaLoad]) -> int:
        """Return the candidate that would have computed the whole prompt first."""
        num_tokens = len(request.prompt_token_ids) + len(request.resumed_token_ids or ())
        return least([each.work_s(num_tokens) for each in candidates], self._rng)

    def expected_hit(self, request_id: str) -> int:
        """Return 0: nothing is known of caches."""
        return 0

    def note_prefill(self, request_id: str, num_cached_tokens: int) -> None:
        """Learn nothing."""

    def note_end(self, request_id: str) -> None:
        """Forget nothing."""
