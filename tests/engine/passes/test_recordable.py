"""A recorded pass waits for nothing: no scheme, no kind of layer reads the device's results."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from outrider.engine.model.decoder import DecoderModel
from outrider.engine.model.quantised import scheme as schemes
from outrider.engine.model.quantised.formats import Rounding, SchemeName
from outrider.engine.passes.runner import ModelRunner
from outrider.kernels.triton_support import Launch, record_launches, triton
from tests.engine.model.test_quantised_weights import CASES, quantise_folder
from tests.models import save_hf_model

pytestmark = pytest.mark.skipif(triton is None, reason="needs Triton")
# Recording has no values: what is not here cannot decide what is launched.
NO_VALUES = partial(FakeTensorMode, allow_non_fake_inputs=True)


class NothingFromTheHost(TorchDispatchMode):
    """Refuse tensors made of Python's numbers: on a GPU their copy is waited for."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation."""
        if func is torch.ops.aten.lift_fresh.default:
            raise AssertionError("a tensor is made of the host's numbers")
        return func(*args, **(kwargs or {}))


def record(run: Callable[[], None]) -> Callable[[], None]:
    """Stand in for a CUDA graph: run without values, then drop the pass as CUDA does."""
    with NO_VALUES(), NothingFromTheHost():
        run()
    return lambda: None


def launches_of(model: Callable[[], DecoderModel], **options: Any) -> list[Launch]:
    """All launches of a model's recordings of 1 to 8 rows, loaded as for a GPU."""
    with record_launches(90) as launches:
        runner = ModelRunner(model=model(), num_blocks=8, **options)
        del launches[:]
        assert runner.model.can_record
        assert runner.capture_graphs(capture=record, max_rows=8) >= 4
        return launches


def names(launches: list[Launch]) -> set[str]:
    return {launch.kernel.fn.__name__ for launch in launches}


def rounded(folder: Path, architecture: str, scheme: SchemeName | None) -> DecoderModel:
    """A tiny model; the folder has its checkpoint already."""
    rounding = None if scheme is None else Rounding(scheme=scheme)
    return DecoderModel.load(str(folder / architecture), dtype="bfloat16", rounding=rounding)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of a dense model and of mixtures."""
    parent = tmp_path_factory.mktemp("checkpoints")
    save_hf_model("qwen3", parent / "qwen3")
    for name in ("qwen3-moe", "qwen2-moe", "gpt-oss"):
        save_hf_model(
            name, parent / name, **({"moe_intermediate_size": 64} if "qwen" in name else {})
        )
    return parent


@pytest.fixture(autouse=True)
def _narrow_weights_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schemes, "MIN_ROUNDED_SIDE", 32)


@pytest.mark.slow_cases
@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    ("scheme", "kernel"),
    [(None, "_attend_kernel"), ("int8", "_int8_kernel"), ("int4", "_int4_kernel")],
)
def test_dense_models(
    scheme: SchemeName | None, kernel: str, kv_dtype: torch.dtype | None, folder: Path
) -> None:
    found = launches_of(partial(rounded, folder, "qwen3", scheme), kv_dtype=kv_dtype)
    assert kernel in names(found)


@pytest.mark.slow_cases
@pytest.mark.parametrize("architecture", ["qwen3-moe", "qwen2-moe", "gpt-oss"])
@pytest.mark.parametrize(
    ("scheme", "kernel"),
    [
        (None, "_expert_gate_up_kernel"),
        ("int8", "_expert_product_kernel"),
        ("int4", "_expert_product_kernel"),
    ],
)
def test_mixtures_of_experts(
    architecture: str, scheme: SchemeName | None, kernel: str, folder: Path
) -> None:
    """Experts that are rounded went one by one, by the numbers of rows that the host read."""
    found = launches_of(partial(rounded, folder, architecture, scheme))
    assert kernel in names(found)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[] if case in ("gptq-4", "fp8-blocks") else pytest.mark.slow)
        for case in CASES
    ],
)
def test_weights_as_they_are_stored(case: str, tmp_path: Path) -> None:
    quantise_folder(tmp_path, case)
    found = launches_of(partial(DecoderModel.load, str(tmp_path), dtype="bfloat16"))
    assert ("_stored_kernel" in names(found)) == (case != "gptq-act-order")


@pytest.mark.slow_cases
@pytest.mark.parametrize("fault", ["item", "tolist", "nonzero", "tensor"])
def test_a_pass_that_waits_is_found(fault: str, folder: Path) -> None:
    model = rounded(folder, "qwen3", None)
    forward = model.forward

    def waiting(token_ids: torch.Tensor, *rest: Any, **options: Any) -> Any:
        if fault == "tensor":
            torch.tensor([1, 2], device=token_ids.device)
        else:
            getattr(token_ids[:1], fault)()
        return forward(token_ids, *rest, **options)

    model.forward = waiting  # type: ignore[method-assign]
    with pytest.raises((RuntimeError, AssertionError)):
        launches_of(lambda: model)
