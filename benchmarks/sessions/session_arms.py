"""Engines that answer the same sessions, with a folder for keys and values and without."""

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from benchmarks.sessions.session_texts import Call
from outrider.engine.cache.extent_folder import ExtentFolder
from outrider.engine.cache.extent_store import ExtentStore
from outrider.engine.cache.sealing import Seal
from outrider.engine.core import Engine
from outrider.engine.events import EngineEvent, Finished, StoreStats, TokensEmitted
from outrider.engine.model.protocol import CausalModel
from outrider.engine.passes.runner import ModelRunner
from outrider.engine.request import EngineRequest
from outrider.verifier.params import SamplingParams

_WARM_UP_TOKENS: Final = 64
_BUDGET_BYTES: Final = 2**35


@dataclass(slots=True, kw_only=True)
class Answer:
    """One answer. Times are seconds since it was asked for."""

    asked_s: float
    ttft_s: float = 0.0
    wall_s: float = 0.0
    thread_s: float = 0.0
    """Processor time of the engine's thread, where it was asked for alone."""
    token_ids: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0


class Arm:
    """An engine that may have a folder, may be restarted, and has a clock of its own.

    Its clock stands still while other arms run: `now_s` is the time that it has spent.
    """

    def __init__(self, model: CausalModel, *, num_blocks: int, folder: Path | None) -> None:
        self._model = model
        self._num_blocks = num_blocks
        self._folder = folder
        self._numbers = itertools.count()
        self._store: ExtentStore | None = None
        self._past = StoreStats()  # of engines that were restarted
        self.now_s = 0.0
        self.answers: dict[str, Answer] = {}
        self.num_open = 0
        self._start()

    def _start(self) -> None:
        if self._folder is not None:
            folder = ExtentFolder(
                self._folder, seal=Seal(bytes(32)), budget_bytes=_BUDGET_BYTES, ttl_s=1e6
            )
            self._store = ExtentStore(folder)
        runner = ModelRunner(model=self._model, num_blocks=self._num_blocks)
        self._engine = Engine(runners={"large": runner}, store=self._store)
        now_s = self.now_s
        del self.answers[self.ask(tuple(range(5, 5 + _WARM_UP_TOKENS)), max_tokens=2)]
        self.now_s = now_s  # starting is no one's time

    def restart(self) -> None:
        """Go on with an engine whose memory is empty. No answer may be open."""
        self.settle()
        self.close()
        self._past = self.store_stats
        self._start()

    @property
    def store_stats(self) -> StoreStats:
        """Return what became of blocks, restarts or not. Gauges are of no meaning."""
        now = self._engine.stats().store
        return StoreStats(
            num_restored_tokens=self._past.num_restored_tokens + now.num_restored_tokens,
            num_read_bytes=self._past.num_read_bytes + now.num_read_bytes,
            num_written_bytes=self._past.num_written_bytes + now.num_written_bytes,
            num_dropped=self._past.num_dropped + now.num_dropped,
        )

    def submit(self, prompt: tuple[int, ...], *, max_tokens: int, asked_s: float) -> str:
        """Ask for an answer, as of a moment of the arm's clock; return its name."""
        name = f"{next(self._numbers)}"
        request = EngineRequest(
            request_id=name,
            prompt_token_ids=prompt,
            tier="large",
            sampling=SamplingParams(max_tokens=max_tokens),
        )
        begun_s = time.perf_counter()
        self._engine.submit(request)
        self.now_s += time.perf_counter() - begun_s
        self.answers[name] = Answer(asked_s=asked_s)
        self.num_open += 1
        return name

    @property
    def has_work(self) -> bool:
        """True if a step would do anything, if only to write what was answered."""
        return self._engine.has_work

    def step(self) -> None:
        """Run a step; its time is the arm's."""
        begun_s = time.perf_counter()
        events = self._engine.step()
        self.now_s += time.perf_counter() - begun_s
        for event in events:
            self._note(event)

    def _note(self, event: EngineEvent) -> None:
        if isinstance(event, TokensEmitted):
            answer = self.answers[event.request_id]
            answer.ttft_s = answer.ttft_s or self.now_s - answer.asked_s
            answer.token_ids += event.token_ids
        elif isinstance(event, Finished):
            answer = self.answers[event.request_id]
            answer.wall_s = self.now_s - answer.asked_s
            answer.num_cached_tokens = event.stats.num_cached_tokens
            self.num_open -= 1

    def ask(self, prompt: tuple[int, ...], *, max_tokens: int) -> str:
        """Have a prompt answered, alone; return the answer's name."""
        begun_s = time.thread_time()
        name = self.submit(prompt, max_tokens=max_tokens, asked_s=self.now_s)
        while self.num_open:
            self.step()
        self.answers[name].thread_s = time.thread_time() - begun_s
        return name

    def settle(self) -> None:
        """Have all written that was answered, in a pause that is nobody's time."""
        while self._engine.has_work:
            self._engine.step()
        if self._store is not None:
            self._store.flush()

    def close(self) -> None:
        """End the threads."""
        if self._store is not None:
            self._store.close()


class Replay:
    """Calls of a trace, answered by an arm as they arrive. The arm's clock begins anew.

    `restart_after`: of how many calls each; then the arm answers what is open and begins anew.
    """

    def __init__(self, arm: Arm, calls: Sequence[Call], *, restart_after: int | None) -> None:
        self.arm = arm
        self._calls = calls
        self._restart_after = restart_after
        arm.now_s = 0.0
        self._num_asked = 0
        self._next_restart = restart_after or len(calls)
        self.busy_s = 0.0

    @property
    def num_calls(self) -> int:
        """Count the calls."""
        return len(self._calls)

    @property
    def is_done(self) -> bool:
        """True if all calls are answered."""
        return self._num_asked == len(self._calls) and not self.arm.num_open

    @property
    def num_answered(self) -> int:
        """Count the calls that are answered."""
        return self._num_asked - self.arm.num_open

    def advance(self, until_s: float) -> None:
        """Go on until that moment of the arm's clock."""
        arm = self.arm
        while not self.is_done and arm.now_s < until_s:
            self._submit()
            if arm.has_work:
                begun_s = arm.now_s
                arm.step()
                self.busy_s += arm.now_s - begun_s
            elif self._num_asked < len(self._calls):  # nothing happens until the next one comes
                next_s = self._calls[self._num_asked].at_s
                arm.now_s = max(arm.now_s, min(next_s, until_s))

    def _submit(self) -> None:
        while self._num_asked < len(self._calls):
            call = self._calls[self._num_asked]
            if call.at_s > self.arm.now_s:
                return
            if self._restart_after and self._num_asked == self._next_restart:
                if self.arm.num_open:
                    return
                self.arm.restart()
                self._next_restart += self._restart_after
            self.arm.submit(call.prompt, max_tokens=call.max_tokens, asked_s=call.at_s)
            self._num_asked += 1
