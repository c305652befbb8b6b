"""One text per seed, whatever happens: any two circumstances together, and then everything.

`tests/laws/matrix.py` has the table. Each axis has one planted fault, which the law has to find: a
law that finds nothing where there is something says nothing.
"""

import random
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.cache.kv_view import KVView
from outrider.engine.core import Engine
from outrider.engine.grammar.grammar import GrammarState
from outrider.engine.passes import runner as runners
from outrider.engine.passes.runner import ForwardSlice, ModelRunner, PassOutput
from outrider.engine.queue.scheduler import Scheduler
from outrider.engine.request import EngineRequest
from outrider.engine.sequences.sequence import Sequence
from outrider.verifier import coupled
from outrider.verifier.coupled import CoupledVerifier
from outrider.verifier.noise import SequenceNoise
from outrider.verifier.token_tree import TokenTree
from outrider.verifier.verdict import Verdict
from tests.engines import Pair
from tests.laws.lenient import favour
from tests.laws.matrix import AXES, Case, any_cases, differences, is_possible, pair_of, pairwise
from tests.sizes import repeats

COVER = pairwise(AXES)
VOCAB_SIZE = 2048  # of the bundled pair
Patch = pytest.MonkeyPatch


def _params() -> list[object]:
    """Return the cases; two threads wait for each other, and 32 requests take their time."""
    return [
        pytest.param(
            case,
            id=f"{number}-{'-'.join(case.values())}",
            marks=pytest.mark.slow if case["threads"] == "2" or case["batch"] == "32" else (),
        )
        for number, case in enumerate(COVER)
    ]


@pytest.mark.parametrize("case", _params())
def test_any_two_circumstances_change_no_answer(case: Case) -> None:
    assert differences(case) == []


def test_the_cases_have_any_two_values_together() -> None:
    for one in AXES:
        for other in AXES:
            met = {(case[one], case[other]) for case in COVER}
            for value in AXES[one]:
                wanted = {
                    (value, each) for each in AXES[other] if is_possible({one: value, other: each})
                }
                assert one == other or wanted <= met


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_10_000_requests_in_any_circumstances_have_their_answers() -> None:
    for case in any_cases(random.Random(1), repeats(10_000, 100)):
        assert differences(case) == [], case


# ---- planted faults -----------------------------------------------------------------------------


def accepts_too_much(patch: Patch, engine: Engine) -> None:
    """A guess that is nearly as good as the right token passes."""
    verify = CoupledVerifier.verify

    def lenient(
        self: CoupledVerifier,
        sequences: SequenceOf[Sequence],
        trees: SequenceOf[TokenTree],
        logits: Tensor,
    ) -> list[Verdict]:
        return verify(self, sequences, trees, favour(trees, logits))

    patch.setattr(CoupledVerifier, "verify", lenient)


def noise_of_the_slot(patch: Patch, engine: Engine) -> None:
    """What a sequence draws with depends on its place in the pass."""
    verify = CoupledVerifier.verify

    def by_slot(
        self: CoupledVerifier,
        sequences: SequenceOf[Sequence],
        trees: SequenceOf[TokenTree],
        logits: Tensor,
    ) -> list[Verdict]:
        own = [each.noise for each in sequences]
        for sequence, noise in zip(sequences, [*own[1:], *own[:1]], strict=True):
            sequence.noise = noise
        try:
            return verify(self, sequences, trees, logits)
        finally:
            for sequence, noise in zip(sequences, own, strict=True):
                sequence.noise = noise

    patch.setattr(CoupledVerifier, "verify", by_slot)


def prefix_off_by_one(patch: Patch, engine: Engine) -> None:
    """A warm prefix is believed to be longer by a token."""
    match = KVView.match_prefix

    def longer(self: KVView, token_ids: SequenceOf[int]) -> int:
        found = match(self, token_ids)
        if 0 < found < len(token_ids) - 1:
            self.num_computed_tokens += 1
        return self.num_computed_tokens

    patch.setattr(KVView, "match_prefix", longer)


def chunk_without_a_key(patch: Patch, engine: Engine) -> None:
    """A later chunk of a prompt does not see the last key of the chunk before it."""
    forward = ModelRunner.forward

    def dropping(
        self: ModelRunner, slices: SequenceOf[ForwardSlice], *args: object, **named: object
    ) -> PassOutput:
        for piece in slices:
            if piece.ancestor_masks is None and len(piece.token_ids) > 1 and piece.start_slot > 1:
                slots = [
                    piece.view.block_table[slot // self.block_size] * self.block_size
                    + slot % self.block_size
                    for slot in (0, piece.start_slot - 1)
                ]
                self.move_slots(slots[:1], slots[1:])
        return forward(self, slices, *args, **named)

    patch.setattr(ModelRunner, "forward", dropping)


def sums_by_threads(patch: Patch, engine: Engine) -> None:
    """The last bits of a logit depend on how many threads there are."""
    forward = ModelRunner.forward

    def summed(self: ModelRunner, *args: object, **named: object) -> PassOutput:
        output = forward(self, *args, **named)
        shift = 2.0**-10 * (torch.get_num_threads() - 1)
        return replace(output, logits=output.logits * (1 + shift))

    patch.setattr(ModelRunner, "forward", summed)


def forgets_when_preempted(patch: Patch, engine: Engine) -> None:
    """A sequence that comes back draws from another stream."""
    preempt = Scheduler.preempt

    def forgetting(self: Scheduler, sequence: Sequence) -> None:
        other = replace(sequence.sampling, seed=sequence.sampling.seed + 1)
        sequence.noise = SequenceNoise(other, sequence.tier, vocab_size=VOCAB_SIZE)
        preempt(self, sequence)

    patch.setattr(Scheduler, "preempt", forgetting)


def changed(patch: Patch, engine: Engine, change: Callable[[EngineRequest], EngineRequest]) -> None:
    submit = engine.submit
    patch.setattr(engine, "submit", lambda request: submit(change(request)))


def resumes_too_early(patch: Patch, engine: Engine) -> None:
    """What a dead replica said last is said again."""
    changed(
        patch,
        engine,
        lambda each: replace(each, resumed_token_ids=(each.resumed_token_ids or ())[:-1]),
    )


def one_stream_for_all_choices(patch: Patch, engine: Engine) -> None:
    """Choices share the noise of the first one."""
    changed(
        patch, engine, lambda each: replace(each, sampling=replace(each.sampling, choice_index=0))
    )


def masks_of_the_root(patch: Patch, engine: Engine) -> None:
    """Every node of a tree has the grammar's mask of the root."""
    masks = GrammarState.masks

    def of_root(
        self: GrammarState, token_ids: list[int], paths: list[list[int]]
    ) -> list[NDArray[np.int32] | None]:
        return masks(self, token_ids, [[] for _ in paths])

    patch.setattr(GrammarState, "masks", of_root)


def prefixes_without_adapters(patch: Patch, engine: Engine) -> None:
    """Keys that were computed with an adapter are found without it."""
    root = runners.prefix_root
    patch.setattr(
        runners, "prefix_root", lambda numerics, dtype, salt, _: root(numerics, dtype, salt)
    )


def takes_the_likeliest(patch: Patch, engine: Engine) -> None:
    """The short cut of greedy requests takes sampled ones too."""
    patch.setattr(coupled, "takes_greatest", lambda _: True)


def leaves_it(patch: Patch, engine: Engine) -> None:
    """The engine is right; it has other weights."""


def of_another_width(weights: str) -> Pair:
    """A model that is not what its name says."""
    return pair_of("int4" if weights == "int8" else "int8")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault of an axis, and the cases in which it is to be seen: their values of axes."""

    axis: str
    plant: Callable[[Patch, Engine], None]
    seen: Mapping[str, tuple[str, ...]]
    of: Callable[[str], Pair] = pair_of


DRAWN = {"sampling": ("sampled",)}
FAULTS = [
    Fault(axis="drafter", plant=accepts_too_much, seen={"drafter": ("model", "eagle3", "peagle")}),
    Fault(axis="weights", plant=leaves_it, of=of_another_width, seen={"batch": ("8",)}),
    Fault(axis="resumed", plant=resumes_too_early, seen={"resumed": ("middle", "last")}),
    Fault(axis="batch", plant=noise_of_the_slot, seen={"batch": ("8", "32"), **DRAWN}),
    Fault(axis="prefix", plant=prefix_off_by_one, seen={"prefix": ("warm", "restored")}),
    Fault(axis="chunk", plant=chunk_without_a_key, seen={"chunk": ("24", "7")}),
    Fault(axis="sampling", plant=takes_the_likeliest, seen=DRAWN),
    Fault(axis="threads", plant=sums_by_threads, seen={"threads": ("2",)}),
    Fault(axis="blocks", plant=forgets_when_preempted, seen={"blocks": ("few",), **DRAWN}),
    Fault(axis="grammar", plant=masks_of_the_root, seen={"grammar": ("schema",)}),
    Fault(
        axis="choices",
        plant=one_stream_for_all_choices,
        seen={"choices": ("3",), "sampling": ("sampled", "both")},
    ),
    Fault(axis="adapter", plant=prefixes_without_adapters, seen={"adapter": ("lora",)}),
]
QUICK = (accepts_too_much, resumes_too_early, sums_by_threads, masks_of_the_root)


def finds(fault: Fault, case: Case) -> bool:
    """Return whether a request of a case has another answer under a fault."""
    with pytest.MonkeyPatch.context() as patch:
        found = differences(case, watch=partial(fault.plant, patch), of=fault.of)
    return any(each.startswith("request") for each in found)


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(each, id=each.axis, marks=() if each.plant in QUICK else pytest.mark.slow)
        for each in FAULTS
    ],
)
def test_the_law_finds_a_fault_of_each_axis(fault: Fault) -> None:
    cases = [
        case for case in COVER if all(case[axis] in values for axis, values in fault.seen.items())
    ]
    cases.sort(key=lambda case: (case["batch"] == "32", case["threads"]))
    assert any(finds(fault, case) for case in cases)


def test_each_axis_has_its_fault() -> None:
    assert [fault.axis for fault in FAULTS] == [*AXES]
