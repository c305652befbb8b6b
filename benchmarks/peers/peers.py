"""transformers on the same weights: plain and assisted.

It runs in a process of its own, in the environment that its users have: our engine sets how long
OpenMP's threads wait for work, which is not transformers' default. The process sleeps while it is
not its turn.
"""

import contextlib
import multiprocessing
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

from benchmarks.shared.harness import quiet_transformers, without_engine_environment
from benchmarks.shared.prompts import Prompt
from benchmarks.shared.turns import Turn

_START_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerModels:
    """Models that the process loads."""

    target: Path
    assistant: Path
    dtype: torch.dtype
    device: str
    num_threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerTask:
    """A greedy answer to a prompt: plainly or with the assistant's help."""

    prompt: Prompt
    max_tokens: int
    stop: tuple[int, ...]
    assisted: bool = False


class Peer:
    """The other process, seen from here."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def run(self, task: PeerTask) -> Turn:
        """Run a task there. Raises RuntimeError with what transformers said."""
        self._connection.send(task)
        run: Turn = self._receive()
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
        target, assistant = (_load(folder, models) for folder in (models.target, models.assistant))
        connection.send(None)
        while True:
            task: PeerTask = connection.recv()
            connection.send(_answer(target, assistant, task))
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
def _answer(model: Any, assistant: Any, task: PeerTask) -> Turn:
    options: dict[str, Any] = {
        "max_new_tokens": task.max_tokens,
        "do_sample": False,
        "eos_token_id": list(task.stop) or None,
        "pad_token_id": task.stop[0] if task.stop else 0,
    }
    if task.assisted:
        options["assistant_model"] = assistant
    started_s = time.perf_counter()
    input_ids = torch.tensor([task.prompt.token_ids], device=model.device)
    arrivals = _Arrivals()
    answer = model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        stopping_criteria=StoppingCriteriaList([arrivals]),
        **options,
    )
    token_ids = answer[0, input_ids.shape[1] :].tolist()
    wall_s = time.perf_counter() - started_s
    decode_s, num_decoded = 0.0, 0
    # With guesses the first delivery holds a whole round, so there is no such rate.
    if arrivals.noted and not task.assisted:
        decode_s = arrivals.noted[-1][0] - arrivals.noted[0][0]
        num_decoded = arrivals.noted[-1][1] - arrivals.noted[0][1]
    return Turn(
        wall_s=wall_s,
        token_ids=token_ids,
        decode_s=decode_s,
        num_decoded_tokens=num_decoded,
        num_passes=len(arrivals.noted),
    )
