"""The order of commands, steps and replies where events are sent beside the next step."""

from collections.abc import Callable

from outrider.engine.cache.block_news import BlockFeed, BlockNews
from outrider.engine.cache.block_pool import BlockPool
from outrider.engine.events import EngineEvent, Finished, TokensEmitted
from outrider.gateway.engines.backends.step_loop import run_step_loop
from outrider.gateway.engines.backends.wire import (
    Abort,
    BlocksChanged,
    BlocksReset,
    Command,
    Events,
    GetBlocks,
    Reply,
    Stop,
    Submit,
)
from tests.gateway.scripted_engine import ScriptedEngine, make_request


class LoggingEngine(ScriptedEngine):
    """Notes what happens when: steps, and the replies that its channel is given meanwhile."""

    def __init__(self, log: list[str], *, overlaps: bool) -> None:
        super().__init__(overlaps=overlaps)
        self._log = log

    def step(
        self, on_events: object = None, while_busy: Callable[[], None] | None = None
    ) -> list[EngineEvent]:
        self._log.append("launch")
        events = super().step(on_events, while_busy)
        self._log.append("result")
        return events


class ListChannel:
    """Commands come in the given batches, one batch a call; None: nothing has come."""

    def __init__(self, log: list[str], batches: list[list[Command]]) -> None:
        self._log = log
        self._batches = batches
        self.events: list[EngineEvent] = []

    def receive(self, *, wait: bool) -> list[Command]:
        if wait:  # would sleep: everything that happened must have been sent
            self._log.append("sleep")
            while self._batches and not self._batches[0]:
                self._batches.pop(0)
        return self._batches.pop(0) if self._batches else [Stop()] if wait else []

    def send(self, reply: Reply, /) -> None:
        assert isinstance(reply, Events)
        self._log.append("send")
        self.events += reply.unpack()


def serve(
    batches: list[list[Command]], *, overlaps: bool
) -> tuple[list[str], list[EngineEvent], LoggingEngine]:
    log: list[str] = []
    engine = LoggingEngine(log, overlaps=overlaps)
    channel = ListChannel(log, batches)
    run_step_loop(engine, channel)
    return log, channel.events, engine


def test_events_are_sent_beside_the_next_step_and_at_once_behind_the_last() -> None:
    log, events, _ = serve([[Submit(make_request("a", max_tokens=3))]], overlaps=True)
    plain_log, plain_events, _ = serve([[Submit(make_request("a", max_tokens=3))]], overlaps=False)
    assert events == plain_events
    assert isinstance(events[-1], Finished)
    first_send = log.index("send")
    assert log[first_send - 1] == "launch", "the first step's events wait for the second's launch"
    assert plain_log[plain_log.index("send") - 1] == "result"
    last_result = len(log) - 1 - log[::-1].index("result")
    assert log[last_result + 1 :] == ["send", "sleep"], "nothing is kept back over a sleep"


def test_commands_that_come_beside_a_step_are_carried_out_behind_it() -> None:
    requests = [make_request(name, max_tokens=4) for name in "ab"]
    batches: list[list[Command]] = [[Submit(requests[0])], [Submit(requests[1])], [Abort("a")]]
    _, events, engine = serve(batches, overlaps=True)
    finished = {
        event.request_id: event.finish_reason for event in events if isinstance(event, Finished)
    }
    assert finished == {"a": "abort", "b": "length"}
    assert not engine.running
    tokens = [
        token
        for event in events
        if isinstance(event, TokensEmitted) and event.request_id == "b"
        for token in event.token_ids
    ]
    assert len(tokens) == 4


def test_a_stop_sends_the_pending_events() -> None:
    batches: list[list[Command]] = [[Submit(make_request("a", max_tokens=50))], [], [Stop()]]
    log, events, _ = serve(batches, overlaps=True)
    assert log[-1] == "send"
    assert events


class NewsChannel(ListChannel):
    """Takes any reply."""

    def __init__(self, batches: list[list[Command]]) -> None:
        super().__init__([], batches)
        self.replies: list[Reply] = []

    def send(self, reply: Reply, /) -> None:
        self.replies.append(reply)


class CachingEngine(ScriptedEngine):
    """Publishes a block in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(num_blocks=2, block_size=1)
        self.blocks = BlockFeed([BlockNews(self.pool)])

    def step(
        self, on_events: object = None, while_busy: Callable[[], None] | None = None
    ) -> list[EngineEvent]:
        if self.has_work:
            block = self.pool.allocate()
            self.pool.publish(block, bytes([self.num_steps]) * 16)
            self.pool.release([block])
        return super().step(on_events, while_busy)


def test_news_of_blocks_are_numbered_and_a_reset_begins_anew() -> None:
    submit = Submit(make_request("a", max_tokens=6))
    channel = NewsChannel([[submit], *[[]] * 4, [GetBlocks()], [], [], [GetBlocks()]])
    run_step_loop(CachingEngine(), channel)

    news = [r for r in channel.replies if isinstance(r, BlocksChanged | BlocksReset)]
    kept: set[bytes] = set()
    for number, message in enumerate(news):
        if isinstance(message, BlocksReset):
            assert message.generation == news[number - 1].generation if number else True
            kept = set()
        elif number:
            assert message.generation == news[number - 1].generation + 1
            assert message.dropped, "two blocks hold two hashes"
            kept -= {message.dropped}
        kept |= {message.kept[i : i + 8] for i in range(0, len(message.kept), 8)}
        assert len(kept) == 2
    assert [type(message).__name__ for message in news].count("BlocksReset") == 2
    assert kept == {bytes([number]) * 8 for number in (4, 5)}


def test_news_of_blocks_are_sent_to_no_gateway_that_did_not_ask() -> None:
    channel = NewsChannel([[Submit(make_request("a", max_tokens=4))]])
    run_step_loop(CachingEngine(), channel)
    assert {type(reply) for reply in channel.replies} == {Events}
