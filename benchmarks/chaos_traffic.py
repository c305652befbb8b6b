"""Requests for `benchmarks.chaos`: what clients ask, and what came of it.

Every question has a seed, so its answer is one text whenever and beside whatever it is asked.
"""

import asyncio
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final, Literal

import httpx

from draft.training.tasks.families import stream

Outcome = Literal["answered", "refused", "ended in an error", "left", "broken", "hung", "garbled"]
"""refused: a status and an error in OpenAI's words. ended in an error: the same behind a beginning.
left: by us. broken: cut off without either. garbled: not what the API promises."""

Kind = Literal["chat", "schema", "tools", "auto", "chain", "limited"]

BAD: Final[frozenset[Outcome]] = frozenset({"broken", "hung", "garbled"})
HUNG_AFTER_S: Final = 240.0
_SHARES: Final[Mapping[Kind, float]] = {
    "chat": 0.42, "schema": 0.12, "tools": 0.08, "auto": 0.2, "chain": 0.13, "limited": 0.05,
}  # fmt: skip
_LEAVES: Final = 0.12
_TOOL: Final = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One of the questions that are asked again and again. `body`: without `stream`."""

    number: int
    kind: Kind
    body: Mapping[str, Any]

    @property
    def has_one_text(self) -> bool:
        """True where the tier is named: others may be answered by either."""
        return self.kind in ("chat", "schema", "tools")


@dataclass(slots=True, kw_only=True)
class Exchange:
    """A question that was asked. `began_s`, `took_s`: seconds, the former since the run began.

    `answer`: text, or calls of tools as JSON, of a whole answer. `total_tokens`: its usage.
    """

    question: int
    kind: Kind
    request_id: str
    began_s: float
    took_s: float = 0.0
    outcome: Outcome = "broken"
    status: int = 0
    answer: str = ""
    tier: str | None = None
    total_tokens: int | None = None
    note: str = ""


def make_questions(number: int, seed: int) -> list[Question]:
    """Return questions of all kinds, the same for the same seed."""
    chance = random.Random(seed)
    tasks = [task for task in islice(stream(seed, "heldout"), 4 * number) if not task.tools]
    kinds = chance.choices(list(_SHARES), weights=list(_SHARES.values()), k=number)
    return [
        Question(number=index, kind=kind, body=_body(kind, index, tasks[index].messages, chance))
        for index, kind in enumerate(kinds)
    ]


def _body(
    kind: Kind, index: int, messages: Sequence[Mapping[str, Any]], chance: random.Random
) -> dict[str, Any]:
    tier = {"auto": "auto", "chain": "robust"}.get(kind) or chance.choice(("small", "large"))
    asked = [{"role": each["role"], "content": each["content"]} for each in messages]
    while asked[-1]["role"] != "user":
        asked.pop()
    body: dict[str, Any] = {
        "model": tier,
        "messages": asked,
        "seed": index,
        "temperature": chance.choice((0.0, 0.7, 1.0)),
        "max_tokens": chance.choice((24, 64, 160)),
    }
    if kind == "schema":
        body["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "answer", "strict": True, "schema": _schema(chance, depth=2)},
        }
        body["max_tokens"] = 200
    if kind == "tools":
        body |= {"tools": [_TOOL], "tool_choice": "required", "max_tokens": 100}
    if chance.random() < 0.2:
        body["service_tier"] = chance.choice(("priority", "default", "flex"))
    return body


def _schema(chance: random.Random, depth: int) -> dict[str, Any]:
    """Return a random schema of bounded answers."""
    kind = chance.choice(("enum", "integer", "boolean", "string", *(("object", "array") * 2)))
    if depth == 2:
        kind = "object"
    elif depth == 0 and kind in ("object", "array"):
        kind = "boolean"
    match kind:
        case "enum":
            return {"enum": chance.sample(("red", "green", "blue", 1, 2.5, None, True), 3)}
        case "integer":
            return {"type": "integer", "minimum": 0, "maximum": chance.choice((9, 500))}
        case "string":
            return {"type": "string", "pattern": "^[a-z]{1,8}$"}
        case "array":
            return {"type": "array", "items": _schema(chance, depth - 1), "maxItems": 3}
        case "object":
            names = chance.sample(("name", "age", "city", "tags", "ok"), chance.randint(1, 3))
            return {
                "type": "object",
                "properties": {name: _schema(chance, depth - 1) for name in names},
                "required": names,
                "additionalProperties": False,
            }
        case _:
            return {"type": "boolean"}


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
        """Ask each question that has one text, one after the other."""
        async with httpx.AsyncClient(timeout=None) as client:
            for question in self.questions:
                if question.has_one_text:
                    await self.ask(client, question, None)

    async def ask(
        self, client: httpx.AsyncClient, question: Question, chance: random.Random | None
    ) -> Exchange:
        """Ask once; with `chance` perhaps as a stream, and perhaps leave early."""
        exchange = Exchange(
            question=question.number,
            kind=question.kind,
            request_id=f"chaos-{len(self.exchanges)}",
            began_s=time.monotonic() - self.zero_s,
        )
        self.exchanges.append(exchange)
        streams = chance is not None and chance.random() < 0.6
        leaves_after_s = None
        if chance is not None and chance.random() < _LEAVES:
            leaves_after_s = chance.uniform(0.0, 0.6)
        try:
            async with asyncio.timeout(leaves_after_s or HUNG_AFTER_S):
                await self._ask(client, question, exchange, streams=streams)
        except TimeoutError:
            exchange.outcome = "left" if leaves_after_s is not None else "hung"
        except httpx.TransportError as error:
            exchange.outcome, exchange.note = "broken", repr(error)
        except (ValueError, KeyError, TypeError, IndexError) as error:
            exchange.outcome, exchange.note = "garbled", repr(error)
        exchange.took_s = time.monotonic() - self.zero_s - exchange.began_s
        return exchange

    async def _ask(
        self, client: httpx.AsyncClient, question: Question, exchange: Exchange, *, streams: bool
    ) -> None:
        key = self.keys["limited" if question.kind == "limited" else "any"]
        body = dict(question.body)
        if streams:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        async with client.stream(
            "POST",
            f"{self.url}/chat/completions",
            json=body,
            headers={"authorization": f"Bearer {key}", "x-request-id": exchange.request_id},
        ) as response:
            exchange.status = response.status_code
            exchange.tier = response.headers.get("x-outrider-tier")
            if response.status_code != 200:
                error = json.loads(await response.aread())["error"]
                exchange.outcome, exchange.note = "refused", f"{error['type']}: {error['message']}"
            elif streams:
                await _read_stream(response, exchange)
            else:
                document = json.loads(await response.aread())
                _take_message(document["choices"][0]["message"], exchange)
                exchange.total_tokens = document["usage"]["total_tokens"]
                exchange.outcome = "answered"


def _take_message(message: Mapping[str, Any], exchange: Exchange) -> None:
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    exchange.answer = json.dumps(calls) if calls else message["content"] or ""


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
            texts.append(choice["delta"].get("content") or "")
            for call in choice["delta"].get("tool_calls") or ():
                if len(calls) <= call["index"]:
                    calls.append({"name": call["function"]["name"], "arguments": ""})
                calls[call["index"]]["arguments"] += call["function"].get("arguments") or ""
