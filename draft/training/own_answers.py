"""What a drafter learns from: the large model's own answers and its next-token distributions.

Answers are written by the engine, many at a time, and kept on disk as they end, so that a restart
goes on where the last one stopped. Then each sequence is read once more in a prefill pass, and the
`top_k` likeliest next tokens at every place are stored: half a percent of what whole rows of logits
would take. Training reads them as often as it likes and never needs the large model again, which
on a CPU is most of a step's time and memory.
"""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm

from draft.training.prompt_file import PromptDataError, PromptRow
from engine.core import Engine
from engine.errors import EngineError
from engine.events import Failed, Finished, TokensEmitted
from engine.passes.runner import ForwardSlice, ModelRunner
from engine.request import EngineRequest, SamplingParams

_IN_FLIGHT = 64
_SHARD_ROWS = 64
# Logits of one pass while reading: 32 MiB of float32.
_MAX_LOGITS = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPlan:
    """How answers are written. `temperature` 0 is greedy; row i draws from `seed` + i.

    `max_tokens`: of an answer. `max_length`: of prompt and answer together. `top_k`: how many of
    the large model's candidates are kept at each place.
    """

    temperature: float = 0.0
    max_tokens: int = 256
    max_length: int = 1024
    seed: int = 0
    top_k: int = 32
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRow:
    """One sequence: the answer begins at `num_prompt_tokens`."""

    token_ids: tuple[int, ...]
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TaughtRow:
    """A sequence and what the large model expects at each of its n places, given those before it.

    token_ids: [n] int64. top_ids: [n, top_k] int32 and top_logprobs: [n, top_k] float32, best
    first; place 0 has no predecessor and its values mean nothing.
    """

    token_ids: Tensor
    num_prompt_tokens: int
    top_ids: Tensor
    top_logprobs: Tensor


def render_prompts(rows: Sequence[PromptRow], tokenizer: Any) -> list[tuple[int, ...]]:
    """Token ids of the prompts, through the chat template where there are messages.

    Raises PromptDataError for messages without a template to render them.
    """
    rendered = []
    for row in rows:
        if not row.messages:
            ids = tokenizer.encode(row.text)
        elif not tokenizer.chat_template:
            raise PromptDataError(
                "The large model has no chat template, so it cannot be asked with `prompt` or "
                "`messages`; give plain `text`."
            )
        else:
            messages = [{"role": role, "content": content} for role, content in row.messages]
            ids = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=False
            )
        rendered.append(tuple(ids))
    return rendered


def given_answers(rows: Sequence[PromptRow], tokenizer: Any, max_length: int) -> list[TokenRow]:
    """Sequences with the answers of the data, ended as the large model would end them.

    Plain text without an answer is learnt as a whole. Raises PromptDataError when a chat has none.
    """
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    found = []
    for number, (row, prompt) in enumerate(
        zip(rows, render_prompts(rows, tokenizer), strict=True), start=1
    ):
        if row.answer is not None:
            answer = tokenizer.encode(row.answer, add_special_tokens=False)
            token_ids, num_prompt_tokens = (*prompt, *answer, *end), len(prompt)
        elif row.messages:
            raise PromptDataError(
                f"row {number} has no answer. Give one (a last message of the assistant, or "
                "`answer` beside `prompt`), or let the large model write them: --on-policy."
            )
        else:
            token_ids, num_prompt_tokens = prompt, min(1, len(prompt))
        if num_prompt_tokens < min(len(token_ids), max_length):
            found.append(
                TokenRow(token_ids=token_ids[:max_length], num_prompt_tokens=num_prompt_tokens)
            )
    return found


def write_answers(
    engine: Engine, prompts: Sequence[tuple[int, ...]], plan: AnswerPlan, cache: Path
) -> list[TokenRow]:
    """The large model's answers to the prompts that leave room for one, in their order.

    `cache` gets a JSON line for each as it ends; those that it holds already are not asked again.
    Raises EngineError when a request fails.
    """
    answers = _cached_answers(cache)
    limit = min(plan.max_length, engine.info().tiers["large"].max_context)
    fitting = [index for index, prompt in enumerate(prompts) if 0 < len(prompt) < limit]
    requests = [
        _request(index, prompts[index], plan, limit) for index in fitting if index not in answers
    ]
    with (
        cache.open("a", encoding="utf-8") as file,
        tqdm(total=len(fitting), initial=len(fitting) - len(requests), desc="answers") as bar,
    ):
        for index, answer in _answer(engine, requests):
            answers[index] = answer
            file.write(json.dumps({"index": index, "answer": answer}) + "\n")
            file.flush()
            bar.update()
    return [
        TokenRow(
            token_ids=(*prompts[index], *answers[index]), num_prompt_tokens=len(prompts[index])
        )
        for index in fitting
    ]


def _request(index: int, prompt: tuple[int, ...], plan: AnswerPlan, limit: int) -> EngineRequest:
    return EngineRequest(
        request_id=str(index),
        prompt_token_ids=prompt,
        tier="large",
        sampling=SamplingParams(
            max_tokens=min(plan.max_tokens, limit - len(prompt)),
            temperature=plan.temperature,
            seed=plan.seed + index,
            stop_token_ids=plan.stop_token_ids,
        ),
    )


def _answer(engine: Engine, requests: Sequence[EngineRequest]) -> Iterator[tuple[int, list[int]]]:
    """Prompt indices with their answers, as they end; a bounded number is under way."""
    waiting = iter(requests)
    under_way: dict[str, list[int]] = {}
    while True:
        while len(under_way) < _IN_FLIGHT and (request := next(waiting, None)) is not None:
            under_way[request.request_id] = []
            engine.submit(request)
        if not under_way:
            return
        for event in engine.step():
            if isinstance(event, TokensEmitted):
                under_way[event.request_id] += event.token_ids
            elif isinstance(event, Failed):
                raise EngineError(f"prompt {event.request_id}: {event.message}")
            elif isinstance(event, Finished):
                yield int(event.request_id), under_way.pop(event.request_id)


def _cached_answers(cache: Path) -> dict[int, list[int]]:
    """Answers by prompt index. A last line that was cut off by an interruption is removed."""
    if not cache.exists():
        return {}
    found: dict[int, list[int]] = {}
    whole = 0  # bytes of complete lines
    for line in cache.read_bytes().splitlines(keepends=True):
        if not line.endswith(b"\n"):
            break
        row = json.loads(line)
        found[row["index"]] = row["answer"]
        whole += len(line)
    os.truncate(cache, whole)
    return found


def teach(
    runner: ModelRunner, rows: Sequence[TokenRow], top_k: int, folder: Path
) -> list[TaughtRow]:
    """Read every sequence with the large model and keep its likeliest next tokens.

    They are stored in `folder` in shards; shards that are there already are not computed again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    taught: list[TaughtRow] = []
    with tqdm(total=len(rows), desc="targets") as bar:
        for first in range(0, len(rows), _SHARD_ROWS):
            shard = rows[first : first + _SHARD_ROWS]
            path = folder / f"targets-{first // _SHARD_ROWS:05d}.safetensors"
            if not path.exists():
                _write_shard(runner, shard, top_k, path, bar)
            else:
                bar.update(len(shard))
            taught += _read_shard(shard, path)
    return taught


def _write_shard(
    runner: ModelRunner, rows: Sequence[TokenRow], top_k: int, path: Path, bar: Any
) -> None:
    ids, logprobs = [], []
    for row in rows:
        best = _top_candidates(runner, row.token_ids, top_k)
        ids.append(best[0])
        logprobs.append(best[1])
        bar.update()
    partial = path.with_suffix(".partial")
    save_file({"top_ids": torch.cat(ids), "top_logprobs": torch.cat(logprobs)}, partial)
    os.replace(partial, path)


def _read_shard(rows: Sequence[TokenRow], path: Path) -> list[TaughtRow]:
    stored = load_file(path)
    lengths = [len(row.token_ids) for row in rows]
    pieces = zip(
        rows,
        torch.split(stored["top_ids"], lengths),
        torch.split(stored["top_logprobs"], lengths),
        strict=True,
    )
    return [
        TaughtRow(
            token_ids=torch.tensor(row.token_ids),
            num_prompt_tokens=row.num_prompt_tokens,
            top_ids=top_ids,
            top_logprobs=top_logprobs.float(),
        )
        for row, top_ids, top_logprobs in pieces
    ]


@torch.inference_mode()
def _top_candidates(
    runner: ModelRunner, token_ids: Sequence[int], top_k: int
) -> tuple[Tensor, Tensor]:
    """([n, top_k] ids int32, [n, top_k] log-probabilities float16) of the token at each place."""
    length, vocab_size = len(token_ids), runner.vocab_size
    top_k = min(top_k, vocab_size)
    ids = torch.zeros(length, top_k, dtype=torch.int32)
    logprobs = torch.zeros(length, top_k, dtype=torch.float16)
    rows_per_pass = max(1, _MAX_LOGITS // vocab_size)
    view = runner.new_view("own-answers")
    try:
        view.reserve(length)
        # What follows the last token is nobody's business.
        for start in range(0, length - 1, rows_per_pass):
            piece = list(token_ids[start : min(start + rows_per_pass, length - 1)])
            output = runner.forward(
                [
                    ForwardSlice(
                        view=view,
                        token_ids=piece,
                        start_slot=start,
                        num_logit_rows=len(piece),
                    )
                ]
            )
            best = output.logits.log_softmax(-1).topk(top_k)  # [rows, top_k]
            places = slice(start + 1, start + 1 + len(piece))
            ids[places] = best.indices.int().cpu()
            logprobs[places] = best.values.half().cpu()
    finally:
        view.release()
    return ids, logprobs
