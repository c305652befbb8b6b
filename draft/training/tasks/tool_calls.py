"""Tool calls: a list of tools, a request, and the one call that answers it, or a plain no."""

import json
import random
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from outrider.draft.training.tasks.base import (
    CITIES,
    NAMES,
    WEEKDAYS,
    Maker,
    TaskDraft,
    TaskMessage,
    TaskTool,
)

_SONGS = ("Yesterday", "Hello", "Imagine", "Thunder", "Dancing Queen", "Moon River", "Summer")
_LANGUAGES = ("French", "German", "Spanish", "Italian", "Polish", "Turkish", "Japanese")
_WORDS = ("apple", "house", "river", "garden", "winter", "bread", "window", "mountain", "music")
_CURRENCIES = ("euros", "dollars", "pounds", "francs", "pesos", "rupees")
_EVENTS = ("dinner", "football", "yoga", "chess", "a meeting", "a concert", "lunch", "school")
_NOTES = ("I am late", "see you soon", "the train is here", "call me", "happy birthday")
_TIMES = tuple(f"{hour}:{minute:02d}" for hour in range(8, 22) for minute in (0, 15, 30, 45))
_GOODS = ("bread", "milk", "cheese", "apples", "rice", "coffee", "eggs", "honey")
_SKIES = ("rain", "sun", "snow", "wind", "fog")


def _numbers(first: int, last: int) -> tuple[int, ...]:
    return tuple(range(first, last + 1))


@dataclass(frozen=True, kw_only=True)
class _Parameter:
    """`names`: what it may be called, the usual one first; all values of one type."""

    names: tuple[str, ...]
    values: Sequence[str | int]

    @property
    def type(self) -> str:
        return "integer" if isinstance(self.values[0], int) else "string"


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """One kind of tool."""

    names: tuple[str, ...]
    description: str
    parameters: Mapping[str, _Parameter]
    requests: tuple[str, ...]
    """Templates over its parameters."""
    short: tuple[str, ...] = ()
    """Requests that use some of the parameters. Those in all of them are required."""
    result: Mapping[str, Sequence[str | int]] = field(default_factory=dict)
    reply: str
    """A template over its parameters and `result`."""


_CITY = _Parameter(names=("city", "place", "location", "town"), values=CITIES)
_PERSON = _Parameter(names=("name", "person", "to", "contact"), values=NAMES)
_MINUTES = _Parameter(names=("minutes", "duration", "length"), values=_numbers(1, 90))
_DAY = _Parameter(names=("day", "weekday", "date"), values=WEEKDAYS)
_TIME = _Parameter(names=("time", "hour", "at", "start"), values=_TIMES)

_KINDS = (
    _Kind(
        names=("get_weather", "weather", "check_weather", "forecast"),
        description="The weather in a city",
        parameters={
            "city": _CITY,
            "days": _Parameter(names=("days", "num_days"), values=_numbers(2, 14)),
        },
        requests=(
            "What will the weather in {city} be in {days} days?",
            "I need the weather for the next {days} days in {city}.",
        ),
        short=("What is the weather in {city}?", "How is the weather in {city} today?"),
        result={"sky": _SKIES, "degrees": _numbers(1, 35)},
        reply="In {city}: {sky}, {degrees} degrees.",
    ),
    _Kind(
        names=("get_time", "clock", "local_time", "time_in"),
        description="The time in a city",
        parameters={"city": _CITY},
        requests=("What time is it in {city}?", "Tell me the time in {city}."),
        result={"time": _TIMES},
        reply="It is {time} in {city}.",
    ),
    _Kind(
        names=("set_timer", "timer", "start_timer"),
        description="Start a timer",
        parameters={"minutes": _MINUTES},
        requests=("Set a timer for {minutes} minutes.", "Remind me in {minutes} minutes."),
        result={"status": ("started",)},
        reply="The timer for {minutes} minutes is {status}.",
    ),
    _Kind(
        names=("send_message", "message", "send_text"),
        description="Send a message to a person",
        parameters={
            "name": _PERSON,
            "text": _Parameter(names=("text", "message", "content"), values=_NOTES),
        },
        requests=("Tell {name}: {text}.", "Send {name} this message: {text}."),
        result={"status": ("sent",)},
        reply="The message to {name} is {status}.",
    ),
    _Kind(
        names=("call", "phone", "start_call"),
        description="Call a person",
        parameters={"name": _PERSON},
        requests=("Call {name}, please.", "I want to talk to {name} on the phone."),
        result={"status": ("connected", "busy")},
        reply="The call to {name}: {status}.",
    ),
    _Kind(
        names=("add_event", "calendar", "create_event", "plan_event"),
        description="Add an event to the calendar",
        parameters={
            "title": _Parameter(names=("title", "event", "what"), values=_EVENTS),
            "day": _DAY,
            "time": _TIME,
        },
        requests=(
            "Put {title} on {day} at {time} into my calendar.",
            "I have {title} on {day} at {time}, please note it.",
        ),
        result={"status": ("saved",)},
        reply="{title} on {day} at {time} is {status}.",
    ),
    _Kind(
        names=("book_table", "reserve", "restaurant_booking"),
        description="Book a table in a restaurant",
        parameters={
            "people": _Parameter(names=("people", "guests", "persons"), values=_numbers(2, 12)),
            "day": _DAY,
            "time": _TIME,
        },
        requests=(
            "Book a table for {people} on {day} at {time}.",
            "We are {people} people and want to eat on {day} at {time}.",
        ),
        result={"status": ("booked", "full")},
        reply="The table for {people} on {day} at {time}: {status}.",
    ),
    _Kind(
        names=("translate", "translator", "translate_word"),
        description="Translate a word",
        parameters={
            "word": _Parameter(names=("word", "text", "term"), values=_WORDS),
            "language": _Parameter(names=("language", "target", "to"), values=_LANGUAGES),
        },
        requests=("What is {word} in {language}?", "Translate {word} to {language}."),
        result={"word": ("tavola", "fenster", "agua", "maison", "su")},
        reply="In {language}: {result_word}.",
    ),
    _Kind(
        names=("convert_currency", "exchange", "currency"),
        description="Convert money",
        parameters={
            "amount": _Parameter(names=("amount", "value", "sum"), values=_numbers(2, 500)),
            "from": _Parameter(names=("from", "source", "have"), values=_CURRENCIES),
            "to": _Parameter(names=("to", "target", "want"), values=_CURRENCIES),
        },
        requests=(
            "Convert {amount} {from} to {to}.",
            "How many {to} do I get for {amount} {from}?",
        ),
        result={"total": _numbers(2, 900)},
        reply="{amount} {from} are {total} {to}.",
    ),
    _Kind(
        names=("play_music", "music", "play_song"),
        description="Play a song",
        parameters={"song": _Parameter(names=("song", "title", "track"), values=_SONGS)},
        requests=("Play {song}.", "I want to hear the song {song}."),
        result={"status": ("playing",)},
        reply="{song} is {status}.",
    ),
    _Kind(
        names=("add_to_list", "shopping_list", "buy"),
        description="Put something on the shopping list",
        parameters={
            "item": _Parameter(names=("item", "thing", "product"), values=_GOODS),
            "count": _Parameter(names=("count", "number", "quantity"), values=_numbers(2, 20)),
        },
        requests=("Put {count} {item} on my shopping list.", "We need {item}, {count} of them."),
        short=("Put {item} on the shopping list.", "I have to buy {item}."),
        result={"status": ("noted",)},
        reply="On the list: {item}, {status}.",
    ),
    _Kind(
        names=("find_train", "trains", "next_train"),
        description="Find a train",
        parameters={
            "from": _Parameter(names=("from", "start", "origin"), values=CITIES),
            "to": _Parameter(names=("to", "goal", "destination"), values=CITIES),
            "day": _DAY,
        },
        requests=(
            "Find a train from {from} to {to} on {day}.",
            "I want to go to {to} on {day}, I start in {from}. Which train is there?",
        ),
        result={"time": _TIMES},
        reply="From {from} to {to} on {day}: {time}.",
    ),
)

_NO_TOOL = "None of my tools can do that."


def call_text(name: str, arguments: Mapping[str, str | int]) -> str:
    """A call as hermes models write it and as the chat template renders it."""
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


@dataclass(frozen=True, kw_only=True)
class _Named:
    """A kind of tool under the names that it has in one request."""

    kind: _Kind
    name: str
    parameters: Mapping[str, str]

    def tool(self) -> TaskTool:
        kind = self.kind
        required = [key for key in kind.parameters if all(_uses(t, key) for t in _asked(kind))]
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": kind.description,
                "parameters": {
                    "type": "object",
                    "properties": {
                        self.parameters[key]: {"type": parameter.type}
                        for key, parameter in kind.parameters.items()
                    },
                    "required": [self.parameters[key] for key in required],
                },
            },
        }


def _asked(kind: _Kind) -> tuple[str, ...]:
    return kind.requests + kind.short


def _uses(template: str, key: str) -> bool:
    return f"{{{key}}}" in template


def _named(kind: _Kind, rng: random.Random, *, usual: bool) -> _Named:
    """Under its usual names, or under drawn ones, so that the list has to be read."""
    if usual:
        names = {key: parameter.names[0] for key, parameter in kind.parameters.items()}
        return _Named(kind=kind, name=kind.names[0], parameters=names)
    while True:
        names = {key: rng.choice(made.names) for key, made in kind.parameters.items()}
        if len(set(names.values())) == len(names):
            return _Named(kind=kind, name=rng.choice(kind.names), parameters=names)


def _values(kind: _Kind, template: str, rng: random.Random) -> dict[str, str | int]:
    used = {key for _, key, _, _ in string.Formatter().parse(template) if key}
    values: dict[str, str | int] = {}
    for key, parameter in kind.parameters.items():
        if key in used:
            # From and to are never the same.
            values[key] = rng.choice([v for v in parameter.values if v not in values.values()])
    return values


def _toolbox(difficulty: int, rng: random.Random) -> tuple[list[_Named], _Named]:
    """The tools of one request and the one that fits it."""
    count = (rng.choice((1, 2)), rng.choice((2, 3)), 4, rng.choice((5, 6)))[difficulty - 1]
    most = (1, 2, 3, 3)[difficulty - 1]
    least = 2 if difficulty == 4 else 1
    fitting = [kind for kind in _KINDS if least <= len(kind.parameters) <= most]
    wanted = rng.choice(fitting)
    others = rng.sample([kind for kind in _KINDS if kind is not wanted], count - 1)
    named = {kind.names[0]: _named(kind, rng, usual=difficulty < 4) for kind in (wanted, *others)}
    shown = list(named.values())
    rng.shuffle(shown)
    return shown, named[wanted.names[0]]


def tool_call(difficulty: int, rng: random.Random) -> TaskDraft:
    """One request under a list of tools: a call, a plain no, or words about a call's result."""
    shown, wanted = _toolbox(difficulty, rng)
    kind = wanted.kind
    templates = _asked(kind) if difficulty > 1 else (kind.short or kind.requests)
    template = rng.choice(templates)
    values = _values(kind, template, rng)
    prompt = template.format(**values)
    arguments = {wanted.parameters[key]: value for key, value in values.items()}
    tools = [named.tool() for named in shown]
    if rng.random() < 0.12:
        tools = [tool for tool in tools if tool["function"]["name"] != wanted.name]
        if tools:
            return TaskDraft(
                prompt=prompt, steps=(), final=_NO_TOOL, kind="exact", tools=tuple(tools)
            )
        tools = [named.tool() for named in shown]
    call = call_text(wanted.name, arguments)
    if rng.random() < 0.2:
        return _described(wanted, prompt, call, values, tools, rng)
    expected = json.dumps({"name": wanted.name, "arguments": arguments})
    return TaskDraft(
        prompt=prompt,
        steps=(),
        final=call,
        kind="tool_call",
        expected=expected,
        tools=tuple(tools),
    )


def _described(
    wanted: _Named,
    asked: str,
    call: str,
    values: Mapping[str, str | int],
    tools: Sequence[TaskTool],
    rng: random.Random,
) -> TaskDraft:
    """The turn after a call: its result is put into words."""
    result = {key: rng.choice(choices) for key, choices in wanted.kind.result.items()}
    told = {**values, **result}
    reply = wanted.kind.reply.format(**told, result_word=result.get("word", ""))
    response = f"<tool_response>\n{json.dumps(result)}\n</tool_response>"
    return TaskDraft(
        prompt=response,
        steps=(),
        final=reply[0].upper() + reply[1:],
        kind="exact",
        history=(
            TaskMessage(role="user", content=asked),
            TaskMessage(role="assistant", content=call),
        ),
        tools=tuple(tools),
        is_dressed=True,
    )


TOOL_FAMILIES: dict[str, Maker] = {"tool_call": tool_call}
