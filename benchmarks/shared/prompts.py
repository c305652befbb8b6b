"""Prompts for the models: held-out tasks, or conversations from a file."""

import gzip
import itertools
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, GenerationConfig

from outrider.draft.training.tasks.families import DIFFICULTIES, stream


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One conversation, rendered. `kind`: the task's family or the file's category."""

    messages: tuple[dict[str, str], ...]
    token_ids: tuple[int, ...]
    kind: str


def load_tokenizer(folder: Path) -> Any:
    """The model's own tokenizer; transformers gives it no useful type."""
    return AutoTokenizer.from_pretrained(str(folder))


def stop_token_ids(folder: Path, tokenizer: Any) -> tuple[int, ...]:
    """The ids that end an answer, as transformers' generate sees them."""
    eos: int | list[int] | None = None
    if (folder / "generation_config.json").is_file():
        eos = GenerationConfig.from_pretrained(str(folder)).eos_token_id
    if eos is None:
        eos = tokenizer.eos_token_id
    if eos is None:
        return ()
    return (eos,) if isinstance(eos, int) else tuple(eos)


def load_prompts(
    source: str,
    tokenizer: Any,
    *,
    num_prompts: int,
    seed: int = 0,
    max_tokens: int = 1024,
    difficulties: Sequence[int] = DIFFICULTIES,
) -> list[Prompt]:
    """`num_prompts` prompts in the tokenizer's chat format, none longer than `max_tokens`.

    `source`: "tasks" for held-out tasks of the shipped pair's world, or a JSON-lines file (.gz too)
    with "turns", "question", "prompt" or "messages"; a relative one is also looked for under
    $OUTRIDER_DATA. A file with fewer prompts is gone through again from its start. Raises
    SystemExit with a sentence where the file is absent.
    """
    texts = _task_texts(seed, difficulties) if source == "tasks" else _file_texts(Path(source))
    prompts: list[Prompt] = []
    for num_seen, (kind, messages) in enumerate(texts, start=1):
        prompt = make_prompt(tokenizer, messages, kind=kind)
        if len(prompt.token_ids) <= max_tokens:
            prompts.append(prompt)
            if len(prompts) == num_prompts:
                break
        elif num_seen >= 50 * num_prompts:
            raise SystemExit(f"{source}: hardly any prompt has at most {max_tokens} tokens.")
    return prompts


def make_prompt(tokenizer: Any, messages: list[dict[str, str]], *, kind: str) -> Prompt:
    """Render a conversation in the tokenizer's chat format."""
    return Prompt(messages=tuple(messages), token_ids=_render(tokenizer, messages), kind=kind)


def _render(tokenizer: Any, messages: list[dict[str, str]]) -> tuple[int, ...]:
    if tokenizer.chat_template is None:
        text = "\n".join(message["content"] for message in messages)
        return tuple(tokenizer(text).input_ids)
    return tuple(
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    )


def _task_texts(
    seed: int, difficulties: Sequence[int]
) -> Iterator[tuple[str, list[dict[str, str]]]]:
    seen: set[str] = set()
    for task in stream(seed, "heldout", difficulties=difficulties):
        if task.prompt not in seen:
            seen.add(task.prompt)
            yield task.family, [{"role": "user", "content": task.prompt}]


def _file_texts(path: Path) -> Iterator[tuple[str, list[dict[str, str]]]]:
    data = os.environ.get("OUTRIDER_DATA")
    candidates = [path, *([Path(data) / path] if data else [])]
    found = next((candidate for candidate in candidates if candidate.is_file()), None)
    if found is None:
        hint = "" if data else " (OUTRIDER_DATA is not set)"
        raise SystemExit(f"--prompts {path}: no such file{hint}.")
    opener = gzip.open if found.suffix == ".gz" else open
    with opener(found, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file if line.strip()]
    for row in itertools.cycle(rows):
        kind = str(row.get("category", found.name.split(".")[0]))
        if "messages" in row:
            yield kind, row["messages"]
        elif "turns" in row:
            yield kind, [{"role": "user", "content": row["turns"][0]}]
        else:
            text = row.get("question") or row.get("prompt")
            if text is None:
                raise SystemExit(f"{path}: no turns, question, prompt or messages in a line.")
            yield kind, [{"role": "user", "content": text}]
