"""The decoder's Triton path against its torch path: the same weights, the same passes.

On a GPU the former runs there, and the latter on the CPU; else both do, in the interpreter.
"""

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from outrider.engine.model.decoder import DecoderModel
from outrider.engine.model.kv_cache import KVCache
from outrider.engine.model.protocol import ForwardOutput
from outrider.kernels.triton_support import record_launches, use_kernels
from tests.engine.model.decoder_passes import (
    NUM_BLOCKS,
    PARENTS,
    Rows,
    ancestors_of,
    make_table,
    make_tokens,
    new_cache,
    run,
    tree_rows,
)
from tests.models import save_hf_model

PAIR = Path(__file__).parents[3] / "draft" / "pair"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Dtype = Literal["float32", "bfloat16"]


class Twins:
    """One checkpoint twice: as it runs on a GPU, and as the reference computes it."""

    def __init__(self, folder: Path, dtype: Dtype) -> None:
        with use_kernels("triton"):
            self.fused = DecoderModel.load(str(folder), dtype=dtype, device=DEVICE)
        self.plain = DecoderModel.load(str(folder), dtype=dtype)

    def run(
        self, caches: tuple[KVCache, KVCache], *sequences: Rows, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(logits of the Triton path, of the reference)."""
        with use_kernels("triton"):
            fused = run(self.fused, caches[0], *sequences, rows=rows)
        with use_kernels("reference"):
            plain = run(self.plain, caches[1], *sequences, rows=rows)
        assert fused.logits.dtype == torch.float32
        assert fused.hidden.shape == plain.hidden.shape
        return fused.logits.cpu(), plain.logits

    def caches(self, dtype: torch.dtype | None = None) -> tuple[KVCache, KVCache]:
        return new_cache(self.fused, dtype), new_cache(self.plain, dtype)


@pytest.fixture(scope="module")
def small() -> Twins:
    return Twins(PAIR / "small", "float32")


@pytest.fixture(scope="module")
def small_bfloat16() -> Twins:
    return Twins(PAIR / "small", "bfloat16")


Logits = dict[str, tuple[Tensor, Tensor]]


def play(twins: Twins, caches: tuple[KVCache, KVCache]) -> Logits:
    """A prefill, a decode, a tree, and all of them side by side in one pass."""
    tables = [make_table(seed) for seed in range(3)]
    prompt, one = make_tokens(11), make_tokens(1, seed=2)
    tree = tree_rows(make_tokens(len(PARENTS), seed=1), tables[0], start=12)
    prefill = Rows(token_ids=prompt, num_computed=0, block_table=tables[0])
    decode = Rows(token_ids=one, num_computed=11, block_table=tables[0])
    beginning = Rows(token_ids=prompt[:3], num_computed=0, block_table=tables[1])
    chunk = Rows(token_ids=prompt[3:], num_computed=3, block_table=tables[1])
    other = Rows(token_ids=prompt[:2], num_computed=0, block_table=tables[2])
    return {
        "prefill": twins.run(caches, prefill, beginning),
        "decode": twins.run(caches, decode),
        "tree": twins.run(caches, tree),
        "all kinds": twins.run(caches, other, chunk, tree, decode),
    }


@pytest.fixture(scope="module")
def exact(small: Twins) -> tuple[Logits, tuple[KVCache, KVCache]]:
    """Return what float32 gives, and the caches it leaves."""
    caches = small.caches()
    return play(small, caches), caches


@pytest.fixture(scope="module")
def halves(small_bfloat16: Twins) -> Logits:
    return play(small_bfloat16, small_bfloat16.caches())


@pytest.mark.slow
def test_the_bundled_drafter_computes_the_same(
    exact: tuple[Logits, tuple[KVCache, KVCache]],
) -> None:
    for name, (fused, plain) in exact[0].items():
        assert fused.shape == plain.shape
        assert plain.std() > 1, name  # logits that tell tokens apart
        torch.testing.assert_close(fused, plain, atol=2e-4, rtol=1e-4, msg=name)
    fused_cache, plain_cache = exact[1]
    torch.testing.assert_close(
        fused_cache.groups[0].tensor.cpu(), plain_cache.groups[0].tensor, atol=1e-4, rtol=1e-4
    )


@pytest.mark.slow
def test_in_bfloat16_it_is_as_near_to_float32_as_the_reference(
    exact: tuple[Logits, tuple[KVCache, KVCache]], halves: Logits
) -> None:
    squares = []
    for name, (fused, plain) in halves.items():
        _, right = exact[0][name]
        squares.append(torch.stack(((fused - right).square(), (plain - right).square())))
        assert squares[-1][0].mean().sqrt() < 0.05 * right.std(), name
    ours, theirs = torch.cat(squares, 1).mean((1, 2)).sqrt().tolist()
    assert ours < 1.2 * theirs  # over all rows: of a single one, either may be the nearer


@pytest.mark.slow
def test_an_fp8_cache_costs_little(small_bfloat16: Twins, halves: Logits) -> None:
    """Both paths quantise alike; what is lost is small beside the logits' spread."""
    caches = small_bfloat16.caches(torch.float8_e4m3fn)
    for name, (fused, plain) in play(small_bfloat16, caches).items():
        _, right = halves[name]
        for logits in (fused, plain):
            error = (logits - right).square().mean().sqrt()
            assert 0 < error < 0.15 * right.std(), name
        assert (fused - plain).square().mean().sqrt() < 0.1 * right.std(), name
    for cache in caches:
        assert cache.groups[0].scales is not None
        assert 12 + 14 + 11 + 2 <= (cache.groups[0].scales[0, 0, ..., 0] > 0).sum() <= 45


@pytest.mark.parametrize(
    "name",
    [
        "gemma2",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in (
                "cohere2",
                "glm4-moe",
                "gpt-oss",
                "llama-biases",
                "phi3-long",
                "qwen2-mixed-windows",
                "qwen3-tied-mqa",
            )
        ),
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in ("gemma3", "glm4", "granite", "olmo2", "qwen2-moe", "smollm3")
        ),
    ],
)
def test_other_architectures_compute_the_same(name: str, tmp_path: Path) -> None:
    """Heads of 24, biases, windows and rotation in some layers, norms of every kind and place."""
    save_hf_model(name, tmp_path)
    twins = Twins(tmp_path, "float32")
    for fused, plain in play(twins, twins.caches()).values():
        torch.testing.assert_close(fused, plain, atol=2e-4, rtol=1e-4)


def with_launches(
    twins: Twins, *sequences: Rows, rows: Tensor | None = None
) -> tuple[ForwardOutput, list[str]]:
    """Nothing is computed; the names of the Triton kernels that would be."""
    with record_launches(90) as launches:
        output = run(twins.plain, new_cache(twins.plain), *sequences, rows=rows)
    return output, [launch.kernel.__name__ for launch in launches]


def test_launches_of_a_layer(small: Twins) -> None:
    """Beside four products: two norms, one for rotation and cache, the gate, attention."""
    rows = Rows(token_ids=make_tokens(1), num_computed=19, block_table=make_table(0))
    _, names = with_launches(small, rows)
    num_layers = small.plain.config.num_layers
    ours = ["_rms_norm_kernel", "_rope_write_kv_kernel", "_gated_mul_kernel", "_embed_kernel"]
    counts = {name: names.count(name) for name in ours}
    assert counts == {
        "_rms_norm_kernel": 2 * num_layers + 1,
        "_rope_write_kv_kernel": num_layers,
        "_gated_mul_kernel": num_layers,
        "_embed_kernel": 1,
    }
    others = [name for name in names if name not in ours]
    assert len(others) <= 2 * num_layers + 1  # attention, merging its splits, and its plan


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # those rows compute with any garbage
def test_rows_without_a_slot_change_nothing(small: Twins, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that only fill up a CUDA graph hold anything; beside them, others get what is theirs."""
    model = small.fused
    rows = Rows(token_ids=make_tokens(3), num_computed=0, block_table=[5, 3])
    forward = model.forward

    def padded(
        token_ids: Tensor, positions: Tensor, slots: Tensor, *rest: Any, **options: Any
    ) -> ForwardOutput:
        filler = torch.tensor([-1, 1 << 40], device=model.device)
        return forward(
            torch.cat((token_ids, filler)),
            torch.cat((positions, filler)),
            torch.cat((slots, filler)),
            *rest,
            **options,
        )

    with use_kernels("triton"):
        alone = run(model, new_cache(model), rows).logits
        cache = new_cache(model)
        cache.groups[0].tensor.fill_(7)
        monkeypatch.setattr(model, "forward", padded)
        together = run(model, cache, rows).logits
    assert together.shape[0] == 5
    torch.testing.assert_close(together[:3], alone, atol=1e-4, rtol=1e-4)
    is_changed = (cache.groups[0].tensor != 7).flatten(4).any(-1).flatten(2)  # [layers, 2, slots]
    expected = torch.zeros_like(is_changed)
    expected[:, :, 20:23] = True  # block 5
    assert torch.equal(is_changed, expected)


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["triton", "reference"])
@pytest.mark.parametrize("wanted", [None, [], [2], [4, 0], [4, 3, 2, 1, 0]])
def test_which_rows_get_logits(
    small: Twins, kernels: Literal["triton", "reference"], wanted: list[int] | None
) -> None:
    model = small.fused if kernels == "triton" else small.plain
    rows = Rows(token_ids=make_tokens(5), num_computed=0, block_table=[5, 3])
    index = None if wanted is None else torch.tensor(wanted, dtype=torch.int64)
    order = list(range(5)) if wanted is None else wanted
    with use_kernels(kernels):
        everything = run(model, new_cache(model), rows, rows=torch.arange(5))
        out = torch.full((len(order), model.config.vocab_size), 7.0, device=model.device)
        output = run(model, new_cache(model), rows, rows=index, logits_out=out)
    assert output.logits is out
    torch.testing.assert_close(out, everything.logits[order], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(output.hidden, everything.hidden[order], atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_each_branch_is_its_plain_sequence(small: Twins) -> None:
    """The Triton path against itself: a tree's deepest branch, token by token."""
    model, table = small.fused, make_table(2)
    prompt, nodes = make_tokens(19), make_tokens(len(PARENTS), seed=1)
    with use_kernels("triton"):
        cache = new_cache(model)
        run(model, cache, Rows(token_ids=prompt, num_computed=0, block_table=table))
        tree = run(model, cache, tree_rows(nodes, table, start=19)).logits
        path = ancestors_of(13)
        chain = torch.cat((prompt, nodes[path]))
        plain = run(
            model, new_cache(model), Rows(token_ids=chain, num_computed=0, block_table=table)
        ).logits
    torch.testing.assert_close(tree[path], plain[19:], atol=1e-4, rtol=1e-4)


def test_the_size_of_a_scaled_cache() -> None:
    model = DecoderModel.load(str(PAIR / "small"))
    cache = new_cache(model, torch.float8_e4m3fn)
    per_block = KVCache.bytes_per_block(model.config, block_size=4, dtype=torch.float8_e4m3fn)
    assert cache.size_bytes == NUM_BLOCKS * per_block == NUM_BLOCKS * 2 * 2 * 4 * 2 * (32 + 4)
    assert cache.groups[0].scales is not None
    assert cache.groups[0].scales.shape == cache.groups[0].tensor.shape[:-1]
    for index, (k_scale, v_scale) in enumerate(cache.layer_scales):
        assert k_scale is not None
        assert v_scale is not None
        assert k_scale.data_ptr() == cache.groups[0].scales[index, 0].data_ptr()
        assert v_scale.data_ptr() == cache.groups[0].scales[index, 1].data_ptr()
    plain = new_cache(model)
    assert plain.groups[0].scales is None
    assert plain.layer_scales == ((None, None), (None, None))
