"""Is it right on this device: kernels at serving shapes, and recorded passes, for gpu_first.

Each check compares with float64 or with the project's own references, on poisoned memory where a
kernel allocates its output, and twice where the bits must be the same.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.gpu_attention_cases import Cache, Problem, Shape
from benchmarks.gpu.gpu_engine_cases import Context
from benchmarks.gpu.gpu_kernel_cases import TINY, Cases
from benchmarks.gpu.gpu_models import QWEN3_06B, QWEN3_8B, TINY_LARGE, random_model
from benchmarks.gpu.gpu_sections import Facts, Sections
from benchmarks.gpu.gpu_timing import largest_difference, poison, synchronize
from benchmarks.gpu.gpu_token_cases import (
    BRANCHING,
    LEVELS,
    WIDTH,
    edge_table,
    initial_trees,
    sampling_rows,
)
from outrider.engine.model.config import ModelConfig
from outrider.engine.passes.runner import ModelRunner
from outrider.kernels.layers.linear import Linear
from outrider.kernels.layers.rms_norm import RmsNorm
from outrider.kernels.layers.split_k_linear import (
    SplitScratch,
    split_k_add_norm,
    split_k_linear,
    split_shape,
)
from outrider.kernels.sampling.sample import top_tokens
from outrider.kernels.trees.choose_frontier import choose_frontier
from outrider.kernels.trees.expand_tree import expand_tree
from outrider.kernels.trees.select_trees import select_trees
from outrider.kernels.trees.tree_state import TreeState
from outrider.kernels.triton_support import KernelChoice, use_kernels

Check = tuple[str, Callable[[], Facts]]

_HEADS = {"8B": Shape(), "0.6B": Shape(num_query_heads=16)}
_TINY_HEADS = Shape(num_query_heads=4, num_kv_heads=2, head_dim=16)
_PROBLEMS = (
    *(Problem(batch=1, context=1024, nodes=nodes) for nodes in (1, 4, 16, 64)),
    Problem(batch=8, context=1024, nodes=1),
    Problem(batch=4, context=3000, nodes=64),
    Problem(batch=1, context=8192, nodes=64),
)
_FP8_PROBLEMS = tuple(Problem(batch=2, context=1024, nodes=nodes) for nodes in (1, 16, 64))
_PRODUCTS = ((4096, 6144, False), (4096, 12288, True), (1024, 4096, False), (1024, 3072, True))
_DRAWN = (
    *((temperature, False, number) for temperature in (0.0, 0.8) for number in (1, 3)),
    (0.8, True, 1),
)
_TOLERANCE, _FP8_TOLERANCE = 1e-2, 2e-2
_PASS_TOLERANCE = 3e-2  # two layers of bfloat16
_SCORE_TOLERANCE = 1e-3
_SAME_TOKENS = 0.97  # two logits may be equal in all that the sum's order leaves
_SENTINEL = 0x5A


def run_checks(sections: Sections, device: torch.device, *, is_dry: bool) -> None:
    """Run all checks, kernels first."""
    for checks in (attention, few_row_products, drawing, trees):
        for name, check in checks(device, is_dry):
            sections.run(name, check)
    run_pass_checks(sections, device, is_dry=is_dry)


def run_pass_checks(sections: Sections, device: torch.device, *, is_dry: bool) -> None:
    """Run the checks of recorded passes."""
    for name, check in recorded_passes(device, is_dry):
        sections.run(name, check, needs_s=0.0 if is_dry else 10.0)


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise AssertionError(problem)


def _within(errors: dict[str, float], tolerance: float) -> dict[str, float]:
    """The errors. Raises AssertionError where one is larger, or NaN."""
    bad = {name: error for name, error in errors.items() if not error < tolerance}
    _require(not bad, f"off by more than {tolerance}: {bad}")
    return errors


# ---- kernels ------------------------------------------------------------------------------------


def attention(device: torch.device, is_dry: bool) -> Iterator[Check]:
    """Plain rows and trees over a paged cache of both models' heads, and one of 8 bits."""
    if is_dry:
        small = Problem(batch=2, context=40, nodes=5)
        yield "attention tiny", partial(check_attention, device, _TINY_HEADS, small)
        return
    for name, shape in _HEADS.items():
        for problem in _PROBLEMS:
            check = partial(check_attention, device, shape, problem)
            yield f"attention {name}, {problem.name}", check
    fp8 = Shape(kv_dtype=torch.float8_e4m3fn)
    for problem in _FP8_PROBLEMS:
        check = partial(check_attention, device, fp8, problem, tolerance=_FP8_TOLERANCE)
        yield f"attention fp8, {problem.name}", check


def check_attention(
    device: torch.device, shape: Shape, problem: Problem, *, tolerance: float = _TOLERANCE
) -> Facts:
    """One kernel's output against torch's attention in float64."""
    slots = problem.batch * (problem.context + problem.nodes + 32)
    num_bytes = max(2 * slots * shape.slot_bytes, 1 << 16)
    cache = Cache(shape, num_bytes=num_bytes, device=device, seed=problem.nodes)
    inputs = cache.inputs(problem)[0]
    found = []
    for _ in range(2):
        poison(device)
        found.append(cache.attend(inputs))
        synchronize(device)
    keys, values = cache.gather(inputs)
    mask = cache.mask(inputs)
    if mask is not None:  # heads that share keys are rows
        mask = mask.repeat_interleave(cache.group_size, 1)[:, None]
    query = cache.pack(inputs.query, problem.batch).double()
    expected = F.scaled_dot_product_attention(
        query, keys.double(), values.double(), attn_mask=mask, scale=shape.head_dim**-0.5
    )
    error = largest_difference(cache.pack(found[0], problem.batch), expected)
    facts = _within({"error": error}, tolerance)
    return {**facts, "same_bits_twice": torch.equal(*found)}


def few_row_products(device: torch.device, is_dry: bool) -> Iterator[Check]:
    """A product that adds to the residual stream, its norm, and the product behind it."""
    products = ((256, 96, False), (256, 96, True)) if is_dry else _PRODUCTS
    for width, out, is_gated in products:
        for rows in (4,) if is_dry else (1, 4, 16):
            kind = "gated" if is_gated else "plain"
            check = partial(check_few_rows, device, width, out, rows=rows, is_gated=is_gated)
            yield f"few rows {width} to {out}, {kind}, {rows} rows", check


def check_few_rows(
    device: torch.device, width: int, out: int, *, rows: int, is_gated: bool
) -> Facts:
    """Both products three times on scratch that held NaN, against float64."""
    generator = torch.Generator(device).manual_seed(rows)

    def numbers(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16)

    first_weight = numbers(width, width) / width**0.5
    second_weight = numbers(out * (2 if is_gated else 1), width) / width**0.5
    first, second = Linear(first_weight, pack=False), Linear(second_weight, pack=False)
    x, stream = numbers(rows, width), numbers(rows, width)
    norm = RmsNorm(1 + 0.1 * numbers(width), 1e-6)
    shapes = [split_shape(first_weight), split_shape(second_weight, is_gated=is_gated)]
    scratch = SplitScratch(device, shapes)
    scratch.partials.fill_(float("nan"))
    results, streams = [], []
    for _ in range(3):
        own = stream.clone()
        half = split_k_add_norm(x, first, scratch, own, norm)
        results.append(
            split_k_linear(half, second, scratch, activation="silu" if is_gated else None)
        )
        streams.append(own)
        synchronize(device)
    expected_stream = stream.double() + x.double() @ first_weight.double().T
    expected = _normed_product(streams[0], norm, second_weight, is_gated=is_gated)
    errors = {
        "error": largest_difference(results[0], expected),
        "stream_error": largest_difference(streams[0], expected_stream),
    }
    return {
        **_within(errors, _TOLERANCE),
        "same_bits": all(torch.equal(results[0], other) for other in results[1:]),
        "splits": [shape.num_splits for shape in shapes],
    }


def _normed_product(stream: Tensor, norm: RmsNorm, weight: Tensor, *, is_gated: bool) -> Tensor:
    """The second product in float64."""
    rows = stream.double()
    rows = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + norm.eps) * norm.weight
    product = rows @ weight.double().T
    if not is_gated:
        return product
    gate, up = product.chunk(2, -1)
    return F.silu(gate) * up


def drawing(device: torch.device, is_dry: bool) -> Iterator[Check]:
    """Greedy and sampled tokens, one and a drafter's three, truncated or not."""
    for temperature, truncates, number in _DRAWN:
        size = (3, 300) if is_dry else (16, QWEN3_8B.vocab_size)
        check = partial(
            check_tokens, device, size, temperature=temperature, truncates=truncates, number=number
        )
        cut = ", truncated" if truncates else ""
        yield f"tokens at {temperature}, {number} a row{cut}", check


def check_tokens(
    device: torch.device,
    size: tuple[int, int],
    *,
    temperature: float,
    truncates: bool,
    number: int,
) -> Facts:
    """The kernels' tokens and scores against the reference's. `size`: rows, vocabulary."""
    torch.manual_seed(number)
    logits = 6 * torch.randn(size, device=device)
    cases = Cases(shape=TINY, device=device)
    rows = sampling_rows(cases, size[0], temperature=temperature, truncates=truncates)
    found = top_tokens(logits, rows, number, with_probs=number > 1)
    synchronize(device)
    with use_kernels("reference"):
        expected = top_tokens(logits, rows, number, with_probs=number > 1)
    same = float((found.token_ids == expected.token_ids).float().mean())
    gap = float((found.scores - expected.scores).abs().nan_to_num(0.0).max())
    _require(same > _SAME_TOKENS, f"only {same:.3f} of the tokens are the reference's")
    return {"same_tokens": same, **_within({"scores_off": gap}, _SCORE_TOLERANCE)}


def trees(device: torch.device, is_dry: bool) -> Iterator[Check]:
    """Growing and selecting."""
    number = 2 if is_dry else 4
    yield "trees", partial(check_trees, device, num_trees=number)


def check_trees(device: torch.device, *, num_trees: int) -> Facts:
    """Trees of the kernels against those of the references, field by field."""
    both = [_grown(device, num_trees, kind) for kind in ("triton", "reference")]
    names = (
        *("token_ids", "parent_index", "depth", "positions", "logical_slots"),
        *("ancestor_words", "num_rows"),
    )
    own, expected = ([getattr(one, name) for name in names] for one in both)
    differing = [
        name
        for name, left, right in zip(names, own, expected, strict=True)
        if not torch.equal(left, right)
    ]
    _require(not differing, f"{', '.join(differing)} differ from the reference's")
    return {"compared": names}


def _grown(device: torch.device, num_trees: int, kind: KernelChoice) -> object:
    """Selected trees behind LEVELS levels of seeded guesses."""
    cases = Cases(shape=TINY, device=device)
    with use_kernels(kind):
        state = initial_trees(cases, num_trees)
        table = edge_table(cases)
        for level in range(LEVELS):
            expand_tree(state, *_guesses(state, level), table, min_path_prob=0.001)
            choose_frontier(state, min_path_prob=0.001, most_believed=0.7)
        selected = select_trees(state, num_nodes=60, caps=[40] * num_trees)
    synchronize(device)
    return selected


def _guesses(state: TreeState, level: int) -> tuple[Tensor, Tensor]:
    """Different tokens and their chances for each row of a level, [rows, BRANCHING]."""
    device = state.candidates.device
    rows = len(state.root_slots) * WIDTH
    generator = torch.Generator().manual_seed(level)
    tokens = torch.randperm(1000, generator=generator)[: rows * BRANCHING].view(rows, BRANCHING)
    chances = torch.rand(rows, BRANCHING, generator=generator) * 0.3 + 0.05
    return tokens.to(device), chances.to(device)


# ---- passes -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSizes:
    """Recorded passes that are compared."""

    config: ModelConfig
    dtype: torch.dtype = torch.bfloat16
    num_blocks: int = 600
    context: int = 700
    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 24, 32, 48, 64)


def recorded_passes(device: torch.device, is_dry: bool) -> Iterator[Check]:
    """Two layers of each model's width, in passes of every size."""
    if is_dry:
        sizes = PassSizes(
            config=TINY_LARGE, dtype=torch.float32, num_blocks=40, context=20, rows=(1, 4)
        )
        yield "recorded passes tiny", partial(check_passes, device, sizes)
        return
    for name, config in (("8B", QWEN3_8B), ("0.6B", QWEN3_06B)):
        cut = replace(config, layers=config.layers[:2], vocab_size=32768)
        yield f"recorded passes {name}", partial(check_passes, device, PassSizes(config=cut))


def check_passes(device: torch.device, sizes: PassSizes) -> Facts:
    """Logits of recorded passes against torch's references; nothing else may be written."""
    torch.manual_seed(1)
    model = random_model(sizes.config, dtype=sizes.dtype, device=device)
    recorded = ModelRunner(model=model, num_blocks=sizes.num_blocks, block_size=16)
    plain = ModelRunner(model=model, num_blocks=sizes.num_blocks, block_size=16, cuda_graphs=False)
    recorded.capture_graphs(max_rows=max(sizes.rows))
    sentinels = _sentinels(device)
    own = Context.filled(recorded, sizes.context, random.Random(3))
    with use_kernels("reference"):
        expected = Context.filled(plain, sizes.context, random.Random(3))
    errors = {str(rows): _pass_error(own, expected, rows) for rows in sizes.rows}
    is_untouched = all(bool((one == _SENTINEL).all()) for one in sentinels)
    _require(is_untouched, "a recording writes to memory that is not its own")
    return {"relative_error_by_rows": _within(errors, _PASS_TOLERANCE)}


def _pass_error(own: Context, expected: Context, rows: int) -> float:
    """The largest difference of a tree's logits."""
    found = own.runner.forward([own.tree(rows, random.Random(rows))]).logits.clone()
    synchronize(own.runner.device)
    with use_kernels("reference"):
        right = expected.runner.forward([expected.tree(rows, random.Random(rows))]).logits
    return largest_difference(found, right)


def _sentinels(device: torch.device) -> list[Tensor]:
    """Small and large blocks of a known content, among which recordings lie."""
    sizes = (64, 512, 4096, 65536, 1 << 20)
    return [
        torch.full((size,), _SENTINEL, dtype=torch.uint8, device=device)
        for size in sizes
        for _ in range(16)
    ]
