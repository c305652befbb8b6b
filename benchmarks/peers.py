"""transformers on the same weights: plain, assisted and with prompt lookup.

It runs in a process of its own, in the environment that its users have: our engine sets how long
OpenMP's threads wait for work, which is not transformers' default. The process sleeps while it is
not its turn.
"""

import contextlib
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

from benchmarks.harness import quiet_transformers, without_engine_environment
from benchmarks.prompts import Prompt

# Tokens looked up at a time, as in the figures of the field that this is compared with.
LOOKUP_TOKENS = 8
_START_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRun:
    """A finished run. `decode_s`, `num_decoded_tokens`: plain only, after each first token."""

    wall_s: float
    outputs: list[list[int]]
    decode_s: float = 0.0
    num_decoded_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens emitted."""
        return sum(len(answer) for answer in self.outputs)

    @property
    def tokens_per_s(self) -> float:
        """Prompts included in the time."""
        return self.num_tokens / self.wall_s


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerModels:
    """What the process loads: a target, and assistants by name."""

    target: Path
    assistants: dict[str, Path]
    dtype: torch.dtype
    device: str
    num_threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerTask:
    """Greedy answers to prompts. `batch_size` 1 is without padding.

    assistant: the name of the assistant model, if one helps. lookup: with prompt lookup.
    """

    prompts: Sequence[Prompt]
    max_tokens: int
    stop: tuple[int, ...]
    batch_size: int = 1
    assistant: str | None = None
    lookup: bool = False


class Peer:
    """The other process, seen from here."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def run(self, task: PeerTask) -> PeerRun:
        """Run a task there. Raises RuntimeError with what transformers said."""
        self._connection.send(task)
        run: PeerRun = self._receive()
        return run

    def wait(self) -> None:
        """Until it has loaded its models."""
        if not self._connection.poll(_START_TIMEOUT_S):
            raise RuntimeError(f"transformers did not load within {_START_TIMEOUT_S} s")
        self._receive()

    def _receive(self) -> Any:
        try:
            result = self._connection.recv()
        except EOFError:
            raise RuntimeError("the process that runs transformers has died") from None
        if isinstance(result, Exception):
            raise RuntimeError(f"transformers failed: {result}") from result
        return result


@contextlib.contextmanager
def peer_process(models: PeerModels) -> Iterator[Peer]:
    """Load the models in a process that ends with the context."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, models), daemon=True)
    with without_engine_environment():
        process.start()
    theirs.close()
    try:
        peer = Peer(ours)
        peer.wait()
        yield peer
    finally:
        ours.close()
        process.join(timeout=10)
        process.kill()


# ---- in the other process ---------------------------------------------------------------------


def _serve(connection: Connection, models: PeerModels) -> None:
    quiet_transformers()
    torch.set_num_threads(models.num_threads)
    try:
        target = _load(models.target, models)
        assistants = {name: _load(folder, models) for name, folder in models.assistants.items()}
        connection.send(None)
        while True:
            task: PeerTask = connection.recv()
            if task.batch_size == 1:
                connection.send(_one_by_one(target, assistants, task))
            else:
                connection.send(_padded(target, task))
    except EOFError:
        return
    except Exception as error:  # noqa: BLE001 - the other side raises it
        connection.send(RuntimeError(repr(error)))


def _load(folder: Path, models: PeerModels) -> Any:
    """The model; `generate` comes by a mixin that its types do not show."""
    model: Any = AutoModelForCausalLM.from_pretrained(str(folder), dtype=models.dtype)
    return model.to(models.device).eval()


class _Arrivals(StoppingCriteria):
    """Never stops; notes when a pass of the target was done, and how long the text was then."""

    def __init__(self) -> None:
        self.noted: list[tuple[float, int]] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.noted.append((time.perf_counter(), input_ids.shape[1]))
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


@torch.inference_mode()
def _one_by_one(model: Any, assistants: dict[str, Any], task: PeerTask) -> PeerRun:
    options = _options(task)
    if task.assistant is not None:
        options["assistant_model"] = assistants[task.assistant]
    if task.lookup:
        options["prompt_lookup_num_tokens"] = LOOKUP_TOKENS
    outputs = []
    decode_s, num_decoded = 0.0, 0
    started_s = time.perf_counter()
    for prompt in task.prompts:
        input_ids = torch.tensor([prompt.token_ids], device=model.device)
        arrivals = _Arrivals()
        answer = model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            stopping_criteria=StoppingCriteriaList([arrivals]),
            **options,
        )
        outputs.append(answer[0, len(prompt.token_ids) :].tolist())
        # With an assistant the first delivery holds a whole round, so there is no such rate.
        if arrivals.noted and task.assistant is None and not task.lookup:
            decode_s += arrivals.noted[-1][0] - arrivals.noted[0][0]
            num_decoded += arrivals.noted[-1][1] - arrivals.noted[0][1]
    return PeerRun(
        wall_s=time.perf_counter() - started_s,
        outputs=outputs,
        decode_s=decode_s,
        num_decoded_tokens=num_decoded,
    )


@torch.inference_mode()
def _padded(model: Any, task: PeerTask) -> PeerRun:
    """In batches padded on the left; a batch lasts as long as its longest answer."""
    options = _options(task)
    outputs: list[list[int]] = []
    started_s = time.perf_counter()
    for start in range(0, len(task.prompts), task.batch_size):
        rows = [list(prompt.token_ids) for prompt in task.prompts[start : start + task.batch_size]]
        width = max(len(row) for row in rows)
        gaps = [width - len(row) for row in rows]
        padded = [
            [options["pad_token_id"]] * gap + row for gap, row in zip(gaps, rows, strict=True)
        ]
        mask = [[0] * gap + [1] * (width - gap) for gap in gaps]
        answers = model.generate(
            torch.tensor(padded, device=model.device),
            attention_mask=torch.tensor(mask, device=model.device),
            **options,
        )
        outputs.extend(_cut(answer, task.stop) for answer in answers[:, width:].tolist())
    return PeerRun(wall_s=time.perf_counter() - started_s, outputs=outputs)


def _options(task: PeerTask) -> dict[str, Any]:
    return {
        "max_new_tokens": task.max_tokens,
        "do_sample": False,
        "eos_token_id": list(task.stop) or None,
        "pad_token_id": task.stop[0] if task.stop else 0,
    }


def _cut(answer: list[int], stop: tuple[int, ...]) -> list[int]:
    """The answer up to its first stop token, that one included."""
    for index, token_id in enumerate(answer):
        if token_id in stop:
            return answer[: index + 1]
    return answer
