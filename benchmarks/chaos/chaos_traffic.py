"""Clients of `benchmarks.chaos.chaos`: whom they are, when they ask and leave, what came of it."""

import asyncio
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import httpx

from benchmarks.chaos.chaos_experiments import NUM_USERS, ONE_TEXT_ARMS
from benchmarks.chaos.chaos_questions import Kind, Question

Outcome = Literal["answered", "refused", "ended in an error", "left", "broken", "hung", "garbled"]
"""refused: a status and an error in OpenAI's words. ended in an error: the same behind a beginning.
left: by us. broken: cut off without either. garbled: not what the API promises."""

BAD: Final[frozenset[Outcome]] = frozenset({"broken", "hung", "garbled"})
HUNG_AFTER_S: Final = 240.0
_LEAVES: Final = 0.12
_REFUSED_FOR_S: Final = 900.0
_PAUSE_S: Final = 10.0


@dataclass(slots=True, kw_only=True)
class Exchange:
    """A question that was asked."""

    question: int
    kind: Kind
    request_id: str
    began_s: float
    """Since the run began."""
    user: str = ""
    """The user id that an experiment assigns an arm by; empty for none."""
    is_alone: bool = False
    took_s: float = 0.0
    outcome: Outcome = "broken"
    status: int = 0
    answer: str = ""
    """Text, or calls of tools as JSON, of a whole answer."""
    finish: str = ""
    """The reason of its end."""
    is_escalated: bool = False
    arms: str = ""
    """The header x-outrider-arm."""
    tier: str | None = None
    total_tokens: int | None = None
    """Its usage."""
    note: str = ""


@dataclass(slots=True, kw_only=True)
class Clients:
    """So many clients, each asking one question after the other. Times are since `zero_s`."""

    url: str
    questions: Sequence[Question]
    keys: Mapping[str, str]
    zero_s: float
    seed: int
    exchanges: list[Exchange] = field(default_factory=list)

    async def run(self, *, number: int, until_s: float) -> None:
        """Ask at random until then, and wait for the last answers."""
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(limits=limits, timeout=None) as client:
            await asyncio.gather(*(self._client(client, each, until_s) for each in range(number)))

    async def _client(self, client: httpx.AsyncClient, place: int, until_s: float) -> None:
        chance = random.Random(f"{self.seed}-{place}")
        while time.monotonic() - self.zero_s < until_s:
            exchange = await self.ask(client, chance.choice(self.questions), chance)
            # One that was refused comes again later, as clients do.
            pause_s = 0.02 if exchange.outcome == "answered" else 0.5
            await asyncio.sleep(chance.expovariate(1 / pause_s))

    async def alone(self) -> None:
        """Ask each question that has one text, one after the other; of an experiment, by arm.

        One that engines died with twice is refused for ten minutes, so it is asked again.
        """
        asked: list[tuple[Question, str | None]] = []
        for question in self.questions:
            if question.has_one_text:
                asked.append((question, None))
            elif question.kind == "experiment":
                asked += [(question, f"models/{arm}") for arm in ONE_TEXT_ARMS]
        deadline_s = time.monotonic() + _REFUSED_FOR_S
        async with httpx.AsyncClient(timeout=None) as client:
            while asked and time.monotonic() < deadline_s:
                refused = []
                for question, arm in asked:
                    exchange = await self.ask(client, question, None, arm=arm)
                    if exchange.outcome == "refused":
                        refused.append((question, arm))
                asked = refused
                if asked:
                    await asyncio.sleep(_PAUSE_S)

    async def ask(
        self,
        client: httpx.AsyncClient,
        question: Question,
        chance: random.Random | None,
        *,
        arm: str | None = None,
    ) -> Exchange:
        """Ask once, alone in this `arm`, or with `chance` perhaps as a stream that we may leave."""
        exchange = Exchange(
            question=question.number,
            kind=question.kind,
            request_id=f"chaos-{len(self.exchanges)}",
            began_s=time.monotonic() - self.zero_s,
            is_alone=chance is None,
        )
        if question.kind == "experiment" and chance is not None:
            exchange.user = f"user-{chance.randrange(NUM_USERS)}"
        self.exchanges.append(exchange)
        streams = chance is not None and chance.random() < 0.6
        leaves_after_s = None
        if chance is not None and chance.random() < _LEAVES:
            leaves_after_s = chance.uniform(0.0, 0.6)
        try:
            async with asyncio.timeout(leaves_after_s or HUNG_AFTER_S):
                await self._ask(client, question, exchange, streams=streams, arm=arm)
        except TimeoutError:
            exchange.outcome = "left" if leaves_after_s is not None else "hung"
        except httpx.TransportError as error:
            exchange.outcome, exchange.note = "broken", repr(error)
        except (ValueError, KeyError, TypeError, IndexError) as error:
            exchange.outcome, exchange.note = "garbled", repr(error)
        exchange.took_s = time.monotonic() - self.zero_s - exchange.began_s
        return exchange

    async def _ask(
        self,
        client: httpx.AsyncClient,
        question: Question,
        exchange: Exchange,
        *,
        streams: bool,
        arm: str | None,
    ) -> None:
        key = self.keys["limited" if question.kind == "limited" else "any"]
        headers = {"authorization": f"Bearer {key}", "x-request-id": exchange.request_id}
        body = dict(question.body)
        if exchange.user:
            body["user"] = exchange.user
        if arm is not None:
            headers["x-outrider-arm"] = arm
        if streams:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        async with client.stream(
            "POST", f"{self.url}/chat/completions", json=body, headers=headers
        ) as response:
            exchange.status = response.status_code
            exchange.tier = response.headers.get("x-outrider-tier")
            exchange.arms = response.headers.get("x-outrider-arm", "")
            if response.status_code != 200:
                error = json.loads(await response.aread())["error"]
                exchange.outcome, exchange.note = "refused", f"{error['type']}: {error['message']}"
            elif streams:
                await _read_stream(response, exchange)
            else:
                document = json.loads(await response.aread())
                choice = document["choices"][0]
                _take_message(choice["message"], exchange)
                _take_end(choice["finish_reason"], document, exchange)
                exchange.total_tokens = document["usage"]["total_tokens"]
                exchange.outcome = "answered"


def _take_message(message: Mapping[str, Any], exchange: Exchange) -> None:
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    exchange.answer = json.dumps(calls) if calls else message["content"] or ""


def _take_end(finish: str, document: Mapping[str, Any], exchange: Exchange) -> None:
    exchange.finish = finish
    exchange.is_escalated = bool((document.get("outrider") or {}).get("escalated"))


async def _read_stream(response: httpx.Response, exchange: Exchange) -> None:
    """Read events to their end. Raises as what is read is wrong."""
    texts: list[str] = []
    calls: list[dict[str, str]] = []
    async for line in response.aiter_lines():
        if not line.startswith("data: "):
            if line and not line.startswith(":"):
                raise ValueError(f"not an event: {line[:80]}")
            continue
        if line == "data: [DONE]":
            exchange.answer = json.dumps(calls) if calls else "".join(texts)
            exchange.outcome = "answered"
            return
        document = json.loads(line.removeprefix("data: "))
        if "error" in document:
            exchange.outcome, exchange.note = "ended in an error", document["error"]["message"]
            return
        if usage := document.get("usage"):
            exchange.total_tokens = usage["total_tokens"]
        for choice in document["choices"]:
            if choice.get("finish_reason"):
                _take_end(choice["finish_reason"], document, exchange)
            texts.append(choice["delta"].get("content") or "")
            for call in choice["delta"].get("tool_calls") or ():
                _take_call(call, calls)


def _take_call(call: Mapping[str, Any], calls: list[dict[str, str]]) -> None:
    """Add a piece of a call to the calls of a stream."""
    if len(calls) <= call["index"]:
        calls.append({"name": call["function"]["name"], "arguments": ""})
    calls[call["index"]]["arguments"] += call["function"].get("arguments") or ""
