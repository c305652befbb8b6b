"""Next tokens of small answers: whatever is asked, a pass has one upload and one read-back."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import outrider.verifier.next_tokens as module
from outrider.engine.core import Engine
from outrider.engine.request import EngineRequest
from outrider.kernels.triton_support import triton, use_kernels
from outrider.kernels.upload import read_back, upload_all
from tests.engines import (
    Answer,
    finish,
    make_engine,
    make_request,
    random_prompt,
    serve,
    tiny_pair,
)

CPU = torch.device("cpu")
# What makes the host wait for a device, and what copies to one from memory that is not pinned.
WAITING = {
    Tensor.tolist, Tensor.item, Tensor.cpu, Tensor.numpy, Tensor.__bool__, Tensor.__int__,
    Tensor.__float__, Tensor.nonzero, torch.tensor, torch.nonzero,
}  # fmt: skip


class _Waits(TorchFunctionMode):
    """Counts the functions in `WAITING`, except while it is paused."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.is_paused = False

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in WAITING and not self.is_paused:
            self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))

    def paused(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, in which nothing is counted."""

        def uncounted(*args: Any, **kwargs: Any) -> Any:
            was_paused, self.is_paused = self.is_paused, True
            try:
                return function(*args, **kwargs)
            finally:
                self.is_paused = was_paused

        return uncounted


def request(number: int) -> EngineRequest:
    """Greedy or sampled, with or without log-probabilities; one is not watched."""
    return make_request(
        f"r{number}", random_prompt(5, seed=number), tier="small", max_tokens=3,
        temperature=0.8 * (number % 2), seed=number,
        num_logprobs=(0, 2, None, 3)[number], may_escalate=number != 2,
    )  # fmt: skip


@contextmanager
def counted_passes(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[tuple[int, list[str]]]]:
    """For every small pass that is verified, how often tensors were moved on purpose, and else."""
    from triton.runtime.interpreter import GridExecutor

    waits = _Waits()
    moves: list[str] = []
    passes: list[tuple[int, list[str]]] = []
    verify = engine._drafting._verify

    def moving(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def moved(*args: Any) -> Any:
            moves.append(name)
            return waits.paused(function)(*args)

        return moved

    def watched(done: Any) -> None:
        moves.clear()
        waits.names.clear()
        with waits:
            verify(done)
        assert moves == ["upload", "read"]
        passes.append((len(done.items), waits.names.copy()))

    monkeypatch.setattr(module, "upload_all", moving("upload", upload_all))
    monkeypatch.setattr(module, "read_back", moving("read", read_back))
    monkeypatch.setattr(GridExecutor, "__call__", waits.paused(GridExecutor.__call__))
    monkeypatch.setattr(engine._drafting, "_verify", watched)
    yield passes


@pytest.mark.slow
@pytest.mark.skipif(triton is None, reason="there is no triton for this system")
def test_watched_answers_with_logprobs_cost_one_upload_and_one_read_back_a_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine(tiny_pair(), on_device=True)
    for number in range(4):
        engine.submit(request(number))
    answers: dict[str, Answer] = {}
    with use_kernels("triton"), counted_passes(engine, monkeypatch) as passes:
        finish(engine, answers)
    assert max(number for number, _ in passes) == 4
    assert {name for _, names in passes for name in names} <= set()


@pytest.mark.slow
def test_kernels_and_torch_say_the_same_of_watched_answers() -> None:
    if triton is None:
        pytest.skip("there is no triton for this system")
    found = []
    for choice in ("reference", "triton"):
        with use_kernels(choice):
            engine = make_engine(tiny_pair(), on_device=True)
            answers = serve(engine, [request(number) for number in range(4)])
            found.append(answers)
    for name, right in found[0].items():
        mine = found[1][name]
        assert mine.token_ids == right.token_ids
        for own, other in zip(mine.logprobs, right.logprobs, strict=True):
            assert own.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert [token for token, _ in own.top] == [token for token, _ in other.top]


def test_arrays_of_several_types_arrive_whole_and_aligned() -> None:
    arrays = [
        np.arange(3, dtype=np.int64), np.zeros(0, np.int64), np.ones((2, 3), np.float32),
        np.arange(5, dtype=np.int32),
    ]  # fmt: skip
    there = upload_all(arrays, CPU)
    for tensor, array in zip(there, arrays, strict=True):
        assert tensor.numpy().dtype == array.dtype
        np.testing.assert_array_equal(tensor.numpy(), array)
        assert not tensor.numel() or tensor.data_ptr() % 16 == there[0].data_ptr() % 16
    for back, array in zip(read_back(there), arrays, strict=True):
        np.testing.assert_array_equal(back, array)
