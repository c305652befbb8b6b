"""The loop around an engine: take commands, step, send the step's events. Same for both clients."""

import gc
import logging
from collections.abc import Callable
from functools import partial
from typing import Protocol

from outrider.engine.cache.block_news import BlockChanges, BlockFeed
from outrider.engine.cache.extents import Extent
from outrider.engine.cache.peers import BlocksWanted
from outrider.engine.errors import EngineError, InvalidAdapterError
from outrider.engine.events import AdapterInfo, EngineEvent, EngineInfo, EngineStats
from outrider.engine.request import AdapterRef, EngineRequest
from outrider.engine.sequences.pinned_prompts import PinnedPrompts
from outrider.gateway.engines.backends.block_server import BlockServer
from outrider.gateway.engines.backends.wire import (
    Abort,
    AdapterReply,
    BlocksChanged,
    BlocksReset,
    Command,
    Crashed,
    Events,
    GetBlocks,
    GetStats,
    KeepOnTier,
    PrepareAdapter,
    PullBlocks,
    Refused,
    Reply,
    StatsReply,
    Stop,
    Submit,
    SwitchTier,
    Unpin,
    join_hashes,
    pack_error,
)
from outrider.verifier.params import Tier

logger = logging.getLogger(__name__)

EXIT_REPORTED = 3
"""Exit status after `LoadFailed` or `Crashed`: the reason has been sent."""

LoadingCallback = Callable[[str, float], None]
"""Called while models load, with what is being done and the share of the work that is done."""


def no_progress(stage: str, fraction: float) -> None:
    """A `LoadingCallback` that ignores the progress."""


class StepEngine(Protocol):
    """The part of `outrider.engine.core.Engine` that the loop needs: synchronous, used from one
    thread.
    """

    def submit(self, request: EngineRequest) -> None:
        """Queue a request. Raises an EngineError when it is refused."""

    def abort(self, request_id: str) -> None:
        """End a request; its `Finished` comes with the next step. Unknown ids are ignored."""

    def switch_tier(self, request_id: str, tier: Tier, *, keeps_answer: bool = False) -> None:
        """Hand a request to another tier. Unknown ids are ignored.

        Raises an EngineError when the tier cannot take it; it goes on where it is then.
        """

    def keep_on_tier(self, request_id: str) -> None:
        """Hold the answer no longer at its end; one that is held ends. Unknown ids are ignored."""

    @property
    def pins(self) -> PinnedPrompts:
        """The prompts that are kept by name."""

    def prepare_adapter(
        self, ref: AdapterRef, on_prepared: Callable[[AdapterInfo | InvalidAdapterError], None]
    ) -> None:
        """Read and check an adapter beside the steps; `on_prepared` is told what came of it."""

    def export_blocks(self, wanted: BlocksWanted) -> list[Extent] | None:
        """Return cached blocks for another engine; None where the last of them is not there.

        Raises an EngineError for blocks that this engine cannot have.
        """

    @property
    def blocks(self) -> BlockFeed:
        """News of the prefix cache."""

    @property
    def overlaps(self) -> bool:
        """True if `step` calls `while_busy` during the device's work, not before it."""

    def step(
        self,
        on_events: Callable[[list[EngineEvent]], None] | None = None,
        while_busy: Callable[[], None] | None = None,
    ) -> list[EngineEvent]:
        """Run one step. An empty list when there was nothing to do.

        What is handed to `on_events` in the middle of the step is not returned again. `while_busy`
        is called once, if possible while the device computes.
        """

    @property
    def has_work(self) -> bool:
        """Return whether the next step would do something."""

    def stats(self) -> EngineStats:
        """A snapshot of gauges and counters."""

    def info(self) -> EngineInfo:
        """Return the loaded models."""


class Channel(Protocol):
    """The loop's end of the line to the gateway."""

    def receive(self, *, wait: bool) -> list[Command]:
        """Return all commands that have arrived. With `wait`, sleep until there is at least one."""

    def send(self, reply: Reply, /) -> None:
        """Send one reply without waiting for the other side."""


def serve_loaded(engine: StepEngine, channel: Channel) -> int:
    """Serve until `Stop`, in a process that does nothing else. Returns the exit status."""
    # What was allocated while loading stays: the collector need not walk it in mid-stream.
    gc.collect()
    gc.freeze()
    try:
        run_step_loop(engine, channel)
    except Exception as error:
        logger.exception("engine step failed")
        channel.send(Crashed(pack_error(error)))
        return EXIT_REPORTED
    finally:
        gc.unfreeze()  # or Triton's bindings report what is left at the end as leaked
    return 0


def run_step_loop(engine: StepEngine, channel: Channel) -> None:
    """Serve until `Stop`. What `Engine.step` raises is not caught here.

    Where the engine overlaps, a step's events are packed and sent, and new commands taken in, while
    the device is busy with the next step.
    """
    blocks = _BlockSender(engine, channel)
    unsent: list[EngineEvent] = []
    arrived: list[Command] = []

    def send_unsent() -> None:
        if unsent:
            channel.send(Events.pack(unsent))
            unsent.clear()

    def send_events(events: list[EngineEvent]) -> None:
        send_unsent()  # they came first
        channel.send(Events.pack(events))

    def while_busy() -> None:
        send_unsent()
        arrived.extend(channel.receive(wait=False))

    while True:
        commands = arrived + channel.receive(wait=not (arrived or engine.has_work))
        arrived.clear()
        for command in commands:
            if isinstance(command, Stop):
                send_unsent()
                return
            if isinstance(command, GetBlocks | PullBlocks):
                blocks.take(command)
            else:
                _apply(command, engine, channel)
        unsent += engine.step(send_events, while_busy)
        engine.blocks.deliver()
        blocks.server.step(is_idle=not engine.has_work)
        if not (engine.overlaps and engine.has_work):
            send_unsent()


class _BlockSender:
    """Sends the news of a prefix cache, from when they are first asked for, and its blocks."""

    def __init__(self, engine: StepEngine, channel: Channel) -> None:
        self._feed = engine.blocks
        self._channel = channel
        self._generation: int | None = None
        self.server = BlockServer(engine.export_blocks, channel.send)

    def take(self, command: GetBlocks | PullBlocks) -> None:
        """Carry out a command about blocks."""
        if isinstance(command, PullBlocks):
            self.server.add(command)
        else:
            self._reset()

    def _reset(self) -> None:
        """Send all that is kept."""
        if self._generation is None:
            self._generation = 0
            self._feed.add_sink(self._send)
        kept = join_hashes(self._feed.hashes())  # it may send changes first
        stored = self._feed.stored
        self._channel.send(
            BlocksReset(self._generation, kept)
            if stored is None
            else BlocksReset(self._generation, kept, stored.codes(), stored.names_key)
        )

    def _send(self, changes: BlockChanges) -> None:
        assert self._generation is not None
        self._generation += 1
        kept = join_hashes(block.block_hash for block in changes.kept)
        dropped = join_hashes(changes.dropped)
        self._channel.send(
            BlocksChanged(self._generation, kept, dropped, changes.stored, changes.unstored)
        )


def _apply(command: Command, engine: StepEngine, channel: Channel) -> None:
    """Carry out one command other than `Stop`."""
    match command:
        case Submit(request):
            _submit(request, engine, channel)
        case Abort(request_id):
            engine.abort(request_id)
        case SwitchTier(request_id, tier, keeps_answer):
            try:
                engine.switch_tier(request_id, tier, keeps_answer=keeps_answer)
            except EngineError as error:
                # switch_tier has no reply to carry the error. The request goes on where it is, and
                # must not be held at its end: no later event would release it.
                logger.warning("switch_tier refused request_id=%s reason=%s", request_id, error)
                engine.keep_on_tier(request_id)
        case KeepOnTier(request_id):
            engine.keep_on_tier(request_id)
        case Unpin(tenant, name):
            engine.pins.release(tenant, name)
        case GetStats(call_id):
            channel.send(StatsReply(call_id, engine.stats()))
        case PrepareAdapter(call_id, ref):
            engine.prepare_adapter(ref, partial(_reply_adapter, channel, call_id))


def _submit(request: EngineRequest, engine: StepEngine, channel: Channel) -> None:
    try:
        engine.submit(request)
    except EngineError as error:
        channel.send(Refused(request.request_id, pack_error(error)))
    except Exception as error:  # one request's own values must not end the others
        logger.exception("request could not be queued request_id=%s", request.request_id)
        channel.send(Refused(request.request_id, pack_error(error)))


def _reply_adapter(
    channel: Channel, call_id: int, outcome: AdapterInfo | InvalidAdapterError
) -> None:
    """Send what came of an adapter's reading."""
    if isinstance(outcome, InvalidAdapterError):
        channel.send(AdapterReply(call_id, None, pack_error(outcome)))
    else:
        channel.send(AdapterReply(call_id, outcome, None))
