"""Launches that a layer costs on a GPU: our kernels and torch's operations, counted without one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from outrider.draft.config import DraftConfig
from outrider.draft.device.draft_levels import capture_levels
from outrider.engine.model.decoder import DecoderModel
from outrider.engine.passes.flat_rows import ForwardSlice
from outrider.engine.passes.runner import ModelRunner
from outrider.kernels.triton_support import observe_launches, record_launches, triton, use_kernels
from outrider.verifier.token_tree import TokenTree
from tests.models import save_hf_model

pytestmark = pytest.mark.skipif(triton is None, reason="there is no triton for this system")

PAIR = Path(__file__).parents[3] / "draft" / "pair"
FUSED = [
    "_rope_write_kv_kernel",
    "_attend_kernel",
    "_combine_kernel",
    "_split_k_kernel",  # the output's, which adds to the residual stream, and half the norm
    "_split_k_kernel",  # gate and up, the gate
    "_split_k_kernel",  # down, which adds, and half the norm
    "_split_k_kernel",  # the next layer's queries, keys and values
]
SEPARATE = [
    "_rope_write_kv_kernel",
    "_attend_kernel",
    "_combine_kernel",
    "product",
    "_rms_norm_kernel",
    "product",
    "_gated_mul_kernel",
    "product",
    "_rms_norm_kernel",
    "product",
]


class _Operations(TorchDispatchMode):
    """Notes torch's operations that are launches on a GPU: all but views and empty tensors."""

    def __init__(self, noted: list[str]) -> None:
        super().__init__()
        self.noted = noted

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = operation.overloadpacket.__name__
        returns = operation._schema.returns
        is_view = bool(returns) and all(
            each.alias_info is not None and not each.alias_info.is_write for each in returns
        )
        if not is_view and "empty" not in name and name != "_unsafe_view":
            self.noted.append("product" if name in ("mm", "addmm", "linear") else name)
        return operation(*args, **(kwargs or {}))


@contextmanager
def noted_launches() -> Iterator[list[str]]:
    """Within the block, note launches in their order; our kernels are not run."""
    noted: list[str] = []
    with (
        record_launches(90),
        observe_launches(lambda launch: noted.append(launch.kernel.__name__)),
        _Operations(noted),
    ):
        yield noted


def launches_of_a_layer(
    model: DecoderModel, count: int, tree: TokenTree | None = None
) -> list[str]:
    """From one layer's rotation to the next one's, in a pass of the runner.

    count: of sequences that decode, or of the rows of a tree.
    """
    runner = ModelRunner(model=model, num_blocks=40)
    slices = []
    for _ in range(count if tree is None else 1):
        view = runner.new_view("")
        view.reserve(20 + (0 if tree is None else tree.num_nodes))
        slices.append(
            ForwardSlice(
                view=view,
                token_ids=[3] if tree is None else tree.token_ids,
                start_slot=19,
                num_logit_rows=1 if tree is None else tree.num_nodes,
                positions=None if tree is None else [19 + depth for depth in tree.depth],
                tree_start=None if tree is None else 19,
                ancestor_masks=None if tree is None else tree.ancestor_mask,
            )
        )
    with noted_launches() as noted:
        runner.forward(slices)
    begins = [place for place, name in enumerate(noted) if name == "_rope_write_kv_kernel"]
    layers = [noted[first:last] for first, last in pairwise(begins)]
    assert len(layers) == model.config.num_layers - 1 > 0
    assert all(layer == layers[0] for layer in layers)
    return layers[0]


def load(folder: Path, **options: Any) -> DecoderModel:
    with use_kernels("triton"):
        return DecoderModel.load(str(folder), **options)


@pytest.fixture(scope="module")
def model() -> DecoderModel:
    return load(PAIR / "small", dtype="bfloat16")


@pytest.mark.parametrize("count", [1, 2, 16])
def test_a_layer_of_few_rows_is_seven_launches(model: DecoderModel, count: int) -> None:
    assert launches_of_a_layer(model, count) == FUSED


def test_so_is_a_layer_of_a_tree(model: DecoderModel) -> None:
    tree = TokenTree(token_ids=list(range(16)), parent_index=[-1, *(n // 2 for n in range(15))])
    assert launches_of_a_layer(model, 16, tree) == FUSED


def test_more_rows_have_the_librarys_products(model: DecoderModel) -> None:
    assert launches_of_a_layer(model, 17) == SEPARATE


@pytest.mark.parametrize("kind", ["deterministic", "float16", "other norms"])
def test_so_have_models_that_the_fused_ones_do_not_serve(kind: str, tmp_path: Path) -> None:
    """In deterministic mode a row has the same bits among few rows and among many."""
    if kind == "other norms":
        save_hf_model("gemma2", tmp_path)
        names = launches_of_a_layer(load(tmp_path, dtype="bfloat16"), 1)
    elif kind == "float16":
        names = launches_of_a_layer(load(PAIR / "small", dtype="float16"), 1)
    else:
        names = launches_of_a_layer(load(PAIR / "small", deterministic=True), 1)
    assert "_split_k_kernel" not in names
    assert "_rms_norm_kernel" in names


def test_an_operation_of_torch_counts(model: DecoderModel, monkeypatch: pytest.MonkeyPatch) -> None:
    attend = model._attend.attend
    monkeypatch.setattr(model._attend, "attend", lambda *inputs: attend(*inputs).mul(1.0))
    names = launches_of_a_layer(model, 1)
    assert names.count("mul") == 1
    assert len(names) == len(FUSED) + 1


def test_a_draft_level_is_its_layers_and_few_launches_more(model: DecoderModel) -> None:
    """All of them in one graph; greedy and sampled rows alike, truncated ones with four more."""
    runner = ModelRunner(model=model, num_blocks=40)
    levels: list[list[str]] = []

    def record(run: Callable[[], None]) -> Callable[[], None]:
        with noted_launches() as noted:
            run()
        levels.append(noted)
        return run

    runner.capture_graphs(capture=record, max_rows=1)
    levels.clear()
    with patch("outrider.engine.passes.level_graphs.TREE_COUNTS", (1,)):
        assert capture_levels(DraftConfig(), runner, runner) == 2
    truncated, plain = levels
    around = [name for name in plain if name not in FUSED]
    assert around == [
        "_choose_frontier_kernel",
        "_stage_rows_kernel",
        "_divide_work_kernel",
        "_embed_kernel",
        "_rms_norm_kernel",  # in front of the first layer
        "_rms_norm_kernel",  # the last, in front of the logits
        "product",
        "_gather_kernel",
        "_chunk_top_kernel",
        "_merge_top_kernel",
        "_expand_tree_kernel",
    ]
    assert len(plain) == len(around) + len(FUSED) * model.config.num_layers
    assert len(truncated) == len(plain) + 4
