"""Questions whose answers repeat text: earlier answers, passages, or what the client predicts."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.shared.prompts import Prompt, make_prompt
from outrider.draft.training.tasks.base import NAMES, Task
from outrider.draft.training.tasks.families import stream

_HARDEST = 4
# Of small talk: explanations, several sentences long.
_EXPLANATIONS = 3
_EDITED_FAMILIES = ("sort_words", "sort_numbers", "json")
_NUM_PASSAGES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    """A question with what the client expects the answer to be like; empty where nothing."""

    prompt: Prompt
    prediction_token_ids: tuple[int, ...] = ()


def edits(tokenizer: Any, *, number: int, seed: int) -> list[Repeat]:
    """The same task again in one conversation, with one item changed: "edit this text"."""
    repeats = []
    for old, new in _pairs(seed, number):
        messages = [_user(old.prompt), _assistant(old.answer), _user(new)]
        repeats.append(Repeat(prompt=make_prompt(tokenizer, messages, kind="edit")))
    return repeats


def rewrites(tokenizer: Any, *, number: int, seed: int) -> list[Repeat]:
    """A task with one item changed; the prediction is the answer as it was before the change."""
    return [
        Repeat(
            prompt=make_prompt(tokenizer, [_user(new)], kind="rewrite"),
            prediction_token_ids=tuple(tokenizer(old.answer, add_special_tokens=False).input_ids),
        )
        for old, new in _pairs(seed, number)
    ]


def quotes(tokenizer: Any, *, number: int, seed: int) -> list[Repeat]:
    """Several passages, then a question that one of them answers: a quote from retrieved text."""
    rng = random.Random(f"quotes/{seed}")
    passages = stream(seed, "heldout", families=("chat",), difficulties=(_EXPLANATIONS,))
    by_answer: dict[str, list[Task]] = {}
    for task in passages:
        wordings = by_answer.setdefault(task.answer, [])
        if all(task.prompt != other.prompt for other in wordings):
            wordings.append(task)
        ready = [found for found in by_answer.values() if len(found) > 1]
        if len(ready) > 2 * _NUM_PASSAGES:
            break
    repeats = []
    for _ in range(number):
        chosen = rng.sample(ready, _NUM_PASSAGES)
        told = [rng.choice(wordings) for wordings in chosen]
        wanted = rng.randrange(_NUM_PASSAGES)
        others = [task for task in chosen[wanted] if task.prompt != told[wanted].prompt]
        messages = [
            message for task in told for message in (_user(task.prompt), _assistant(task.answer))
        ]
        messages.append(_user(rng.choice(others).prompt))
        repeats.append(Repeat(prompt=make_prompt(tokenizer, messages, kind="quote")))
    return repeats


def known_answers(
    tokenizer: Any, answer: Callable[[Prompt], Sequence[int]], *, number: int, seed: int, every: int
) -> list[Repeat]:
    """Long tasks; the prediction is `answer`, with an edit in every so many tokens."""
    repeats = []
    for task, _ in _pairs(seed, number):
        prompt = make_prompt(tokenizer, [_user(task.prompt)], kind="known answer")
        prediction = edited(answer(prompt), every=every, seed=seed)
        repeats.append(Repeat(prompt=prompt, prediction_token_ids=prediction))
    return repeats


def edited(token_ids: Sequence[int], *, every: int, seed: int) -> tuple[int, ...]:
    """The tokens with one replaced, inserted or left out (in turn) in every `every` tokens.

    What is put in is another token of the same text. Raises ValueError for `every` below 2.
    """
    if every < 2:
        raise ValueError(f"every={every} must be at least 2")
    rng = random.Random(f"edited/{seed}")
    result: list[int] = []
    for number, start in enumerate(range(0, len(token_ids), every)):
        piece = list(token_ids[start : start + every])
        if len(piece) == every:  # a shorter rest stays as it is
            place = rng.randrange(every)
            others = [token for token in token_ids if token != piece[place]] or [piece[place]]
            if number % 3 == 0:
                piece[place] = rng.choice(others)
            elif number % 3 == 1:
                piece.insert(place, rng.choice(others))
            else:
                del piece[place]
        result += piece
    return tuple(result)


def _pairs(seed: int, number: int) -> Iterator[tuple[Task, str]]:
    """Tasks with long answers, each with its prompt after one item was changed."""
    rng = random.Random(f"edits/{seed}")
    tasks = stream(seed, "heldout", families=_EDITED_FAMILIES, difficulties=(_HARDEST,))
    found = 0
    for task in tasks:
        changed = _changed(task, rng)
        if changed is None:
            continue
        yield task, changed
        found += 1
        if found == number:
            return


def _changed(task: Task, rng: random.Random) -> str | None:
    """The prompt with one number, word or name replaced; None where it was not possible."""
    if task.family == "json":
        present = [name for name in NAMES if f"{name} " in task.prompt]
        fresh = [name for name in NAMES if name not in task.prompt]
    else:
        present = task.expected.split(", ")
        fresh = [str(rng.randrange(100, 1000))] if task.family == "sort_numbers" else ["orange"]
    if not present or fresh[0] in present:
        return None
    old = rng.choice(present)
    changed = task.prompt.replace(old, rng.choice(fresh), 1)
    return changed if changed != task.prompt else None


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}
