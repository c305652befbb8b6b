"""Chats of several turns: the last prompt makes sense only with what was said before."""

import json
import random
from dataclasses import replace
from typing import Any

from outrider.draft.training.tasks.base import NAMES, Maker, TaskDraft, answer_text, turns
from outrider.draft.training.tasks.chat import capital_of, random_capital, thanks
from outrider.draft.training.tasks.facts import about, mixed_facts, person_record, with_text
from outrider.draft.training.tasks.numbers import sum_steps


def _after(first: TaskDraft, then: TaskDraft, rng: random.Random) -> TaskDraft:
    """`then`, asked after a first question and its answer."""
    return TaskDraft(
        prompt=then.prompt,
        steps=then.steps,
        final=then.final,
        kind=then.kind,
        history=(*first.history, *turns((first.prompt, answer_text(first)))),
        is_dressed=rng.random() < 0.7,
    )


def _capitals(rng: random.Random) -> TaskDraft:
    """ "And of Peru?" or thanks, after a capital."""
    (country, asked), then = random_capital(rng), random_capital(rng)[0]
    history = turns((asked, capital_of(country)))
    if rng.random() < 0.3:
        prompt, answer = thanks(rng)
    else:
        prompt = rng.choice(("And of {}?", "And {}?", "What about {}?", "And the one of {}?"))
        prompt, answer = prompt.format(then), capital_of(then)
    return TaskDraft(
        prompt=prompt, steps=(), final=answer, kind="exact", history=history, is_dressed=True
    )


def _another_fact(num_facts: int, rng: random.Random) -> TaskDraft:
    """Another question about the same text."""
    facts = mixed_facts(num_facts, rng)
    opened, then = (about(fact) for fact in rng.sample(facts, 2))
    text = " ".join(fact.sentence for fact in facts)
    shown = TaskDraft(
        prompt=with_text(text, opened.prompt, rng), steps=opened.steps, final=opened.final
    )
    lead = rng.choice(("", "And: ", "Next question: ", "Now tell me: "))
    return _after(shown, replace(then, prompt=lead + then.prompt), rng)


def _running_sum(num_turns: int, high: int, rng: random.Random) -> TaskDraft:
    """A sum to which more is added in later turns."""
    left, right = rng.randrange(1, high), rng.randrange(1, high)
    pairs = [(f"What is {left} + {right}?", _worked(left, right))]
    total = left + right
    for turn in range(num_turns):
        more = rng.randrange(1, high)
        prompt = rng.choice(
            ("Now add {}.", "Add {} to that.", "And {} more?", "What do I get with {} more?")
        ).format(more)
        if turn == num_turns - 1:
            break
        pairs.append((prompt, _worked(total, more)))
        total += more
    return TaskDraft(
        prompt=prompt,
        steps=sum_steps(total, more),
        final=str(total + more),
        history=turns(*pairs),
        is_dressed=True,
    )


def _worked(left: int, right: int) -> str:
    return "\n".join((*sum_steps(left, right), f"Answer: {left + right}."))


def _record(difficulty: int, rng: random.Random) -> TaskDraft:
    """A JSON record that a later turn reads, changes or lengthens."""
    sentence, record = person_record(rng.choice(NAMES), (2, 3, 4)[difficulty - 2], rng)
    first = TaskDraft(
        prompt=f"Turn this into a JSON object: {sentence}",
        steps=[", ".join(f"{key} is {value}" for key, value in record.items())],
        final=json.dumps(record),
        kind="json",
    )
    keys = [key for key in record if key != "name"]
    key = rng.choice(keys)
    kind = rng.random()
    if kind < 0.4 or difficulty == 2:
        prompt = rng.choice(("What is the {}?", "Which {} is in it?", "Read me the {}."))
        then = TaskDraft(
            prompt=prompt.format(key), steps=[f"{key} is {record[key]}"], final=str(record[key])
        )
        return _after(first, then, rng)
    if kind < 0.7:
        changed: dict[str, Any] = {k: value for k, value in record.items() if k != key}
        prompt = rng.choice(("Leave out the {}.", "Remove the {}.", "The same without the {}."))
        prompt = prompt.format(key)
    else:
        value = rng.randrange(100, 1000)
        changed = {**record, "room": value}
        prompt = rng.choice(("Add room {}.", "The room is {}. Add that.")).format(value)
    then = TaskDraft(prompt=prompt, steps=(), final=json.dumps(changed), kind="json")
    return _after(first, then, rng)


def _follow_up(difficulty: int, rng: random.Random) -> TaskDraft:
    if difficulty == 1:
        return _capitals(rng)
    kind = rng.choice(("fact", "sum", "record"))
    if kind == "fact":
        return _another_fact((3, 5, 8)[difficulty - 2], rng)
    if kind == "sum":
        return _running_sum((1, 1, 2)[difficulty - 2], (50, 500, 5000)[difficulty - 2], rng)
    return _record(difficulty, rng)


TURN_FAMILIES: dict[str, Maker] = {"follow_up": _follow_up}
