"""Prompts to ask: from a file, or the few that come with Outrider."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from outrider.gateway.tools.measuring.bench.traces import BadLineError, WorkloadError, read_lines

_MOST_BAD_SHOWN: Final = 3
_MAX_DRAWS: Final = 20
"""Draws of a task before another kind is tried: some kinds have few texts."""
_TEXT_NAMES: Final = ("prompt", "text", "question", "instruction", "input")
_CATEGORY_NAMES: Final = ("category", "domain", "task")
_ROLES: Final = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}

# What the bundled pair has learned, and what anyone can answer.
_BUILT_IN: Final = {
    "arithmetic": (
        *("What is 4786 + 3957?", "What is 812 - 377?", "Add 4827 and 1965."),
        *("What is 37 times 24?", "What is 6 + 3?", "Which is larger, 71 or 38?"),
    ),
    "sorting": (
        "Sort these words alphabetically: river, apple, moon.",
        "Put 297, 322, 985, 204, 553, 898 in order, largest first.",
        "Put 41, 17, 93, 58 in order, smallest first.",
    ),
    "words": (
        *("Reverse the word lamp.", "Spell the word garden backwards."),
        "How many letters are in the word elephant?",
    ),
    "calendar": (
        "What weekday comes 225 days after a Sunday?",
        "How many days are there between June 17 and October 20?",
    ),
    "extraction": (
        'Turn this into a JSON object that follows {"name": "string", "age": "integer", "city": '
        '"string"}: Maria works as a writer, is 34 years old and lives in Lisbon.',
    ),
    "chat": (
        *("Who are you?", "What can you do for me?"),
        "Tell me in two sentences why the sky is blue.",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPrompt:
    """Messages of a chat, and what kind of task they are."""

    messages: Sequence[Mapping[str, Any]]
    category: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSet:
    """Prompts of one source. `notes`: what was mended, in words."""

    name: str
    prompts: Sequence[BenchPrompt]
    notes: tuple[str, ...] = ()


def built_in_prompts() -> PromptSet:
    """The prompts that come with Outrider."""
    prompts = [
        _asked(text, category=category) for category, texts in _BUILT_IN.items() for text in texts
    ]
    return PromptSet(name="built-in", prompts=prompts)


def fresh_prompts(count: int, *, seed: int, salt: str) -> list[BenchPrompt]:
    """Draw small tasks, such as the bundled pair has learnt, none of which is asked twice.

    A prompt that repeats is drafted from its own remembered answer, which no new question is.
    `seed` fixes the kinds of tasks and their order, `salt` their numbers and words: so two sides of
    a comparison are asked alike, and neither is asked what the other was.
    """
    from outrider.draft.training.tasks.families import DIFFICULTIES, PLAIN_FAMILIES, generate

    kinds, words = random.Random(seed), random.Random(f"{seed}/{salt}")
    found: dict[str, BenchPrompt] = {}
    while len(found) < count:
        family = kinds.choice(PLAIN_FAMILIES)
        difficulty = kinds.choice(DIFFICULTIES)
        for _ in range(_MAX_DRAWS):
            messages = generate(family, difficulty, words).messages
            prompt = BenchPrompt(messages=[dict(one) for one in messages], category=family)
            if found.setdefault(str(messages), prompt) is prompt:
                break
    return list(found.values())


def load_prompts(
    path: Path, *, skips_bad: bool = False, categories: Sequence[str] = ()
) -> PromptSet:
    """Read a file: JSON lines, or else a prompt a line.

    A JSON line is a text, or an object with `messages` (OpenAI), `turns` (Spec-Bench, MT-bench: the
    first turn is asked), `conversations` (ShareGPT: up to the first answer), or a text named
    prompt, text, question, instruction or input; `category` is its kind. `categories`: only these.
    Raises WorkloadError, which names the first lines that are wrong.
    """
    is_json = ".json" in "".join(path.suffixes)
    prompts: list[BenchPrompt] = []
    bad: list[str] = []
    for number, line in read_lines(path):
        try:
            prompts.append(_parsed(line) if is_json else _asked(line))
        except (BadLineError, msgspec.DecodeError) as error:
            bad.append(f"line {number}: {error}")
    if bad and not skips_bad:
        shown = "\n".join(bad[:_MOST_BAD_SHOWN])
        more = f"\n… and {len(bad) - _MOST_BAD_SHOWN} more" if len(bad) > _MOST_BAD_SHOWN else ""
        raise WorkloadError(
            f"{path}:\n{shown}{more}\nFix these lines, or skip them with --skip-bad"
        )
    if not prompts:
        raise WorkloadError(f"{path} has no prompt: it needs one a line")
    notes = (f"{len(bad)} lines of the prompts were wrong and left out",) if bad else ()
    return PromptSet(name=path.name, prompts=_chosen(path, prompts, categories), notes=notes)


def _chosen(
    path: Path, prompts: Sequence[BenchPrompt], categories: Sequence[str]
) -> Sequence[BenchPrompt]:
    known = {prompt.category for prompt in prompts}
    if unknown := set(categories) - known:
        raise WorkloadError(
            f"{path} has no category {', '.join(sorted(unknown))}; it has "
            f"{', '.join(sorted(known - {''})) or 'none'}"
        )
    return [p for p in prompts if p.category in categories] if categories else prompts


def _asked(text: str, *, category: str = "") -> BenchPrompt:
    return BenchPrompt(messages=({"role": "user", "content": text},), category=category)


def _parsed(line: str) -> BenchPrompt:
    """Raises BadLineError."""
    document = msgspec.json.decode(line)
    if isinstance(document, str):
        return _asked(_text(document))
    if not isinstance(document, dict):
        raise BadLineError("is neither a text nor an object")
    category = next((str(document[n]) for n in _CATEGORY_NAMES if document.get(n)), "")
    if "messages" in document:
        return BenchPrompt(messages=_messages(document["messages"]), category=category)
    if "conversations" in document:
        return BenchPrompt(messages=_shared(document["conversations"]), category=category)
    if "turns" in document:
        turns = document["turns"]
        if not isinstance(turns, list) or not turns:
            raise BadLineError("turns is not a list of texts")
        return _asked(_text(turns[0]), category=category)
    for name in _TEXT_NAMES:
        if name in document:
            return _asked(_text(document[name]), category=category)
    raise BadLineError(f"has none of messages, turns, conversations, {', '.join(_TEXT_NAMES)}")


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise BadLineError(f"{str(value)[:40]!r} is not a text")
    return value


def _messages(value: Any) -> Sequence[Mapping[str, Any]]:
    if not isinstance(value, list) or not value:
        raise BadLineError("messages is not a list")
    if not all(isinstance(item, dict) and "role" in item and "content" in item for item in value):
        raise BadLineError("a message has no role or no content")
    return value


def _shared(value: Any) -> Sequence[Mapping[str, Any]]:
    """ShareGPT's: what stands before the first answer."""
    asked = []
    for turn in value if isinstance(value, list) else ():
        role = _ROLES.get(str(turn.get("from"))) if isinstance(turn, dict) else None
        if role == "assistant":
            break
        if role is not None:
            asked.append({"role": role, "content": _text(turn.get("value"))})
    if not asked:
        raise BadLineError("conversations has nothing that a human asked")
    return asked
