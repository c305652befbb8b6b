"""Changes that one worker makes are made by all; the parent's part is the real one."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace
from typing import cast

import pytest
from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from outrider.gateway.contract.answers.outcomes import RequestOutcome
from outrider.gateway.contract.errors.tree import (
    IdempotencyKeyReusedError,
    NotFoundError,
    UnavailableError,
)
from outrider.gateway.experiments.feedback import FeedbackDesk
from outrider.gateway.experiments.feedback_schema import ScoreFeedback
from outrider.gateway.experiments.measure_store import MeasureStore
from outrider.gateway.experiments.recent import RecentRequests
from outrider.gateway.http.edge.idempotency import IdempotentAnswers
from outrider.gateway.http.server.listening import listen
from outrider.gateway.settings.http_bounds import HttpSettings
from outrider.gateway.settings.tree import load_settings
from outrider.gateway.storage.database import Database
from outrider.gateway.tenancy.keys.amounts import LimitSpec
from outrider.gateway.tenancy.keys.keys import Principal
from outrider.gateway.wiring.crew import Crew
from outrider.gateway.workers.line import Handler, Line
from outrider.gateway.workers.process import WorkerProcess
from outrider.gateway.workers.siblings import Siblings


class Member:
    """A worker in this process: its siblings, and what it has in memory."""

    def __init__(self, number: int) -> None:
        end, other = socket.socketpair()
        self.kept: list[str] = []
        self.siblings = Siblings(number, 2, other)
        self.siblings.on_change(self._apply)
        self.siblings.on("say", self._say)
        self.handlers: dict[str, Handler] = {}
        self.line = Line(end, self.handlers)
        self.process = SimpleNamespace(
            number=number, key=number, line=self.line, is_ready=True, is_serving=True
        )

    async def _apply(self, value: str) -> None:
        if value == "nothing":
            raise NotFoundError("there is no such thing")
        self.kept.append(value)

    async def _say(self, value: str) -> str:
        return f"{self.siblings.number}: {value}"


@asynccontextmanager
async def crew(*members: Member) -> AsyncIterator[Crew]:
    with listen("127.0.0.1", 0) as listener:
        crew = Crew(load_settings(environ={}, flags={"server.workers": 2}), listener)
        for member in members:
            process = cast(WorkerProcess, member.process)
            crew.workers[member.siblings.number] = process
            member.handlers.update(crew.handlers(process))
        runs = [run for each in members for run in (each.siblings.run, each.line.run)]
        tasks = [asyncio.create_task(run()) for run in runs]
        try:
            yield crew
        finally:
            for member in members:
                member.line.close()
            await asyncio.gather(*tasks)


async def test_changes_of_several_workers_are_made_in_one_order() -> None:
    one, two = Member(1), Member(2)
    async with crew(one, two):
        for member in (one, two):
            await member.siblings.may_change()
        names = [str(i) for i in range(20)]
        makers = [(one, two)[i % 2] for i in range(20)]
        pairs = zip(makers, names, strict=True)
        await asyncio.gather(*(maker.siblings.change(name, name) for maker, name in pairs))
        assert one.kept == two.kept
        assert sorted(one.kept) == sorted(names)


async def test_a_change_that_fails_is_the_makers_alone() -> None:
    one, two = Member(1), Member(2)
    async with crew(one, two) as parent:
        with pytest.raises(UnavailableError, match="still starting"):
            await one.siblings.change("x", "x")
        for member in (one, two):
            await member.siblings.may_change()
        with pytest.raises(NotFoundError, match="no such thing"):
            await one.siblings.change("a", "nothing")
        await two.siblings.change("a", "something")
        assert one.kept == two.kept == ["something"]
        assert [each.value for each in parent.changes.values()] == ["something"]


async def test_a_worker_that_starts_makes_changes_once_it_can() -> None:
    one, two = Member(1), Member(2)
    two.process.is_ready = False
    async with crew(one, two):
        await one.siblings.may_change()
        await one.siblings.change("a", "something")  # does not wait for the other
        assert two.kept == []
        await two.siblings.others("say", "x")  # by now it has been told
        await two.siblings.may_change()
        assert two.kept == ["something"]


async def test_others_are_asked_and_one_that_fails_is_left_out() -> None:
    one, two = Member(1), Member(2)
    async with crew(one, two):
        assert await one.siblings.others("say", "hello") == ["2: hello"]
        assert await two.siblings.others("unknown") == []
        two.process.is_serving = False
        assert await one.siblings.others("say", "hello") == []


async def test_a_key_has_one_answer_whichever_worker_is_asked() -> None:
    """Count the answers that are made for one idempotency key."""

    one, two = Member(1), Member(2)
    http = HttpSettings()
    made: list[int] = []
    has_begun, may_end = asyncio.Event(), asyncio.Event()
    caches = {}
    for member in (one, two):
        cache = IdempotentAnswers.of(http, time.monotonic, elsewhere=member.siblings)
        member.siblings.on("kept_answer", cache.kept_answer)
        caches[member.siblings.number] = cache

    async def asked(number: int, body: bytes) -> Response:
        async def make() -> Response:
            made.append(number)
            has_begun.set()
            await may_end.wait()
            return Response(f"made by {number}")

        scope = {"type": "http", "path": "/x", "headers": [(b"idempotency-key", b"k")]}
        response = await caches[number].answer(Request(scope), body, make, owner="o")
        sent: list[Message] = []

        async def send(message: Message) -> None:
            sent.append(message)

        async def receive() -> Message:
            await asyncio.Event().wait()
            raise AssertionError

        await response(scope, receive, send)
        return Response(sent[1]["body"])

    async with crew(one, two) as parent:
        tasks = [asyncio.create_task(asked(number, b"a")) for number in (2, 1, 2, 1)]
        await has_begun.wait()
        with pytest.raises(IdempotencyKeyReusedError):
            await asked(3 - made[0], b"another")
        may_end.set()
        answers = [(await task).body for task in tasks]
        assert answers == [f"made by {made[0]}".encode()] * 4
        assert len(made) == 1
        # The worker that has the answer ends: the other one answers.
        parent.forget_claims(parent.workers[made[0]])
        assert (await asked(3 - made[0], b"a")).body == f"made by {3 - made[0]}".encode()


async def test_feedback_finds_a_request_that_another_worker_answered() -> None:
    one, two = Member(1), Member(2)
    desks, recents = [], []
    for member in (one, two):
        recents.append(RecentRequests())
        store = MeasureStore(Database(None))
        desk = FeedbackDesk(recents[-1], store, None, CollectorRegistry(), grace_s=0.01)
        desk.siblings = member.siblings
        member.siblings.on("find_request", desk.find_here)
        desks.append(desk)
    principal = Principal(key_id="k", name="k", tenant="k", limits=LimitSpec(usd_per_day=1))
    outcome = partial(RequestOutcome, client_request_id="", key_id="k")
    async with crew(one, two):
        recents[1].observe(outcome(request_id="r1", answer_id="chatcmpl-1"))
        await desks[0].give(principal, _scored("chatcmpl-1"))
        await desks[0].give(principal, _scored("r1"))
        with pytest.raises(NotFoundError):
            await desks[0].give(principal, _scored("r2"))


def _scored(request_id: str) -> ScoreFeedback:
    return ScoreFeedback(request_id=request_id, score=0.5)
