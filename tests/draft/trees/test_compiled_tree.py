"""Trees in the compiled library against their reference: the same numbers, to the last bit."""

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from outrider.draft.budget.calibration import EdgeCalibration
from outrider.draft.trees import tree_batch
from outrider.draft.trees.compiled_tree import CompiledTree
from outrider.draft.trees.growing_tree import GrowingTree
from outrider.engine.cache.block_pool import BlockPool, root_hash
from outrider.engine.cache.kv_view import KVView
from outrider.engine.passes.runner import ForwardSlice
from outrider.kernels.cpu.tree_library import TreeLibrary, tree_library
from outrider.kernels.sampling.likeliest import Likeliest
from outrider.verifier.token_tree import SOURCE_BIT
from tests.engines import make_engine, make_request, random_prompt, serve, tiny_pair

pytestmark = pytest.mark.skipif(tree_library() is None, reason="the library was not built")

TEXTS = [SOURCE_BIT["suffix"], SOURCE_BIT["prediction"], SOURCE_BIT["grammar"]]
NUM_TOKENS = 4  # few, so that guesses meet
WIDTH = 3


def library() -> TreeLibrary:
    found = tree_library()
    assert found is not None
    return found


def a_calibration(seed: int) -> EdgeCalibration:
    """One that has learnt something else about every kind of guess."""
    calibration, rng = EdgeCalibration(), torch.Generator().manual_seed(seed)
    for number in range(600):
        confidence, chance = torch.rand(2, generator=rng).tolist()
        kind = number % 5
        calibration.observe(
            confidence,
            chance < confidence**2,
            sources=(1, 2, 3, 1 | 32, 2 | 32)[kind],
            depth=1 + number % 7,
            is_greedy=number % 2 == 0,
        )
    return calibration


class Pair:
    """The same tree twice."""

    def __init__(self, calibration: EdgeCalibration | None, **limits: Any | bool) -> None:
        known = None if calibration is None else calibration.of_requests(is_greedy=True)
        chance = {} if known is None else {"calibrate": known.chance}
        self.reference = GrowingTree(root_token_id=1, root_slot=20, **limits, **chance)  # type: ignore[arg-type]
        self.compiled = CompiledTree.begin(
            library(), calibration=known, root_token_id=1, root_slot=20, **limits
        )

    def check(self) -> None:
        """Compare all that can be read."""
        ours, theirs = self.compiled, self.reference
        assert ours.candidates == theirs.candidates
        assert ours.ranked() == theirs.ranked()
        assert ours.verifiable() == theirs.verifiable()
        for name in ("frontier", "num_frontier_rows", "num_slots", "num_passes", "num_candidates"):
            assert getattr(ours, name) == getattr(theirs, name), name
        for name in ("frontier_depths", "frontier_parents", "frontier_paths"):
            assert getattr(ours, name)() == getattr(theirs, name)(), name


tokens = st.integers(0, NUM_TOKENS - 1)
chances = st.floats(0.0, 1.0, width=32)
chains = st.lists(st.tuples(tokens, chances), max_size=8)


@given(data=st.data(), seed=st.integers(0, 3) | st.none(), keeps=st.booleans(), steps=st.booleans())
def test_every_operation_gives_the_references_numbers(
    data: st.DataObject, seed: int | None, keeps: bool, steps: bool
) -> None:
    calibration = None if seed is None else a_calibration(seed)
    limits = {"max_nodes": data.draw(st.integers(0, 40)), "max_depth": data.draw(st.integers(0, 6))}
    pair = Pair(calibration, **limits, keeps_logits=keeps, is_stepwise=steps)
    operations = ["chain", "answer", "level", "judge"]
    operations += [] if keeps else ["open"]  # a block's tree, which computes no node
    view = KVView(BlockPool(num_blocks=4, block_size=16), root=root_hash(""))
    for _ in range(data.draw(st.integers(1, 8))):
        both = (pair.reference, pair.compiled)
        match data.draw(st.sampled_from(operations)):
            case "chain":
                chain = data.draw(chains)
                source, recalled = data.draw(st.sampled_from(TEXTS)), data.draw(st.booleans())
                node = data.draw(st.integers(0, len(pair.reference.candidates) - 1))
                for tree in both:
                    tree.add_chain(
                        source,
                        [token for token, _ in chain],
                        [chance for _, chance in chain],
                        node,
                        min_path_prob=0.05,
                        is_recalled=recalled,
                    )
            case "answer":
                chain = data.draw(chains)
                rivals = [
                    [(token, chance), ((token + 1) % NUM_TOKENS, 0.3)] for token, chance in chain
                ]
                for tree in both:
                    tree.add_answer([token for token, _ in chain], rivals, min_path_prob=0.1)
            case "level":
                grow_a_level(pair, data.draw(st.integers(0, 999)), view)
            case "open":
                found = [tree.choose_open(most=5, min_path_prob=0.01) for tree in both]
                assert found[0] == found[1]
            case "judge":
                text = data.draw(st.lists(tokens, max_size=6))
                assert pair.compiled.follow(text) == pair.reference.follow(text)
                assert list(pair.compiled.judged(text)) == list(pair.reference.judged(text))
                ours, theirs = (
                    tree_batch.judged([tree, tree], [text, text[1:]])
                    for tree in (pair.compiled, pair.reference)
                )
                assert ours == theirs
        pair.check()
    weighed = [tree_batch.weigh([tree, tree], [1.5, 0.5]) for tree in both]
    assert weighed[0][0].tolist() == weighed[1][0].tolist()
    assert weighed[0][1] == weighed[1][1]
    chosen = [tree_batch.select([tree, tree], [1.5, 0.5], floor=0.1) for tree in both]
    assert [dataclasses.replace(tree, draft_logits=[]) for tree in chosen[0]] == [
        dataclasses.replace(tree, draft_logits=[]) for tree in chosen[1]
    ]


def grow_a_level(pair: Pair, seed: int, view: KVView) -> None:
    """Name the children of both trees' frontiers, choose the next, and make its rows."""
    reference, compiled = pair.reference, pair.compiled
    number, rng = len(reference.frontier), torch.Generator().manual_seed(seed)
    weights = torch.rand((number, NUM_TOKENS), generator=rng) ** 4
    found = (weights / weights.sum(1, keepdim=True)).topk(WIDTH)
    best = Likeliest(token_ids=found.indices, probs=found.values)
    for tree in (reference, compiled):
        if tree.keeps_logits:
            tree.keep_logits(torch.zeros(number, 2))
        tree_batch.grow_rows([tree], best, are_asked=[seed % 8 > 0], floor=0.02)
    pair.check()
    chosen = [
        tree_batch.choose_frontiers([tree], max_frontier=3, min_path_prob=0.01)
        for tree in (reference, compiled)
    ]
    assert chosen[0] == chosen[1]
    pair.check()
    if chosen[0][0][0]:
        pieces: list[list[ForwardSlice]] = [
            tree_batch.frontier_slices([tree], [view]) for tree in (reference, compiled)
        ]
        assert pieces[0] == pieces[1]


class RowsOfADevice(Tensor):
    """Where a GPU's tensors lie, the compiled library cannot read."""

    def data_ptr(self) -> int:
        raise AssertionError("the library was given a device's address")

    def cpu(self) -> Tensor:  # type: ignore[override]
        return self.as_subclass(Tensor)


def test_rows_of_a_device_come_over_first() -> None:
    """A cascade's tree, or one with a grammar, grows on the host from what a GPU ranked."""
    pair = Pair(None, max_nodes=8, max_depth=4)
    best = Likeliest(
        token_ids=torch.tensor([[5, 3, 9]]).as_subclass(RowsOfADevice),
        probs=torch.tensor([[0.5, 0.3, 0.1]]).as_subclass(RowsOfADevice),
    )
    for tree in (pair.reference, pair.compiled):
        tree_batch.grow_rows([tree], best, are_asked=[True], floor=0.02)
    pair.check()
    assert pair.compiled.num_candidates == 4


def test_a_tree_outgrows_its_first_memory() -> None:
    pair = Pair(None, max_nodes=255, max_depth=255)
    for tree in (pair.reference, pair.compiled):
        for start in range(0, 600, 3):
            tree.add_chain(TEXTS[0], range(start, start + 40), [0.99] * 40)
    pair.check()
    assert pair.compiled.num_candidates > 4000


def test_what_does_not_fit_together_is_refused() -> None:
    tree = Pair(None, max_nodes=8, max_depth=4).compiled
    with pytest.raises(ValueError, match="2 tokens, but 1 confidences"):
        tree.add_chain(TEXTS[0], [1, 2], [0.5])
    with pytest.raises(ValueError, match="children of 2 nodes, not 1"):
        tree.grow([[], []])
    view = KVView(BlockPool(num_blocks=4, block_size=16), root=root_hash(""))
    with pytest.raises(ValueError, match="frontier is its root"):
        tree_batch.frontier_slices([tree], [view])
    with pytest.raises(KeyError, match="not among its own candidates"):
        tree.add_answer([3], [[(2, 0.5)]], min_path_prob=0.0)
    with pytest.raises(ValueError, match="max_nodes=257"):
        Pair(None, max_nodes=257, max_depth=4)


@given(seed=st.integers(0, 999))
def test_calibrations_learn_the_same(seed: int) -> None:
    calibrations = [EdgeCalibration(), EdgeCalibration()]
    rng = torch.Generator().manual_seed(seed)
    for _ in range(30):  # enough for fits, of which later trees take their numbers
        texts = torch.randint(NUM_TOKENS, (2, 6), generator=rng).tolist()
        confidences = torch.rand(6, generator=rng).tolist()
        pair = Pair(calibrations[0], max_nodes=20, max_depth=8)
        pair.compiled = Pair(calibrations[1], max_nodes=20, max_depth=8).compiled
        for tree, calibration in zip((pair.reference, pair.compiled), calibrations, strict=True):
            tree.add_chain(TEXTS[0], texts[0], confidences)
            tree.grow([[(token, 0.3) for token in range(3)]])
            own = calibration.of_requests(is_greedy=True)
            tree_batch.teach([tree, tree], [own, own], [texts[1], texts[0]])
        pair.check()
    assert calibrations[0].version == calibrations[1].version > 0
    assert (calibrations[0].shifts() == calibrations[1].shifts()).all()


@pytest.mark.slow_cases
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_an_engine_drafts_the_same_with_and_without_the_library(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [
        make_request(str(n), random_prompt(9, seed=n), temperature=temperature, seed=n)
        for n in range(3)
    ]
    answers = []
    for found in (library(), None):
        monkeypatch.setattr(tree_batch, "tree_library", lambda found=found: found)
        served = serve(make_engine(tiny_pair()), requests)
        answers.append(
            {
                name: [(event.token_ids, event.num_drafted_tokens) for event in answer.emitted]
                for name, answer in served.items()
            }
        )
    assert answers[0] == answers[1]
    assert any(drafted for events in answers[0].values() for _, drafted in events)
