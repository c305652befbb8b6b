"""Training data of a drafter: the large model's own answers and its next-token distributions.

The engine generates answers, many at a time, and keeps them on disk as they end. So a restart
continues where the last run stopped. Then each sequence is read once more in a prefill pass, and
the `top_k` likeliest next tokens at every place are stored: half a percent of what whole rows of
logits would take. Training reads them as often as it likes and never needs the large model again,
which on a CPU is most of a step's time and memory.
"""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from outrider.draft.training.prompt_file import PromptDataError, PromptRow
from outrider.engine.core import Engine
from outrider.engine.errors import EngineError
from outrider.engine.events import Failed, Finished, TokensEmitted
from outrider.engine.passes.runner import ForwardSlice, ModelRunner
from outrider.engine.request import EngineRequest
from outrider.verifier.params import SamplingParams

_IN_FLIGHT = 64
_SHARD_ROWS = 64
# Logits of one pass while reading: 32 MiB of float32.
_MAX_LOGITS = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPlan:
    """Settings of the answers."""

    temperature: float = 0.0
    """0 is greedy."""
    max_tokens: int = 256
    """The most tokens of an answer."""
    max_length: int = 1024
    """The most tokens of prompt and answer together."""
    seed: int = 0
    """Row i draws from `seed` + i."""
    top_k: int = 32
    """Candidates of the large model that are kept at each place."""
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRow:
    """One sequence: the answer begins at `num_prompt_tokens`."""

    token_ids: tuple[int, ...]
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TaughtRow:
    """A sequence and what the large model expects at each of its n places, given those before it.

    Place 0 has no predecessor, and its values mean nothing.
    """

    token_ids: Tensor
    """int64 [n]."""
    num_prompt_tokens: int
    top_ids: Tensor
    """int32 [n, top_k], best first."""
    top_logprobs: Tensor
    """float32 [n, top_k], best first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TappedRow(TaughtRow):
    """A sequence whose taps (hidden states of some layers) lie in a file.

    The last place has none.
    """

    shard: Path
    first: int
    """Their first row in the file."""
    tap_size: int
    """The size of all taps of a place together."""

    def read_taps(self) -> Tensor:
        """[n, tap_size], in the large model's precision."""
        with safe_open(self.shard, "pt") as file:
            taps: Tensor = file.get_slice("taps")[self.first : self.first + len(self.token_ids)]
        return taps


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
                "The large model has no chat template, so it cannot use `prompt` or `messages`; "
                "give plain `text`."
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

    They are stored in `folder` in shards; shards that are there already are not computed again. A
    runner with taps stores these, too, and gives TappedRows: they stay on disk.
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
    read = []
    for row in rows:
        read.append(_read_row(runner, row.token_ids, top_k))
        bar.update()
    partial = path.with_suffix(".partial")
    save_file({name: torch.cat([row[name] for row in read]) for name in read[0]}, partial)
    os.replace(partial, path)


def _read_shard(rows: Sequence[TokenRow], path: Path) -> list[TaughtRow]:
    with safe_open(path, "pt") as file:
        top_ids, top_logprobs = file.get_tensor("top_ids"), file.get_tensor("top_logprobs").float()
        tap_size = file.get_slice("taps").get_shape()[1] if "taps" in set(file.keys()) else 0
    taught: list[TaughtRow] = []
    first = 0
    for row in rows:
        places = slice(first, first + len(row.token_ids))
        fields: dict[str, Any] = {
            "token_ids": torch.tensor(row.token_ids),
            "num_prompt_tokens": row.num_prompt_tokens,
            "top_ids": top_ids[places],
            "top_logprobs": top_logprobs[places],
        }
        if tap_size:
            taught.append(TappedRow(**fields, shard=path, first=first, tap_size=tap_size))
        else:
            taught.append(TaughtRow(**fields))
        first = places.stop
    return taught


@torch.inference_mode()
def _read_row(runner: ModelRunner, token_ids: Sequence[int], top_k: int) -> dict[str, Tensor]:
    """Return what the large model expects: top_ids int32 [n, top_k] and top_logprobs float16.

    With taps: what it has at each place behind those layers, [n, size].
    """
    length, vocab_size = len(token_ids), runner.vocab_size
    top_k = min(top_k, vocab_size)
    ids = torch.zeros(length, top_k, dtype=torch.int32)
    logprobs = torch.zeros(length, top_k, dtype=torch.float16)
    taps = []
    rows_per_pass = max(1, _MAX_LOGITS // vocab_size)
    view = runner.new_view("own-answers")
    try:
        view.reserve(length)
        # The distribution after the last token is not needed.
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
            if output.taps is not None:
                taps.append(output.taps.cpu().clone())  # valid until the next pass
    finally:
        view.release()
    read = {"top_ids": ids, "top_logprobs": logprobs}
    if taps:
        # The last token's are never a feature: nothing stands behind it.
        read["taps"] = torch.cat([*taps, torch.zeros_like(taps[0][:1])])
    return read
