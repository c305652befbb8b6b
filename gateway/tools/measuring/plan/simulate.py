"""Simulated steps of the engine: waiting, prefill and decoding requests, and their times.

One step has several small passes and at most one large pass, as the engine's own
(engine/core.py): decoding comes first, prefill chunks fill the rest of the row budget, a request
starts where its KV fits. Each small pass advances the small answers by a token and the drafts by a
level. Nothing is random but what is asked: the same workload gives the same figures.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Final, Literal

import numpy as np

from outrider.gateway.tools.measuring.plan.curves import PassCurve

TierName = Literal["small", "large"]
TIERS: Final[tuple[TierName, ...]] = ("large", "small")
_MOST_DEPTH: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TierModel:
    """A tier: how long its passes take, and for how many tokens it has KV.

    `host_s` is what a pass costs beside the model (planning, telling), and `host_sequence_s` more
    for each answer in it (sampling, events).
    """

    curve: PassCurve
    num_kv_tokens: int
    host_s: float = 0.0
    host_sequence_s: float = 0.0

    def pass_s(self, num_rows: int, num_sequences: int, context: float) -> float:
        """Seconds of a pass; nothing for no rows."""
        if not num_rows:
            return 0.0
        host_s = self.host_s + num_sequences * self.host_sequence_s
        return host_s + self.curve(num_rows, context)


@dataclass(frozen=True, slots=True, kw_only=True)
class GuessedStep:
    """A step with guesses as it was measured, with so many answers decoding and no prompts.

    `emitted`: tokens of each of them. `num_small_passes`: of the small model in the step.
    """

    num_decoding: float
    seconds: float
    emitted: float
    num_small_passes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """Guesses in a chain: each is right with the chance `acceptance`, if those before it are.

    `measured`: steps as they were, by ascending numbers of answers; they are believed instead.
    """

    acceptance: float
    max_depth: int = _MOST_DEPTH
    measured: tuple[GuessedStep, ...] = ()

    def step_of(self, num_decoding: int, plain_s: Callable[[int], float]) -> GuessedStep:
        """Between two measured steps; beyond the last, guessing gains what it gained there.

        `plain_s`: seconds of a step without guesses, by how many decode.
        """
        numbers = [one.num_decoding for one in self.measured]
        last = self.measured[-1]
        if num_decoding > last.num_decoding:
            factor = plain_s(num_decoding) / plain_s(int(last.num_decoding))
            return replace(last, num_decoding=num_decoding, seconds=last.seconds * factor)
        between = {
            name: float(np.interp(num_decoding, numbers, [getattr(s, name) for s in self.measured]))
            for name in ("seconds", "emitted", "num_small_passes")
        }
        return GuessedStep(num_decoding=num_decoding, **between)

    def emitted(self, depth: int) -> float:
        """Tokens of a step, in the mean (Leviathan et al. 2023, equation 1)."""
        ratio = min(self.acceptance, 0.999)
        return (1 - ratio ** (depth + 1)) / (1 - ratio)


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """The simulated system. `large` or `small` may be missing; speculation needs both."""

    large: TierModel | None = None
    small: TierModel | None = None
    speculation: Speculation | None = None
    max_sequences: int = 64
    max_rows: int = 2048
    window: int | None = None
    """KV tokens that a sequence keeps at most; None: all."""

    def of(self, name: TierName) -> TierModel | None:
        """Return the tier of that name."""
        return self.large if name == "large" else self.small


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRequest:
    """A request. `at_s` None: as soon as one of the users is free (closed loop)."""

    num_prompt: int
    num_answer: int
    tier: TierName = "large"
    at_s: float | None = None


@dataclass(slots=True, kw_only=True)
class Served:
    """Times of a request, in seconds from its arrival. `end_s` is on the simulation's clock."""

    tier: TierName
    num_prompt: int
    num_answer: int
    arrived_s: float
    ttft_s: float = 0.0
    end_s: float = 0.0

    @property
    def tpot_s(self) -> float:
        """Mean seconds between two tokens; 0.0 for an answer of one."""
        if self.num_answer < 2:
            return 0.0
        return (self.end_s - self.arrived_s - self.ttft_s) / (self.num_answer - 1)


@dataclass(slots=True)
class _Running:
    served: Served
    prompt_left: int
    answer_left: float
    num_kv: int


@dataclass(slots=True)
class _Queue:
    """One tier's requests."""

    tier: TierModel
    waiting: deque[Served] = field(default_factory=deque)
    running: list[_Running] = field(default_factory=list)
    num_kv: int = 0

    @property
    def decoding(self) -> list[_Running]:
        return [one for one in self.running if not one.prompt_left]


class Simulation:
    """An engine that serves a list of requests."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._queues: dict[TierName, _Queue] = {
            name: _Queue(tier) for name in TIERS if (tier := system.of(name)) is not None
        }
        self._now_s = 0.0
        # By how many decode; contexts change little enough between two steps of as many.
        self._depth = cache(self._best_depth)

    def run(self, asks: list[SimulatedRequest], *, num_users: int | None = None) -> list[Served]:
        """Serve all requests; with `num_users`, each user sends the next one after its answer.

        Raises ValueError for a request that fits no KV cache, or whose tier does not exist.
        """
        for ask in asks:
            self._check(ask)
        coming = deque(asks)
        done: list[Served] = []
        num_open = 0
        while coming or num_open:
            while coming and self._has_come(coming[0], num_open, num_users):
                ask = coming.popleft()
                num_open += 1
                self._queues[ask.tier].waiting.append(
                    Served(
                        tier=ask.tier,
                        num_prompt=ask.num_prompt,
                        num_answer=ask.num_answer,
                        arrived_s=self._now_s if ask.at_s is None else ask.at_s,
                    )
                )
            if not num_open:  # idle until the next request arrives
                self._now_s = coming[0].at_s or self._now_s
                continue
            ended = self._step()
            num_open -= len(ended)
            done += ended
        return done

    def _check(self, ask: SimulatedRequest) -> None:
        queue = self._queues.get(ask.tier)
        if queue is None:
            raise ValueError(f"a request is for the {ask.tier} tier, which is not planned")
        if self._kept(ask.num_prompt + ask.num_answer) > queue.tier.num_kv_tokens:
            raise ValueError(
                f"a request of {ask.num_prompt} + {ask.num_answer} tokens does not fit the "
                f"{ask.tier} tier's KV cache of {queue.tier.num_kv_tokens} tokens"
            )

    def _has_come(self, ask: SimulatedRequest, num_open: int, num_users: int | None) -> bool:
        if ask.at_s is None:
            return num_users is not None and num_open < num_users
        return ask.at_s <= self._now_s

    def _kept(self, num_tokens: int) -> int:
        window = self._system.window
        return num_tokens if window is None else min(num_tokens, window)

    # ---- one step -----------------------------------------------------------------------------

    def _step(self) -> list[Served]:
        """Plan a step, advance the time, and hand out its tokens."""
        for queue in self._queues.values():
            self._start(queue)
        large, small = self._queues.get("large"), self._queues.get("small")
        guessed = self._guessed(0 if large is None else len(large.decoding))
        seconds = guessed.seconds
        chunks: list[tuple[_Running, int]] = []
        if large is not None and large.running:
            chunks, more_s = self._prompts(large, int(guessed.num_decoding))
            seconds += more_s
        num_passes = max(guessed.num_small_passes, 1.0 if small and small.running else 0.0)
        if small is not None and small.running:
            num_small = len(small.decoding)
            taken, more_s = self._prompts(small, num_small)
            chunks += taken
            seconds += more_s
            # In the passes that guess, its answers are rows more; the others are for them alone.
            beside = int(guessed.num_decoding) if guessed.num_small_passes else 0
            context = _context(small)
            alone_s = small.tier.pass_s(beside, beside, context)
            both_s = small.tier.pass_s(num_small + beside, num_small + beside, context)
            seconds += num_passes * max(both_s - alone_s, 0.0)
        self._now_s += seconds
        ended = self._advance(large, guessed.emitted) + self._advance(small, num_passes)
        return ended + self._prefilled(chunks)

    def _guessed(self, num_decoding: int) -> GuessedStep:
        """Return the decoding step of the large tier, with its guesses, without prompts."""
        nobody = GuessedStep(num_decoding=0, seconds=0.0, emitted=1.0, num_small_passes=0.0)
        large, speculation = self._queues.get("large"), self._system.speculation
        if large is None or not num_decoding:
            return nobody
        context = _context(large)
        if speculation is not None and speculation.measured:
            tier = large.tier
            plain_s = tier.pass_s(num_decoding, num_decoding, context)
            step = speculation.step_of(num_decoding, lambda n: tier.pass_s(n, n, context))
            if step.seconds / step.emitted > plain_s:  # the engine would not guess
                return replace(nobody, num_decoding=num_decoding, seconds=plain_s)
            return step
        depth = self._depth(num_decoding)
        seconds = large.tier.pass_s(num_decoding * (1 + depth), num_decoding, context)
        emitted = 1.0
        if depth:
            assert speculation is not None
            assert self._system.small is not None
            seconds += depth * self._system.small.pass_s(num_decoding, num_decoding, context)
            emitted = speculation.emitted(depth)
        return GuessedStep(
            num_decoding=num_decoding,
            seconds=seconds,
            emitted=emitted,
            num_small_passes=float(depth),
        )

    def _prompts(self, queue: _Queue, num_rows: int) -> tuple[list[tuple[_Running, int]], float]:
        """Prefill chunks beside so many rows, and the seconds that they take more."""
        total, chunks = self._fill(queue, num_rows)
        context, tier = _context(queue), queue.tier
        num_sequences = num_rows + len(chunks)
        without_s = tier.pass_s(num_rows, num_rows, context)
        return chunks, max(tier.pass_s(total, num_sequences, context) - without_s, 0.0)

    def _start(self, queue: _Queue) -> None:
        """Those that wait, in the order of their arrival, while places and KV last."""
        while queue.waiting and len(queue.running) < self._system.max_sequences:
            served = queue.waiting[0]
            num_kv = self._kept(served.num_prompt + served.num_answer)
            if queue.num_kv + num_kv > queue.tier.num_kv_tokens:
                return
            queue.waiting.popleft()
            queue.num_kv += num_kv
            queue.running.append(
                _Running(served, served.num_prompt, float(served.num_answer), num_kv)
            )

    def _fill(self, queue: _Queue, num_rows: int) -> tuple[int, list[tuple[_Running, int]]]:
        """Prefill chunks in what decoding leaves of the row budget."""
        chunks = []
        for one in queue.running:
            left = self._system.max_rows - num_rows
            if not one.prompt_left or left <= 0:
                continue
            size = min(one.prompt_left, left)
            chunks.append((one, size))
            num_rows += size
        return num_rows, chunks

    def _prefilled(self, chunks: list[tuple[_Running, int]]) -> list[Served]:
        """A whole prompt gives its answer's first token."""
        ended = []
        for one, size in chunks:
            one.prompt_left -= size
            if not one.prompt_left:
                one.served.ttft_s = self._now_s - one.served.arrived_s
                one.answer_left -= 1.0
                if one.answer_left <= 0:
                    ended.append(self._end(one))
        return ended

    def _advance(self, queue: _Queue | None, emitted: float) -> list[Served]:
        if queue is None:
            return []
        ended = []
        for one in queue.decoding:
            one.answer_left -= emitted
            if one.answer_left <= 0:
                ended.append(self._end(one))
        return ended

    def _end(self, one: _Running) -> Served:
        queue = self._queues[one.served.tier]
        queue.running.remove(one)
        queue.num_kv -= one.num_kv
        one.served.end_s = self._now_s
        return one.served

    def _best_depth(self, num_decoding: int) -> int:
        """Return the draft depth with the most tokens a second; 0 if drafting does not pay off."""
        system = self._system
        if system.speculation is None or system.large is None or system.small is None:
            return 0
        context = _context(self._queues["large"])

        def rate(depth: int) -> float:
            assert system.large is not None
            assert system.small is not None
            assert system.speculation is not None
            seconds = system.large.pass_s(num_decoding * (1 + depth), num_decoding, context)
            seconds += depth * system.small.pass_s(num_decoding, num_decoding, context)
            return system.speculation.emitted(depth) / seconds

        return max(range(system.speculation.max_depth + 1), key=rate)


def _context(queue: _Queue) -> float:
    """Tokens that a running sequence sees, about."""
    if not queue.running:
        return 0.0
    seen = 0.0
    for one in queue.running:
        served = one.served
        seen += served.num_prompt - one.prompt_left + served.num_answer - one.answer_left
    return seen / len(queue.running)
