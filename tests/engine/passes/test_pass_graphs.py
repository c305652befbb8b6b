"""Graphs of passes: which are recorded, when they serve, and their results."""

import gc
import logging
import random
import weakref
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch

from outrider.engine.core import Engine
from outrider.engine.passes import pass_graphs
from outrider.engine.passes.device_rows import DeviceRows
from outrider.engine.passes.flat_rows import ForwardSlice
from outrider.engine.passes.pass_graphs import BUCKETS, CapturedPass, PassGraphs, estimate_bytes
from outrider.engine.passes.runner import ModelRunner
from outrider.engine.passes.tile_plans import TilePlanner
from outrider.kernels.attention.stage_rows import PassInputs
from outrider.kernels.triton_support import use_kernels
from tests.engine.passes.twins import (
    Piece,
    Twin,
    device_rows,
    make_twin,
    make_twins,
    poison,
    random_pass,
    record_eagerly,
)
from tests.engines import (
    make_engine,
    make_request,
    random_prompt,
    serve,
    shipped_pair,
    tiny_pair,
)

MODEL = tiny_pair().small


def graphs_of(twin: Twin) -> PassGraphs:
    graphs = twin.runner._graphs
    assert graphs is not None
    return graphs


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the recorded passes that were used."""
    sizes: list[int] = []
    run = PassGraphs.run

    def noting(self: PassGraphs, captured: CapturedPass, *rest: Any) -> object:
        sizes.append(captured.layout.num_rows)
        return run(self, captured, *rest)

    monkeypatch.setattr(PassGraphs, "run", noting)
    return sizes


def rows(sequence: int, count: int, wanted: int | None = None) -> Piece:
    return Piece(
        sequence=sequence,
        token_ids=[7 + sequence] * count,
        num_logit_rows=count if wanted is None else wanted,
    )


# ---- recording ------------------------------------------------------------------------------


def test_every_size_is_recorded_the_largest_first_and_told() -> None:
    twin = make_twin(shipped_pair("bfloat16").small)  # float32 has one shape of tile only
    sizes: list[int] = []
    told: list[tuple[int, int]] = []

    def record(run: Callable[[], None]) -> Callable[[], None]:
        run()
        return run

    number = twin.runner.capture_graphs(
        lambda *step: told.append(step), capture=record, max_rows=64
    )
    graphs = graphs_of(twin)
    sizes = [rows for rows, _ in graphs._captured]
    assert sizes == sorted(sizes, reverse=True)
    assert set(sizes) == {rows for rows in BUCKETS if rows <= 64}
    assert len(sizes) > len(set(sizes)), "a size with two shapes of tile"
    assert told == [(done, number) for done in range(1, number + 1)]
    assert number == len(sizes)
    assert not twin.runner.kv_cache.groups[0].tensor.any(), "recording wrote to the cache"


def test_a_recordings_tensors_live_as_long_as_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA graph keeps addresses and nothing else, so this recorder drops the pass as well."""
    works: list[weakref.ref[torch.Tensor]] = []
    make_plan = TilePlanner.plan

    def noting(self: TilePlanner, *inputs: Any, **options: Any) -> Any:
        plan = make_plan(self, *inputs, **options)
        works.append(weakref.ref(plan.work))
        return plan

    def record(run: Callable[[], None]) -> Callable[[], None]:
        run()
        return lambda: None

    monkeypatch.setattr(TilePlanner, "plan", noting)
    twin = make_twin(MODEL)
    assert twin.runner.capture_graphs(capture=record, max_rows=8) == len(works) > 0
    gc.collect()
    assert all(work() is not None for work in works)


def test_recording_leaves_what_the_cache_holds() -> None:
    twin = make_twin(MODEL)
    pieces = [rows(0, 9)]
    twin.run(pieces)
    twin.advance(pieces)
    before = twin.runner.kv_cache.groups[0].tensor.clone()
    twin.runner.capture_graphs(capture=record_eagerly, max_rows=8)
    assert torch.equal(twin.runner.kv_cache.groups[0].tensor, before)


@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_without_cuda_nothing_is_recorded(cuda_graphs: bool) -> None:
    runner = make_twin(MODEL, cuda_graphs=cuda_graphs).runner
    assert runner.capture_graphs(lambda *_: pytest.fail("told of nothing")) == 0
    assert runner._graphs is None


def test_graphs_that_do_not_fit_into_memory_are_left_out(
    caplog: pytest.LogCaptureFixture, replayed: list[int]
) -> None:
    plain, staged = make_twin(MODEL), make_twin(MODEL)

    def record(run: Callable[[], None]) -> Callable[[], None]:
        if graphs_rows(run) > 8:
            raise torch.OutOfMemoryError
        return run

    def graphs_rows(run: Callable[[], None]) -> int:
        cells = [cell.cell_contents for cell in run.__closure__ or ()]
        return next(len(cell.token_ids) for cell in cells if isinstance(cell, PassInputs))

    with caplog.at_level(logging.WARNING):
        staged.runner.capture_graphs(capture=record, max_rows=16)
    assert "left out rows=16" in caplog.text
    for count in (5, 16):
        pieces = [rows(count, count)]
        expected = plain.run(pieces)
        torch.testing.assert_close(staged.run(pieces).logits, expected.logits)
    assert replayed == [8]


# ---- which pass is recorded -----------------------------------------------------------------


def test_a_pass_is_padded_to_the_next_size(replayed: list[int]) -> None:
    _, staged = make_twins(MODEL, max_rows=24)
    for count in (1, 2, 3, 8, 9, 17, 24, 25):
        staged.run([rows(0, count)])
    assert replayed == [1, 2, 4, 8, 16, 24, 24]  # and 25 rows are launched plainly


def test_a_small_pass_reads_nothing_that_a_larger_one_left(replayed: list[int]) -> None:
    """Where windows have a cache of their own, every block id of the static inputs is looked up."""
    model = tiny_pair("gemma2", max_positions=256).large
    plain, staged = make_twins(model, max_rows=32, num_window_blocks=100)
    rng = random.Random(1)
    for sizes, num_trees in (([16, 8], 1), ([1], 0), ([2], 1)):
        pieces = random_pass(rng, vocab_size=131, sizes=sizes, num_trees=num_trees)
        torch.testing.assert_close(staged.run(pieces).logits, plain.run(pieces).logits)
        for twin in (plain, staged):
            twin.advance(pieces)
    assert replayed == [24, 1, 2]


def test_few_logits_of_many_rows_are_picked_from_all(replayed: list[int]) -> None:
    plain, staged = make_twins(MODEL)
    pieces = [rows(0, 3, 1), rows(1, 4, 2), rows(2, 2, 0), rows(3, 1, 1)]
    expected = plain.run(pieces)
    poison(staged.runner)
    found = staged.run(pieces)
    assert found.logits.shape == (4, 131)
    torch.testing.assert_close(found.logits, expected.logits)
    torch.testing.assert_close(found.hidden, expected.hidden)
    nobody = staged.run([rows(4, 3, 0)])
    assert nobody.logits.shape == (0, 131)
    assert replayed == [16, 4]


def test_prompts_are_recorded_with_the_logits_that_they_name(
    replayed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With small numbers: all logits up to 4 rows, above them those of at most 4."""
    monkeypatch.setattr(pass_graphs, "MOST_LOGIT_ROWS", 4)
    monkeypatch.setattr(pass_graphs, "BUCKETS", (1, 2, 4, 10, 20, 24, 30))
    plain, staged = make_twins(MODEL, max_rows=30, taps=(0, 1))
    assert graphs_of(staged)._logits.shape[0] == graphs_of(staged)._hidden.shape[0] == 4
    for pieces in (
        [rows(0, 9, 0)],
        [rows(1, 11, 1), rows(2, 2, 2), rows(3, 6, 1)],  # 19
        [rows(4, 3, 3)],
        [rows(5, 20, 5)],  # more logits than a recorded pass has
        [rows(6, 25, 4)],
        [rows(7, 14, 1)],  # 20 would be too much padding
    ):
        expected = plain.run(pieces)
        poison(staged.runner)
        found = staged.run(pieces)
        torch.testing.assert_close(found.logits, expected.logits)
        torch.testing.assert_close(found.hidden, expected.hidden)
        torch.testing.assert_close(found.taps, expected.taps)
    assert replayed == [10, 20, 4, 30]


def test_the_sizes_of_prompts_leave_little_to_padding() -> None:
    most = pass_graphs.MOST_LOGIT_ROWS
    assert most in BUCKETS
    assert BUCKETS[-1] == 2048
    for size, larger in pairwise(BUCKETS):
        assert larger <= (2 * size if size < most else 1.25 * (size + 1))


def test_more_block_ids_than_there_is_room_for_are_launched_plainly(replayed: list[int]) -> None:
    plain, staged = make_twins(MODEL)
    graphs_of(staged)._max_block_ids = 6
    for count in (24, 25):  # six blocks, seven blocks
        pieces = [rows(count, count)]
        expected = plain.run(pieces)
        torch.testing.assert_close(staged.run(pieces).logits, expected.logits)
    assert replayed == [24]


def test_more_sequences_than_there_is_room_for_are_launched_plainly(replayed: list[int]) -> None:
    """Sequences of the device that have no rows count too."""
    plain, staged = make_twins(MODEL, max_rows=2)
    expected = plain.run([rows(0, 1)])
    views = [staged.slice_of(rows(sequence, 1)).view for sequence in range(3)]

    def ints(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)

    found = staged.runner.forward(
        [],
        DeviceRows(
            views=views,
            token_ids=torch.tensor([7]),
            positions=torch.tensor([0]),
            logical_slots=torch.tensor([0]),
            sequence_index=torch.tensor([0]),
            ancestor_words=torch.tensor([[1]]),
            row_starts=ints(0, 1, 1),
            num_rows=ints(1, 0, 0),
            tree_starts=ints(0, 0, 0),
            kv_lens=ints(1, 1, 1),
        ),
    )
    torch.testing.assert_close(found.logits, expected.logits)
    assert replayed == []


# ---- what becomes of the results ------------------------------------------------------------


def test_the_next_pass_writes_over_the_results_of_the_last() -> None:
    """Why whoever keeps them keeps a copy."""
    _, staged = make_twins(MODEL)
    first = staged.run([rows(0, 2)]).logits
    kept = first.clone()
    second = staged.run([rows(1, 2)]).logits
    assert first.data_ptr() == second.data_ptr()
    assert not torch.equal(first, kept)


def test_trees_keep_copies_of_logits() -> None:
    from outrider.draft.trees.growing_tree import GrowingTree

    tree = GrowingTree(root_token_id=1, root_slot=0, max_nodes=4, max_depth=2, keeps_logits=True)
    logits = torch.tensor([[1.0, 2.0]])
    tree.keep_logits(logits)
    logits.zero_()
    assert tree.kept_logits[0].tolist() == [1.0, 2.0]


@pytest.mark.slow_cases
@pytest.mark.parametrize("speculates", [True, False])
def test_an_engine_on_recorded_passes_says_the_same(speculates: bool, replayed: list[int]) -> None:
    pair = tiny_pair()

    def answers(engine: Engine) -> dict[str, list[int]]:
        requests = [
            make_request(
                f"{number}", random_prompt(length), max_tokens=12, temperature=temperature, seed=3
            )
            for number, (length, temperature) in enumerate(
                [(3, 0.0), (40, 0.0), (17, 0.9), (5, 0.0)]
            )
        ]
        return {name: answer.token_ids for name, answer in serve(engine, requests).items()}

    expected = answers(make_engine(pair, speculates=speculates))
    engine = make_engine(pair, speculates=speculates)
    for runner in engine._runners.values():
        runner.capture_graphs(capture=record_eagerly, max_rows=32)
    assert answers(engine) == expected
    assert len(replayed) > 8


# ---- modes ----------------------------------------------------------------------------------


def test_fp8_caches_go_through_buffers_too(replayed: list[int]) -> None:
    plain, staged = make_twins(MODEL, kv_dtype=torch.float8_e4m3fn)
    rng = random.Random(2)
    for sizes, num_trees in ([9, 4], 0), ([3, 8], 1):
        pieces = random_pass(rng, vocab_size=131, sizes=sizes, num_trees=num_trees)
        expected = plain.run(pieces)
        poison(staged.runner)
        found = staged.run(pieces)
        torch.testing.assert_close(found.logits, expected.logits, rtol=1e-3, atol=1e-3)
        for twin in (plain, staged):
            twin.advance(pieces)
    caches = [twin.runner.kv_cache for twin in (plain, staged)]
    assert caches[0].groups[0].tensor.dtype == torch.float8_e4m3fn
    assert caches[0].groups[0].scales is not None
    assert caches[1].groups[0].scales is not None
    torch.testing.assert_close(caches[0].groups[0].scales, caches[1].groups[0].scales)
    assert len(replayed) == 2


def test_a_cache_of_another_type_has_other_prefixes() -> None:
    roots = {
        make_twin(MODEL, kv_dtype=dtype).runner.new_view("")._root
        for dtype in (None, torch.float32, torch.float8_e4m3fn)
    }
    assert len(roots) == 2


def test_a_cache_that_the_model_cannot_use_is_refused() -> None:
    with pytest.raises(ValueError, match="kv_dtype"):
        ModelRunner(model=MODEL, num_blocks=4, kv_dtype=torch.float16)


@pytest.mark.parametrize("knows_host", [True, False])
def test_slots_are_moved_with_their_scales(knows_host: bool) -> None:
    """Known to the host or to the device only, where -1 on either side is no move."""
    runner = make_twin(MODEL, kv_dtype=torch.float8_e4m3fn).runner
    contents = runner.kv_cache.groups[0].tensor.view(torch.uint8)
    scales = runner.kv_cache.groups[0].scales
    assert scales is not None
    contents.random_(0, 120)
    scales.uniform_()

    def by_slot() -> list[torch.Tensor]:  # [planes, num_slots, ...] each
        return [tensor.flatten(0, 1).flatten(1, 2).clone() for tensor in (contents, scales)]

    expected = by_slot()
    for tensor in expected:
        tensor[:, [4, 5, 9]] = tensor[:, [5, 9, 10]]
    if knows_host:
        runner.move_slots([5, 9, 10], [4, 5, 9])
    else:
        runner.compact(torch.tensor([5, -1, 9, 7, -1, 10]), torch.tensor([4, 3, 5, -1, -1, 9]))
    for found, right in zip(by_slot(), expected, strict=True):
        assert torch.equal(found, right)
    nothing = torch.tensor([], dtype=torch.int64)
    runner.compact(nothing, nothing)
    runner.move_slots([], [])


def test_passes_are_timed_and_told() -> None:
    plain, staged = make_twins(MODEL)
    for twin in (plain, staged):
        twin.runner.take_finished()
        told: list[tuple[int, float, float]] = []
        twin.runner.on_pass = lambda *seen, told=told: told.append(seen)
        twin.run([rows(0, 6), rows(1, 2)])
        [(num_rows, seconds, context)] = told
        assert num_rows == 8
        assert seconds > 0
        assert context == pytest.approx((6 * 6 + 2 * 2) / 8)
        [done] = twin.runner.take_finished()
        assert done.num_rows == 8
        assert 0 < done.seconds == twin.runner.times.last_s <= twin.runner.wait()


def test_the_context_of_device_rows_is_bounded() -> None:
    _, staged = make_twins(MODEL)
    rng = random.Random(1)
    found, _ = device_rows(staged, random_pass(rng, vocab_size=131, sizes=[6], num_trees=1), rng)
    told: list[float] = []
    staged.runner.on_pass = lambda rows, seconds, context: told.append(context)
    with use_kernels("reference"):
        staged.runner.forward([], found)
    assert told == [8.0]  # two blocks of four


def test_the_estimate_grows_with_the_model_and_the_rows() -> None:
    config = MODEL.config
    few, many = (estimate_bytes(config, torch.float32, rows) for rows in (16, 256))
    assert few < many
    static = 256 * config.vocab_size * 4
    assert many > static
    prompts = estimate_bytes(config, torch.float32)
    inner = 3 * config.intermediate_size + 4 * config.hidden_size
    assert prompts - many < 2048 * 4 * (2 * inner) + (len(BUCKETS) << 21)
    assert prompts > 2048 * inner * 4


def test_slices_must_have_their_slots() -> None:
    _, staged = make_twins(MODEL)
    piece = ForwardSlice(view=staged.view(0), token_ids=[1, 2], start_slot=0, num_logit_rows=1)
    with pytest.raises(AssertionError, match="not reserved"):
        staged.runner.forward([piece])
