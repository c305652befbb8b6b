"""Requests whose adapter is being read, or lacks room: they wait here, the step loop goes on."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from outrider.engine.adapters.bank import AdapterBank
from outrider.engine.adapters.read_adapter import Adapter, read_adapter
from outrider.engine.adapters.shared_adapter import read_shared_adapter
from outrider.engine.config import EngineConfig
from outrider.engine.errors import InvalidAdapterError, InvalidRequestError
from outrider.engine.events import AdapterInfo
from outrider.engine.parallel.runner import ParallelRunner
from outrider.engine.passes.runner import ModelRunner
from outrider.engine.request import AdapterRef, EngineRequest
from outrider.engine.sequences.sequence import Sequence
from outrider.verifier.params import Tier

OnPrepared = Callable[[AdapterInfo | InvalidAdapterError], None]


class AdapterQueue:
    """Gives each sequence its adapters, and takes them back.

    A sequence has either all of its request's adapters or none, so that two of them never wait for
    what the other one holds.
    """

    def __init__(
        self,
        runners: Mapping[Tier, ModelRunner],
        config: EngineConfig,
        *,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._runners = runners
        self._banks = {
            tier: AdapterBank(
                partial(_read_for, runner, config.max_adapter_bytes),
                max_resident=config.max_adapters,
                max_bytes=config.max_adapter_bytes,
            )
            for tier, runner in runners.items()
        }
        self._sleep = sleep
        self._waiting: dict[str, Sequence] = {}
        self._calls: list[tuple[AdapterRef, OnPrepared]] = []

    def __len__(self) -> int:
        """Count how many sequences wait."""
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        """True if a request waits for its adapters."""
        return request_id in self._waiting

    @property
    def is_called(self) -> bool:
        """True if `prepare` has an answer to come."""
        return bool(self._calls)

    def sequences(self) -> Iterator[Sequence]:
        """The sequences that wait."""
        return iter(self._waiting.values())

    def num_resident(self, tier: Tier) -> tuple[int, int]:
        """Return (adapters, bytes) that are resident of a tier."""
        bank = self._banks[tier]
        return bank.num_resident, bank.num_bytes

    def check(self, request: EngineRequest) -> None:
        """Raise InvalidRequestError for an adapter of a tier that is not loaded."""
        for ref in request.adapters:
            if ref.tier not in self._banks:
                raise InvalidRequestError(
                    f"the adapter {ref.name!r} is for the {ref.tier} tier, which is not loaded"
                )

    def add(self, sequence: Sequence) -> bool:
        """Give a sequence its adapters; False where it waits for them.

        An adapter that cannot be read is told of by `take_ready`.
        """
        if not sequence.request.adapters:
            return True
        with suppress(InvalidAdapterError):
            if not self._waiting and self._attach(sequence):
                return True
        self._waiting[sequence.request_id] = sequence
        return False

    def discard(self, request_id: str) -> bool:
        """Forget a request that ended; False if it did not wait."""
        return self._waiting.pop(request_id, None) is not None

    def forget(self, sequence: Sequence) -> None:
        """A sequence has ended, or never began: nothing of it remains here."""
        self.discard(sequence.request_id)
        if sequence.adapters:
            for ref in sequence.request.adapters:
                self._banks[ref.tier].release(ref)
            sequence.adapters.clear()

    def prepare(self, ref: AdapterRef, on_prepared: OnPrepared) -> None:
        """Read and check an adapter beside the steps, without a request."""
        if ref.tier in self._banks:
            self._calls.append((ref, on_prepared))
        else:
            reason = f"{ref.name} is for the {ref.tier} tier, which is not loaded"
            on_prepared(InvalidAdapterError(reason))

    def take_ready(self) -> Iterator[tuple[Sequence, InvalidAdapterError | None]]:
        """Sequences that have their adapters now, or with the reason why they get none."""
        self._forget_unwanted()
        for request_id, sequence in list(self._waiting.items()):
            error: InvalidAdapterError | None = None
            try:
                if not self._attach(sequence):
                    continue
            except InvalidAdapterError as found:
                error = InvalidAdapterError(str(found))
            self.discard(request_id)
            yield sequence, error
        self._calls = [call for call in self._calls if not self._answer(*call)]

    def _answer(self, ref: AdapterRef, on_prepared: OnPrepared) -> bool:
        """Say what came of a call; False where it must go on waiting."""
        bank = self._banks[ref.tier]
        outcome: AdapterInfo | InvalidAdapterError
        try:
            if not bank.is_available(ref):
                return False
            outcome = bank.info(ref)
        except InvalidAdapterError as error:
            outcome = InvalidAdapterError(str(error))
        on_prepared(outcome)
        return True

    def pause(self, timeout_s: float) -> None:
        """Wait a little: to be called by an idle engine."""
        self._sleep(timeout_s)

    def _forget_unwanted(self) -> None:
        """Let go what was read for requests that ended meanwhile."""
        wanted = {ref for each in self._waiting.values() for ref in each.request.adapters}
        wanted.update(ref for ref, _ in self._calls)
        for bank in self._banks.values():
            bank.keep_only(wanted)

    def _attach(self, sequence: Sequence) -> bool:
        """Give a sequence all of its adapters, if all are there."""
        refs = sequence.request.adapters
        if not all(self._banks[ref.tier].is_available(ref) for ref in refs):
            return False
        for ref in refs:
            sequence.adapters[ref.tier] = self._banks[ref.tier].hold(ref).weights
        # An empty view of the same model: what the prefix cache has under the adapter is found.
        sequence.view = self._runners[sequence.tier].new_view(
            sequence.request.cache_salt, sequence.adapters.get(sequence.tier)
        )
        return True


def _read_for(runner: ModelRunner, max_bytes: int, folder: Path) -> Adapter:
    """Read an adapter for a runner's model, in a thread beside the steps."""
    model = runner.model
    if isinstance(runner, ParallelRunner):
        return read_shared_adapter(folder, runner, max_bytes=max_bytes)
    return read_adapter(
        folder, model.config, dtype=model.dtype, device=model.device, max_bytes=max_bytes
    )
