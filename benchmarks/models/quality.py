"""Parts of bench_quality: how well a model predicts texts, and how often its answers are right."""

import gzip
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.shared.driving import Bench, Drive, drive, make_requests
from benchmarks.shared.prompts import Prompt, make_prompt
from outrider.draft.training.tasks.base import Task
from outrider.draft.training.tasks.families import check
from outrider.engine.passes.runner import ForwardSlice, ModelRunner
from outrider.verifier.params import Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """Token ids of which those from `start` on are predicted; `num_bytes` is what these spell."""

    token_ids: Sequence[int]
    start: int
    num_bytes: int


@torch.inference_mode()
def nats(runner: ModelRunner, text: Text) -> float:
    """-log of the probability that the model gives the text's predicted tokens, in float64."""
    ids = list(text.token_ids)
    view = runner.new_view("quality")
    try:
        view.reserve(len(ids))
        piece = ForwardSlice(view=view, token_ids=ids, start_slot=0, num_logit_rows=len(ids))
        logits = runner.forward([piece]).logits[text.start - 1 : -1].double()
    finally:
        view.release()
    wanted = torch.tensor(ids[text.start :], device=logits.device)
    return float(-logits.log_softmax(-1).gather(1, wanted[:, None]).sum())


def perplexity(runner: ModelRunner, texts: Sequence[Text]) -> dict[str, float]:
    """Perplexity a token, and bits a byte, over all texts."""
    total = sum(nats(runner, text) for text in texts)
    num_tokens = sum(len(text.token_ids) - text.start for text in texts)
    num_bytes = sum(text.num_bytes for text in texts)
    return {
        "perplexity": math.exp(total / num_tokens),
        "bits_per_byte": total / math.log(2) / num_bytes,
        "num_tokens": num_tokens,
    }


def answer_texts(tokenizer: Any, tasks: Sequence[Task]) -> list[Text]:
    """The tasks' canonical answers, after their prompts."""
    texts = []
    for task in tasks:
        asked: list[Any] = list(task.messages)
        prompt = make_prompt(tokenizer, asked, kind=task.family).token_ids
        answered = [*asked, {"role": "assistant", "content": task.answer}]
        ids = tokenizer.apply_chat_template(answered, return_dict=False)
        num_bytes = len(task.answer.encode())
        texts.append(Text(token_ids=ids, start=len(prompt), num_bytes=num_bytes))
    return texts


def file_texts(
    tokenizer: Any, path: Path, *, num_bytes: int, piece_tokens: int = 512
) -> list[Text]:
    """The beginning of a file in pieces: plain text, or the strings of JSON lines; .gz too."""
    text = beginning_of(path, num_bytes)
    ids = tokenizer(text, add_special_tokens=False).input_ids
    pieces = [ids[at : at + piece_tokens] for at in range(0, len(ids), piece_tokens)]
    return [
        Text(token_ids=piece, start=1, num_bytes=len(tokenizer.decode(piece[1:]).encode()))
        for piece in pieces
        if len(piece) > 1
    ]


def beginning_of(path: Path, num_bytes: int) -> str:
    """The beginning of a file as text: plain, or the strings of JSON lines; .gz too."""
    return "\n\n".join(_passages(path, num_bytes)).encode()[:num_bytes].decode(errors="ignore")


def _passages(path: Path, num_bytes: int) -> Iterator[str]:
    opener = gzip.open if path.suffix == ".gz" else open
    name = path.name.removesuffix(".gz")
    seen = 0
    with opener(path, "rt", encoding="utf-8") as file:
        for line in file:
            if seen > num_bytes:
                return
            row = json.loads(line) if name.endswith(".jsonl") else line.rstrip("\n")
            values = row.values() if isinstance(row, dict) else [row]
            passage = "\n".join(value for value in values if isinstance(value, str))
            seen += len(passage)
            yield passage


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """What a tier answered: which tasks it got right, and what its drafter was worth."""

    is_right: Sequence[bool]
    token_ids: Sequence[Sequence[int]]
    num_drafted: int
    num_accepted: int
    num_passes: int

    @property
    def accuracy(self) -> float:
        """Share of right answers."""
        return sum(self.is_right) / len(self.is_right)

    def record(self) -> dict[str, float | None]:
        """For the results."""
        num_tokens = sum(map(len, self.token_ids))
        return {
            "accuracy": self.accuracy,
            "acceptance_rate": self.num_accepted / self.num_drafted if self.num_drafted else None,
            "tokens_per_pass": num_tokens / self.num_passes,
        }


def answer_tasks(
    bench: Bench, tier: Tier, tasks: Sequence[Task], tokenizer: Any, *, stop: tuple[int, ...]
) -> Answers:
    """Greedy answers, sixteen at a time; the large tier drafts with the small model."""
    prompts: list[Prompt] = []
    for task in tasks:
        messages: list[Any] = list(task.messages)
        prompts.append(make_prompt(tokenizer, messages, kind=task.family))
    requests = make_requests(
        prompts, tier=tier, max_tokens=256, stop=stop, speculate=tier == "large"
    )
    return _judged(drive(bench, requests, concurrency=16), tasks, tokenizer)


def _judged(done: Drive, tasks: Sequence[Task], tokenizer: Any) -> Answers:
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in done.outputs]
    stats = [stream.stats for stream in done.streams if stream.stats is not None]
    return Answers(
        is_right=[check(task, text) for task, text in zip(tasks, texts, strict=True)],
        token_ids=done.outputs,
        num_drafted=sum(each.num_drafted_tokens for each in stats),
        num_accepted=sum(each.num_accepted_tokens for each in stats),
        num_passes=sum(each.num_steps for each in stats),
    )
