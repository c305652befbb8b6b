"""The drafter whose trees grow on the device: the trees, what is learnt, when it holds back."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.draft.budget.calibration import EdgeCalibration
from outrider.draft.config import DraftConfig
from outrider.draft.device import device_trees
from outrider.draft.device.device_growth import DeviceGrowth, GrownDrafts
from outrider.draft.device.device_trees import DeviceTrees
from outrider.draft.tree_drafter import TreeDrafter
from outrider.draft.trees import tree_batch
from outrider.draft.trees.tree_candidate import TreeCandidate
from outrider.engine.core import Engine
from outrider.engine.protocols import DraftLogits, Trees
from outrider.engine.request import SpeculationParams
from outrider.engine.sequences.sequence import Sequence
from outrider.engine.trees.forest import ForestReadback, HostForest
from outrider.kernels.sampling.sample import SamplingTable, TopTokens
from outrider.kernels.trees.choose_frontier import FrontierRows
from outrider.kernels.trees.select_trees import SelectedTrees
from outrider.kernels.trees.tree_state import TreeState
from outrider.verifier.params import Source
from outrider.verifier.token_tree import RECALLED_BIT, SOURCE_BIT
from outrider.verifier.verdict import ForestVerdicts
from tests.engines import (
    Answer,
    Pair,
    drafter_of,
    engine_model,
    finish,
    make_engine,
    make_request,
    random_prompt,
    serve,
    step_once,
    texts,
    tiny_pair,
    twins,
    watch_small_rows,
)
from tests.gpu import CAPTURE, forbid_waiting, on_the_device
from tests.laws.same_answers import plainly
from tests.models import make_hf_model
from tests.recorded_levels import record_levels

MODEL: tuple[Source, ...] = ("model",)


def growth_of(engine: Engine) -> DeviceGrowth:
    growth = drafter_of(engine)._last["small"]
    assert isinstance(growth, DeviceGrowth)
    return growth


def drafts_of(trees: Trees) -> GrownDrafts:
    assert trees.forest is not None
    drafts = trees.forest.drafts
    assert isinstance(drafts, GrownDrafts)
    return drafts


# ---- what is drafted -----------------------------------------------------------------------


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"temperature": 1.3},
        {"temperature": 0.9, "top_k": 12, "top_p": 0.8, "min_p": 0.02},
    ],
)
def test_a_drafter_as_good_as_the_target_is_always_right(sampling: dict[str, float]) -> None:
    """Same weights, same noise, same positions, same truncation: every first guess is accepted."""
    chain = DraftConfig(
        sources=MODEL, max_branching=1, max_frontier=1, max_draft_depth=5, min_path_prob=0.0
    )
    engine = make_engine(twins(), draft=chain, on_device=True)
    requests = [
        make_request(str(n), random_prompt(7 * n + 1, seed=n), max_tokens=37, seed=n, **sampling)
        for n in range(3)
    ]
    for answer in serve(engine, requests).values():
        assert [len(event.token_ids) for event in answer.emitted] == [1, *[6] * 6]
        assert answer.stats.num_accepted_tokens == answer.stats.num_drafted_tokens == 30


class Recording(EdgeCalibration):
    """Notes every lesson."""

    def __init__(self) -> None:
        super().__init__()
        self.lessons: list[tuple[Any, ...]] = []

    def observe(self, confidence: float, was_right: bool, **kind: Any) -> None:
        self.lessons.append((was_right, *sorted(kind.items()), confidence))
        super().observe(confidence, was_right, **kind)


def compared(temperature: float, config: DraftConfig) -> list[tuple[Any, Any]]:
    """Return what the host's drafter and the device's do in an engine, step by step."""
    found = []
    for on_device in (False, True):
        calibration = Recording()
        engine = make_engine(
            tiny_pair(drift=0.05), draft=config, on_device=on_device, calibration=calibration
        )
        trees: list[Any] = []
        accept = engine._accept

        def noted(item: Any, *rest: Any, trees: list[Any] = trees, accept: Any = accept) -> None:
            tree = item.tree
            trees.append(
                (item.sequence.request_id, tree.token_ids, tree.parent_index, tree.sources)
            )
            accept(item, *rest)

        engine._accept = noted  # type: ignore[method-assign]
        requests = [
            make_request(str(n), random_prompt(9 + n, seed=n), max_tokens=30, seed=n,
                         temperature=temperature)
            for n in range(3)
        ]  # fmt: skip
        serve(engine, requests)
        estimates = (drafter_of(engine)._lessons.acceptance.value, calibration.shifts().tolist())
        found.append(
            (sorted(trees, key=lambda tree: tree[0]), sorted(calibration.lessons), estimates)
        )
    return list(zip(*found, strict=True))


@pytest.mark.slow_cases
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("num_nodes", [5, 64])
def test_the_same_trees_as_on_the_host_and_the_same_lessons(
    temperature: float, num_nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The library's trees teach without `observe`; they are like the reference's to the last bit.
    monkeypatch.setattr(tree_batch, "tree_library", lambda: None)
    config = DraftConfig(
        sources=MODEL, max_draft_depth=3, max_draft_nodes=num_nodes, min_path_prob=0.01
    )
    trees, lessons, estimates = compared(temperature, config)
    assert len(trees[0]) > 20
    assert trees[0] == trees[1]
    assert len(lessons[0]) > 60
    assert [lesson[:-1] for lesson in lessons[0]] == [lesson[:-1] for lesson in lessons[1]]
    assert [lesson[-1] for lesson in lessons[0]] == pytest.approx(
        [lesson[-1] for lesson in lessons[1]], abs=1e-4
    )
    assert estimates[0][0] == estimates[1][0]
    assert np.allclose(estimates[0][1], estimates[1][1], atol=1e-5)


def test_no_more_passes_than_levels_and_as_many_rows() -> None:
    config = DraftConfig(sources=MODEL, max_draft_depth=4, max_frontier=3, min_path_prob=0.0)
    engine = make_engine(tiny_pair(), on_device=True, draft=config)
    rows = watch_small_rows(engine)
    serve(engine, [make_request("r", random_prompt(9), max_tokens=40)])
    assert rows[:4] == [10, 3, 3, 3]  # the prompt and its first token, three levels
    assert engine._runners["small"].times.num_passes <= 4 * 39


def test_text_guesses_are_in_the_forest_and_retracted_ones_stay_marked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sources of what was known before are seen in the forest's trees."""
    candidates = [
        TreeCandidate(token_id=7, parent=-1, depth=0, offset=0, mask=1),
        TreeCandidate(token_id=8, parent=0, depth=1, sources=SOURCE_BIT["prediction"],
                  text_confidence=0.9, confidence=0.9, edge_prob=0.9, path_prob=0.9,
                  is_recalled=True),
        TreeCandidate(token_id=200, parent=1, depth=2, sources=SOURCE_BIT["suffix"], path_prob=0.8),
        TreeCandidate(token_id=9, parent=2, depth=3, sources=SOURCE_BIT["suffix"], path_prob=0.7),
        TreeCandidate(token_id=10, parent=1, depth=2, sources=SOURCE_BIT["suffix"], path_prob=0.6),
    ]  # fmt: skip
    kept = device_trees._known_to_both(candidates, 131)
    assert [(c.token_id, c.parent) for c in kept] == [(7, -1), (8, 0), (10, 1)]
    assert device_trees._known_to_both(candidates, 201) is candidates

    engine = make_engine(tiny_pair(), on_device=True, draft=DraftConfig(max_draft_depth=3))
    request = make_request("r", random_prompt(20), max_tokens=60)
    right = plainly(tiny_pair(), [request])["r"]
    known: list[HostForest] = []
    commit = GrownDrafts.commit

    def noted(drafts: GrownDrafts, host: HostForest) -> Callable[[], None]:
        known.append(host)
        return commit(drafts, host)

    monkeypatch.setattr(GrownDrafts, "commit", noted)
    engine.submit(request)
    (sequence,) = engine._sequences.values()
    sequence.proposal_token_ids = right  # as if the other tier had said so
    answers: dict[str, Answer] = {}
    finish(engine, answers)
    assert answers["r"].token_ids == right
    assert answers["r"].stats.num_reused_tokens > 40
    sources = [source for host in known for tree in host.trees for source in tree.sources]
    assert any(source & RECALLED_BIT and source & SOURCE_BIT["model"] for source in sources)


@pytest.mark.slow_cases
@pytest.mark.parametrize("vocab_size", [90, 300])
def test_vocabularies_of_different_width_do_no_harm(vocab_size: int) -> None:
    large = tiny_pair()
    reference = make_hf_model("llama3", seed=2, num_hidden_layers=1, vocab_size=vocab_size)
    pair = Pair(
        large=large.large,
        small=engine_model(reference),
        large_reference=large.large_reference,
        small_reference=reference,
    )
    prompt = random_prompt(20, vocab_size=80)
    requests = [
        make_request(str(n), prompt, max_tokens=30, temperature=0.9 * n, seed=n) for n in range(2)
    ]
    engine = make_engine(pair, on_device=True)
    assert texts(serve(engine, requests)) == plainly(pair, requests)


# ---- a step, by hand ---------------------------------------------------------------------------


def proposed(engine: Engine) -> tuple[TreeDrafter, list[Sequence]]:
    """An engine whose two sequences have had their prefill."""
    for n in range(2):
        engine.submit(make_request(str(n), random_prompt(12, seed=n), max_tokens=60))
    answers: dict[str, Answer] = {}
    for _ in range(2):
        step_once(engine, answers)
    return drafter_of(engine), list(engine._sequences.values())


def drive(engine: Engine, sequences: list[Sequence], reclaim_after: int | None) -> Trees:
    drafter, runner = drafter_of(engine), engine._runners["small"]
    for sequence in sequences:
        sequence.view.reserve(len(sequence.token_ids))
    proposal = drafter.propose(sequences)
    wanted, number = next(proposal), 0
    try:
        while True:
            assert number == 0 or not wanted.slices  # the host has no part in the levels
            output = runner.forward(wanted.slices, wanted.device_rows)
            number += 1
            if number == reclaim_after:
                drafter.reclaim(10_000)
            front = 0 if wanted.device_rows is None else wanted.device_rows.total_rows
            logits = DraftLogits(
                of_slices=output.logits[front:], of_device_rows=output.logits[:front]
            )
            wanted = proposal.send(logits)
    except StopIteration as stopped:
        trees = stopped.value
    assert isinstance(trees, Trees)
    return trees


@torch.inference_mode()
def test_a_view_that_was_reclaimed_ends_the_growth_and_is_not_written_to() -> None:
    engine = make_engine(tiny_pair(), on_device=True, draft=DraftConfig(sources=MODEL))
    _, sequences = proposed(engine)
    trees = drive(engine, sequences, reclaim_after=2)
    assert trees.forest is not None
    assert trees.forest.num_trees == 2
    runner = engine._runners["small"]
    cache = runner.kv_cache.groups[0].tensor.clone()
    drafts = drafts_of(trees)
    assert drafts.trees.level == 1
    path = torch.full((2, trees.forest.max_depth), -1)
    path[:, 0] = trees.forest.row_starts + 2
    verdicts = ForestVerdicts(
        accepted_path=path, emitted_tokens=torch.full((2, trees.forest.max_depth + 1), 5)
    )
    drafts.keep(trees.forest, verdicts)
    assert torch.equal(runner.kv_cache.groups[0].tensor, cache)
    drafts.commit(ForestReadback(trees.forest, verdicts).wait())()
    assert runner.pool.num_used == 0


@torch.inference_mode()
def test_text_that_the_host_planted_is_read_on_the_device_only() -> None:
    engine = make_engine(tiny_pair(), on_device=True)
    _, sequences = proposed(engine)
    for sequence in sequences:
        sequence.proposal_token_ids = [*sequence.output_token_ids, *random_prompt(9)]
    trees = drive(engine, sequences, reclaim_after=None)
    assert trees.forest is not None
    assert int((trees.forest.sources & SOURCE_BIT["prediction"] > 0).sum()) >= 6
    assert drafts_of(trees).trees.level >= 1


@torch.inference_mode()
def test_a_view_reclaimed_with_its_root_leaves_no_forest() -> None:
    engine = make_engine(tiny_pair(), on_device=True, draft=DraftConfig(sources=MODEL))
    _, sequences = proposed(engine)
    trees = drive(engine, sequences, reclaim_after=1)
    assert trees.forest is None
    assert {name: tree.num_nodes for name, tree in trees.host.items()} == {"0": 1, "1": 1}


@torch.inference_mode()
def test_scarce_blocks_are_shared() -> None:
    engine = make_engine(
        tiny_pair(), on_device=True, draft=DraftConfig(sources=MODEL), block_size=4,
        prefix_caching=False,
    )  # fmt: skip
    _, sequences = proposed(engine)
    for tier in ("large", "small"):
        pool = engine._runners[tier].pool
        taken = [pool.allocate() for _ in range(pool.num_available - 4)]
        assert len(taken) > 100
    trees = drive(engine, sequences, reclaim_after=None)
    assert trees.forest is not None
    room = [len(sequence.view.block_table) * 4 - len(sequence.token_ids) for sequence in sequences]
    assert min(room) >= 4, room  # the first one left something
    assert all(trees.forest.num_rows - 1 <= torch.tensor(room))
    assert drafts_of(trees).trees.num_levels >= 1


# ---- nobody waits ------------------------------------------------------------------------------


def on_meta(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """A tensor that has no content: whoever reads it fails."""
    return torch.empty(shape, dtype=dtype, device="meta")


def test_between_the_passes_the_host_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the initial trees to the copy of the verdicts, on tensors without content."""
    num_trees, width, num_words, capacity = 2, 4, 4, 64
    engine = make_engine(tiny_pair(), on_device=True, draft=DraftConfig(sources=MODEL))
    drafter, sequences = proposed(engine)
    for sequence in sequences:
        sequence.view.reserve(len(sequence.token_ids) + 20)
    drafts = [drafter._init_tree(sequence) for sequence in sequences]
    growth = growth_of(engine)
    growers = [growth._grower(draft) for draft in drafts]

    def rows_of(kind: type[Any], num_rows: int) -> Any:
        def shape(name: str) -> Tensor:
            if name == "ancestor_words":
                return on_meta(num_rows, num_words)
            if name in ("row_starts", "num_rows", "tree_starts", "kv_lens"):
                return on_meta(num_trees, dtype=torch.int32)
            return on_meta(num_rows)

        return kind(**{field.name: shape(field.name) for field in fields(kind)})

    state = TreeState(
        candidates=on_meta(num_trees, 13, capacity, dtype=torch.int32),
        numbers=on_meta(num_trees, 8, dtype=torch.int32),
        ancestor_words=on_meta(num_trees, capacity, num_words),
        frontier=on_meta(num_trees, width, dtype=torch.int32),
        sequence_index=on_meta(num_trees * width),
        row_starts=on_meta(num_trees, dtype=torch.int32),
        root_slots=on_meta(num_trees, dtype=torch.int32),
    )

    def top(logits: Tensor, rows: Any, num_tokens: int, **options: Any) -> TopTokens:
        shape = (logits.shape[0], num_tokens)
        return TopTokens(
            token_ids=on_meta(*shape),
            scores=on_meta(*shape, dtype=torch.float32),
            probs=on_meta(*shape, dtype=torch.float32),
        )

    monkeypatch.setattr(device_trees, "top_tokens", top)
    monkeypatch.setattr(device_trees, "expand_tree", lambda *args, **options: None)
    monkeypatch.setattr(
        device_trees, "choose_frontier", lambda *args, **options: rows_of(FrontierRows, 8)
    )
    monkeypatch.setattr(
        device_trees, "select_trees", lambda *args, **options: rows_of(SelectedTrees, 12)
    )
    table = SamplingTable(
        parameters=on_meta(4, num_trees, dtype=torch.int32),
        noise_keys=on_meta(num_trees, 9, 2, dtype=torch.int32),
        has_sampled=True,
        has_truncation=True,
    )
    trees = DeviceTrees(
        drafts=drafts, growers=growers, model=growth._model,
        views=[draft.state.view for draft in drafts],  # type: ignore[misc]
        config=DraftConfig(), num_levels=2, num_initial=1, max_depth=8, state=state,
        table=growth._calibration.table(), sampling=table, vocab_size=100,
    )  # fmt: skip
    trees.expand_roots(on_meta(num_trees, 131, dtype=torch.float32))
    for _ in range(2):
        assert trees.next_level()
        rows = trees.rows()
        trees.receive(on_meta(rows.total_rows, 131, dtype=torch.float32))
    assert not trees.next_level()
    grown = GrownDrafts(
        trees,
        runner=engine._runners["small"],
        lessons=drafter._lessons,
        forecast=growth._forecast,
    )
    forest = trees.forest([5, 5], 10, grown)
    assert forest.device_rows().total_rows == 12
    verdicts = ForestVerdicts(accepted_path=on_meta(2, 8), emitted_tokens=on_meta(2, 9))
    moves: list[Tensor] = []
    for runner in engine._runners.values():
        monkeypatch.setattr(runner, "compact", lambda *slots: moves.extend(slots))
    monkeypatch.setattr(
        "outrider.draft.device.device_growth.upload", lambda values, _: on_meta(*values.shape)
    )
    monkeypatch.setattr(
        "outrider.engine.step.large_pass.upload", lambda values, _: on_meta(*values.shape)
    )
    monkeypatch.setattr(engine._large._verifier, "judge_forest", lambda *args: verdicts)
    output = type("Output", (), {"logits": on_meta(12, 131, dtype=torch.float32)})()
    engine._large._judge_forest(forest, output)
    assert len(moves) == 4
    assert [len(slots) for slots in moves] == [2 * 5] * 2 + [2 * 8] * 2


@pytest.mark.gpu
def test_no_synchronisation_in_a_step_on_a_gpu() -> None:
    """torch itself raises where a call waits for the device."""
    moved = on_the_device(tiny_pair())
    engine = make_engine(moved, on_device=True, draft=DraftConfig(sources=MODEL))
    record_levels(engine, capture=CAPTURE, kernels="auto")
    launch, draft = engine._large.launch, engine._drafting.run
    is_warm = False

    def strictly(call: Any) -> Any:
        def called(*args: Any, **options: Any) -> Any:
            forbid_waiting(is_warm)
            try:
                return call(*args, **options)
            finally:
                forbid_waiting(False)

        return called

    engine._large.launch = strictly(launch)  # type: ignore[method-assign]
    engine._drafting.run = strictly(draft)  # type: ignore[method-assign]
    requests = [
        make_request(str(n), random_prompt(12, seed=n), max_tokens=40, temperature=0.8 * (n % 2))
        for n in range(4)
    ]
    right = plainly(moved, requests)
    assert texts(serve(engine, requests)) == right
    is_warm = True
    again = [replace(request, cache_salt="again") for request in requests]
    assert texts(serve(engine, again)) == right


def test_a_request_without_drafts_costs_no_small_pass() -> None:
    engine = make_engine(tiny_pair(), on_device=True)
    rows = watch_small_rows(engine)
    off = SpeculationParams(max_draft_nodes=0)
    serve(engine, [make_request("r", random_prompt(9), speculation=off)])
    assert rows == []
