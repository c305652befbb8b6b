"""Facts about people and questions about them: short look-ups, long passages, JSON records."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.draft.training.tasks.base import (
    CITIES,
    NAMES,
    WEEKDAYS,
    Maker,
    TaskDraft,
    TaskMessage,
    answer_text,
    turns,
)

_JOBS = (
    "baker", "nurse", "pilot", "teacher", "painter", "farmer", "lawyer", "singer", "cook",
    "driver", "doctor", "writer", "gardener", "plumber",
)  # fmt: skip
_FOODS = (
    "mango", "bread", "rice", "soup", "cheese", "salad", "pasta", "olives", "cake", "fish",
    "beans", "honey",
)  # fmt: skip
_COLOURS = ("red", "blue", "green", "yellow", "white", "black", "orange", "purple")
_PETS = ("cat", "dog", "horse", "parrot", "rabbit", "turtle", "goat", "hamster")
_INSTRUMENTS = ("piano", "violin", "guitar", "trumpet", "saxophone", "flute", "drum", "harp")
_DRINKS = ("tea", "coffee", "milk", "juice", "water", "lemonade", "cocoa")


@dataclass(frozen=True, kw_only=True)
class _Attribute:
    """`statement`: "{} lives in {}.", a person and a value; question about a person."""

    values: Sequence[str]
    statement: str
    question: str
    key: str


def _attribute(key: str, values: Sequence[str], relation: str, question: str) -> _Attribute:
    return _Attribute(values=values, statement="{} " + relation + ".", question=question, key=key)


_ATTRIBUTES: dict[str, _Attribute] = {
    made.key: made
    for made in (
        _attribute("city", CITIES, "lives in {}", "Where does {} live?"),
        _attribute("job", _JOBS, "works as a {}", "What is the job of {}?"),
        _attribute("food", _FOODS, "likes {}", "What food does {} like?"),
        _attribute("pet", _PETS, "has a {}", "Which pet does {} have?"),
        _attribute("colour", _COLOURS, "wears {}", "Which colour does {} wear?"),
        _attribute("drink", _DRINKS, "drinks {}", "What does {} drink?"),
        _attribute("instrument", _INSTRUMENTS, "plays the {}", "Which instrument does {} play?"),
        _attribute("day", WEEKDAYS, "comes on {}", "On which day does {} come?"),
        _attribute("room", [str(n) for n in range(100, 1000)], "sits in room {}",
                   "In which room does {} sit?"),
        _attribute("code", [str(n) for n in range(1000, 10000)], "has the code {}",
                   "What is the code of {}?"),
    )
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Fact:
    """One value of one person."""

    person: str
    key: str
    value: str

    @property
    def sentence(self) -> str:
        """The fact as the passage says it and as an answer quotes it."""
        return _ATTRIBUTES[self.key].statement.format(self.person, self.value)

    @property
    def question(self) -> str:
        """The question whose answer is the value."""
        return _ATTRIBUTES[self.key].question.format(self.person)


def quoted(*facts: Fact) -> list[str]:
    """The step that quotes what is told. Not at its beginning: there the first word's token would
    be another than in the text, and so harder to find again."""
    return [f"The text says: {' '.join(fact.sentence for fact in facts)}"]


def about(fact: Fact) -> TaskDraft:
    """The plain question about a fact."""
    return TaskDraft(prompt=fact.question, steps=quoted(fact), final=fact.value)


def with_text(text: str, question: str, rng: random.Random) -> str:
    """A prompt that shows a text and asks a question about it."""
    return rng.choice(
        (
            f"{text} {question}",
            f"Read this: {text} {question}",
            f"Text: {text}\nQuestion: {question}",
            f"Here is what I know. {text} Now tell me: {question}",
            f"{text}\n{question}",
        )
    )


def mixed_facts(count: int, rng: random.Random) -> list[Fact]:
    """Facts about different people, every attribute once: the question's verb leads to the answer.

    (That one verb fits several people was tried and not learnt at this size and budget.)
    """
    people = rng.sample(NAMES, count)
    keys = rng.sample(sorted(_ATTRIBUTES), count)
    return [
        Fact(person=person, key=key, value=rng.choice(_ATTRIBUTES[key].values))
        for person, key in zip(people, keys, strict=True)
    ]


def _lookup(difficulty: int, rng: random.Random) -> TaskDraft:
    facts = mixed_facts((2, 4, 6, 9)[difficulty - 1], rng)
    asked = about(rng.choice(facts))
    text = " ".join(fact.sentence for fact in facts)
    return TaskDraft(
        prompt=with_text(text, asked.prompt, rng), steps=asked.steps, final=asked.final
    )


_PLACES = (
    "garden", "kitchen", "market", "library", "school", "station", "river", "bridge", "castle",
    "theatre", "forest", "island", "hospital", "restaurant", "classroom", "lighthouse",
)  # fmt: skip
_ADJECTIVES = ("quiet", "dark", "small", "bright", "cold", "warm", "green", "busy", "large", "new")
_TIMES = ("In the morning", "In the evening", "At night", "In summer", "In winter", "Today")
_BEINGS = ("bird", "fish", "train", "boat", "cat", "dog", "tiger", "horse", "wolf", "duck")


def _filler(rng: random.Random) -> str:
    place, other = rng.sample(_PLACES, 2)
    adjective, second = rng.sample(_ADJECTIVES, 2)
    return rng.choice(
        (
            f"The {place} is {adjective} and {second}.",
            f"{rng.choice(_TIMES)} the {place} is {adjective}.",
            f"The {place} near the {other} is {adjective}.",
            f"{rng.choice(_TIMES)} a {rng.choice(_BEINGS)} sleeps near the {other}.",
            f"A {adjective} {rng.choice(_BEINGS)} waits at the {place}.",
            f"There is a {second} {place} behind the {other}.",
        )
    )


# About as many characters as a token of the shipped tokenizer has in these sentences.
_CHARACTERS_PER_TOKEN = 3.2
# Tokens of a passage at each difficulty.
_PASSAGE_TOKENS = ((350, 600), (700, 1000), (1200, 1800), (2000, 3000))


@dataclass(frozen=True, kw_only=True)
class Passage:
    """A text of generated sentences, and the facts in it."""

    text: str
    facts: Sequence[Fact]


def passage(num_tokens: int, rng: random.Random) -> Passage:
    """A passage of about num_tokens, at most a third of them facts."""
    facts = mixed_facts(min(len(_ATTRIBUTES), max(2, num_tokens // 24)), rng)
    sentences = [fact.sentence for fact in facts]
    size = sum(map(len, sentences)) + len(sentences)
    while size < num_tokens * _CHARACTERS_PER_TOKEN:
        sentences.append(_filler(rng))
        size += len(sentences[-1]) + 1
    rng.shuffle(sentences)
    return Passage(text=" ".join(sentences), facts=facts)


def _passage(difficulty: int, rng: random.Random) -> TaskDraft:
    drawn = passage(rng.randrange(*_PASSAGE_TOKENS[difficulty - 1]), rng)
    asked = about(rng.choice(drawn.facts))
    return TaskDraft(
        prompt=with_text(drawn.text, asked.prompt, rng), steps=asked.steps, final=asked.final
    )


def interview(num_tokens: int, rng: random.Random) -> list[TaskMessage]:
    """A chat of about num_tokens: a passage, then questions about each of its facts.

    Looking up is learnt from many questions about one text: each answer counts.
    """
    drawn = passage(max(num_tokens - 350, int(0.45 * num_tokens)), rng)
    pairs: list[tuple[str, str]] = []
    for fact in rng.sample(drawn.facts, len(drawn.facts)):
        asked = about(fact)
        prompt = asked.prompt if pairs else with_text(drawn.text, asked.prompt, rng)
        pairs.append((prompt, answer_text(asked)))
    return list(turns(*pairs))


# key: (values, how a sentence says it)
_FIELDS: dict[str, tuple[Sequence[str | int], str]] = {
    "age": (range(18, 90), "is {} years old"),
    "city": (CITIES, "lives in {}"),
    "job": (_JOBS, "works as a {}"),
    "food": (_FOODS, "likes {}"),
    "pet": (_PETS, "has a {}"),
}


def person_record(
    name: str, num_fields: int, rng: random.Random
) -> tuple[str, dict[str, str | int]]:
    """A sentence about a person and its record, fields in the order of the sentence."""
    record: dict[str, str | int] = {"name": name}
    clauses = []
    for key in rng.sample(sorted(_FIELDS), num_fields):
        values, clause = _FIELDS[key]
        record[key] = value = rng.choice(values)
        clauses.append(clause.format(value))
    told = clauses[0] if len(clauses) == 1 else f"{', '.join(clauses[:-1])} and {clauses[-1]}"
    return f"{name} {told}.", record


def _json(difficulty: int, rng: random.Random) -> TaskDraft:
    if difficulty == 4:
        return _json_by_schema(rng)
    num_fields = (1, 2, 4)[difficulty - 1]
    sentence, record = person_record(rng.choice(NAMES), num_fields, rng)
    shape = "a JSON object"
    prompt = rng.choice(
        (
            f"Turn this into {shape}: {sentence}",
            f"Write {shape} for these facts: {sentence}",
            f"{sentence} Give me that as {shape}.",
            f"Extract {shape} from the text: {sentence}",
            f"{sentence} Answer in JSON: {_schema(record, list(record))}",
            f"Fill the schema {_schema(record, list(record))} from this: {sentence}",
        )
    )
    steps = [", ".join(f"{key} is {value}" for key, value in record.items())]
    return TaskDraft(prompt=prompt, steps=steps, final=json.dumps(record), kind="json")


def _schema(record: dict[str, str | int], keys: Sequence[str]) -> str:
    types = {key: "integer" if isinstance(record[key], int) else "string" for key in keys}
    return json.dumps(types)


def _json_by_schema(rng: random.Random) -> TaskDraft:
    """More is said than asked for, and the schema has an order of its own."""
    sentence, record = person_record(rng.choice(NAMES), rng.choice((4, 5)), rng)
    keys = rng.sample(sorted(record), rng.choice((3, 4)))
    kept, schema = {key: record[key] for key in keys}, _schema(record, keys)
    prompt = rng.choice(
        (
            f"Turn this into a JSON object that follows {schema}: {sentence}",
            f"{sentence} Answer in JSON: {schema}",
            f"Fill the schema {schema} from this: {sentence}",
            f"{sentence} Give me that as a JSON object with the keys {', '.join(keys)}.",
        )
    )
    return TaskDraft(prompt=prompt, steps=(), final=json.dumps(kept), kind="json")


FACT_FAMILIES: dict[str, Maker] = {"lookup": _lookup, "passage": _passage, "json": _json}
