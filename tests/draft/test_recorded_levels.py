"""Levels of trees recorded whole: what a replay is, what a recording keeps, when none serves."""

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from outrider.draft.config import DraftConfig
from outrider.draft.device.device_trees import DeviceTrees
from outrider.engine.core import Engine
from outrider.engine.passes.cuda_capture import Run
from outrider.engine.passes.level_graphs import TREE_COUNTS, LevelGraphs
from outrider.engine.passes.runner import ModelRunner
from outrider.engine.passes.tile_plans import TilePlanner
from outrider.engine.protocols import DraftLogits
from tests.engines import (
    Answer,
    assert_idle,
    fixed_budget,
    make_engine,
    make_request,
    random_prompt,
    serve,
    step_once,
    texts,
    tiny_pair,
)
from tests.heads import make_head_engine, random_head, random_pair
from tests.laws.same_answers import plainly
from tests.recorded_levels import record_levels, watch_levels

CONFIG = DraftConfig(sources=("model",), max_draft_depth=5, min_path_prob=0.0)


def levels_of(runner: ModelRunner) -> LevelGraphs:
    levels = runner._levels
    assert levels is not None
    return levels


class Operations(TorchDispatchMode):
    """Notes the operations that are run, and the memory that they read and have not made."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.given: dict[int, StorageWeakRef] = {}
        self._made: dict[int, Any] = {}  # kept, so that no address is given out twice

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = operation(*args, **(kwargs or {}))
        name = operation.overloadpacket.__name__
        is_new = name == "lift_fresh"  # what torch.tensor has made of numbers
        for storage in storages((args, kwargs)):
            if storage._cdata not in self._made and not is_new:
                self.given.setdefault(storage._cdata, StorageWeakRef(storage))
        for storage in storages(result):
            if storage._cdata not in self.given:
                self._made[storage._cdata] = storage
        self.names.append(name)
        return result


def storages(values: Any) -> list[Any]:
    """The memory of all tensors in some values, but for oneDNN's packed weights."""
    tensors = [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]
    return [value.untyped_storage() for value in tensors if value.layout == torch.strided]


@pytest.mark.slow
@pytest.mark.parametrize("has_head", [False, True])
def test_a_recordings_tensors_live_as_long_as_it(
    has_head: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CUDA graph keeps addresses and nothing else, so this recorder drops what it has run."""
    given: dict[int, StorageWeakRef] = {}
    make_plan = TilePlanner.plan

    def noting(self: TilePlanner, *inputs: Any, **options: Any) -> Any:
        plan = make_plan(self, *inputs, **options)
        for storage in storages([plan.work, plan.workspace]):  # Triton's alone
            given[storage._cdata] = StorageWeakRef(storage)
        return plan

    def record(run: Run) -> Run:
        with Operations() as noted:
            run()
        given.update(noted.given)
        return lambda: None

    if has_head:
        engine = make_head_engine(random_pair(), random_head(), on_device=True, draft=CONFIG)
    else:
        engine = make_engine(tiny_pair(), on_device=True, draft=CONFIG)
    monkeypatch.setattr(TilePlanner, "plan", noting)
    runner = record_levels(engine, capture=record)
    assert levels_of(runner).num_captured == 2 * len(TREE_COUNTS)
    gc.collect()
    assert len(given) > 20
    assert not [ref for ref in given.values() if ref.expired()]


def proposed(engine: Engine) -> list[Any]:
    """Two sequences that have had their prefill, with room for a tree."""
    for n in range(2):
        engine.submit(make_request(str(n), random_prompt(12, seed=n), max_tokens=60))
    answers: dict[str, Answer] = {}
    for _ in range(2):
        step_once(engine, answers)
    sequences = list(engine._sequences.values())
    for sequence in sequences:
        sequence.view.reserve(len(sequence.token_ids))
    return sequences


@torch.inference_mode()
def test_a_level_is_one_launch() -> None:
    """Between the first replay and the last the device is given nothing else."""
    engine = make_engine(tiny_pair(), on_device=True, draft=CONFIG)
    noted = Operations()

    def record(run: Run) -> Run:
        run()
        return lambda: noted.names.append("replay")

    runner = record_levels(engine, capture=record, tree_counts=(2,))
    drafter: Any = engine._drafter
    proposal = drafter.propose(proposed(engine))
    noted.names.clear()
    with noted:
        wanted = next(proposal)
        try:
            while True:
                if wanted.level is not None:
                    runner.grow_level(wanted.level.recorded)
                    logits = DraftLogits(of_slices=torch.empty(0, 0))
                else:
                    output = runner.forward(wanted.slices, wanted.device_rows)
                    logits = DraftLogits(of_slices=output.logits)
                noted.names.append("pass")
                wanted = proposal.send(logits)
        except StopIteration:
            pass
    names = [name for name in noted.names if not name.startswith("empty")]
    first = names.index("replay")
    levels = CONFIG.max_draft_depth - 1
    assert names[first : first + 2 * levels] == ["replay", "pass"] * levels
    assert names.count("replay") == levels


@pytest.mark.slow
def test_beside_small_answers_a_level_shares_their_pass() -> None:
    """Trees begun in the static tensors grow on in pieces, and by replays again."""
    requests = [
        make_request(
            f"{tier}{n}", random_prompt(9 + 5 * n, seed=n), tier=tier,
            temperature=0.8 * (n % 2), seed=n, max_tokens=8 if tier == "small" else 24,
        )
        for n in range(2) for tier in ("small", "large")
    ]  # fmt: skip
    engine = make_engine(tiny_pair(), on_device=True, draft=CONFIG)
    runner = record_levels(engine, tree_counts=(1, 2))
    replayed = watch_levels(runner)
    shared: list[bool] = []
    rows = DeviceTrees.rows

    def noting(trees: DeviceTrees) -> Any:
        shared.append(trees.recorded is not None)
        return rows(trees)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeviceTrees, "rows", noting)
        answers = serve(engine, requests)
    assert texts(answers) == plainly(tiny_pair(), requests)
    assert sum(shared) > 2
    assert len(replayed) > 2
    assert_idle(engine)


@pytest.mark.slow_cases
@pytest.mark.parametrize("reason", ["memory", "keys", "levels", "other trees", "blocks"])
def test_what_no_recorded_level_fits_is_launched_in_pieces(reason: str) -> None:
    engine = make_engine(tiny_pair(), on_device=True, draft=CONFIG)

    def record(run: Run) -> Run:
        if reason == "memory":
            raise torch.OutOfMemoryError
        run()
        return run

    if reason == "memory":
        with pytest.raises(AssertionError):
            record_levels(engine, capture=record, tree_counts=(1,))
        runner = engine._runners["small"]
    else:
        runner = record_levels(engine, tree_counts=(1,))
        levels = levels_of(runner)
    if reason == "keys":
        for key, captured in levels._captured.items():
            levels._captured[key] = replace(captured, max_keys=8)
    elif reason == "levels":
        levels.config = replace(levels.config, max_levels=1)
    elif reason == "other trees":
        levels.config = replace(levels.config, min_path_prob=0.3)
    elif reason == "blocks":
        levels.max_block_ids = 1
    replayed = watch_levels(runner)
    requests = [make_request("r", random_prompt(20), max_tokens=12)]
    assert texts(serve(engine, requests)) == plainly(tiny_pair(), requests)
    assert replayed == []


def test_the_budget_sees_recorded_levels() -> None:
    """Their passes are told of like others, and a dear level ends a tree."""
    for draft_s, grows in ((0.01, True), (10.0, False)):
        times = fixed_budget(draft=draft_s)
        engine = make_engine(tiny_pair(), on_device=True, draft=CONFIG, budget=times)
        runner = record_levels(engine, tree_counts=(1,))
        told: list[int] = []
        runner.on_pass = lambda rows, *_, own=told: own.append(rows)
        replayed = watch_levels(runner)
        requests = [make_request("r", random_prompt(20), max_tokens=12)]
        assert texts(serve(engine, requests)) == plainly(tiny_pair(), requests)
        assert bool(replayed) == grows
        assert told.count(CONFIG.max_frontier) == len(replayed)
