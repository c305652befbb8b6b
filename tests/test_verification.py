"""OUTRIDER_VERIFY=1 finds a fault on each axis: guesses, company, caches, an end in the middle."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from outrider.engine.cache import block_pool, kv_view
from outrider.engine.cache.block_pool import chain_hash
from outrider.engine.core import Engine
from outrider.engine.request import EngineRequest
from outrider.verifier.coupled import CoupledVerifier
from outrider.verifier.token_tree import TokenTree
from outrider.verifier.verdict import Verdict
from tests import verification
from tests.engines import make_engine, make_request, serve, tiny_pair

Plant = Callable[[pytest.MonkeyPatch], None]

PROMPTS = [[*range(1, 13), *range(40, 60)], [*range(17, 29), *range(40, 60)]]
"""A block of 16 and a rest: the block's end and the rest are the same."""


def judged(
    patch: pytest.MonkeyPatch, change: Callable[[list[TokenTree], list[Verdict]], Any]
) -> None:
    """Put other verdicts in the place of the rule's."""
    verify = CoupledVerifier.verify

    def changed(own: CoupledVerifier, sequences: Any, trees: list[TokenTree], logits: Any) -> Any:
        return change(trees, verify(own, sequences, trees, logits))

    patch.setattr(CoupledVerifier, "verify", changed)


def believe_guesses(patch: pytest.MonkeyPatch) -> None:
    def believed(trees: list[TokenTree], verdicts: list[Verdict]) -> list[Verdict]:
        pairs = zip(trees, verdicts, strict=True)
        return [
            Verdict.of([], [tree.token_ids[-1]]) if tree.num_nodes > 1 else verdict
            for tree, verdict in pairs
        ]

    judged(patch, believed)


def mix_rows(patch: pytest.MonkeyPatch) -> None:
    def mixed(_: list[TokenTree], verdicts: list[Verdict]) -> list[Verdict]:
        if len(verdicts) == 1:
            return verdicts
        return [Verdict.of([], [verdict.token_ids[0]]) for verdict in verdicts[::-1]]

    judged(patch, mixed)


def forget_how_a_block_begins(patch: pytest.MonkeyPatch) -> None:
    for module in (block_pool, kv_view):
        patch.setattr(module, "chain_hash", lambda parent, tokens: chain_hash(parent, tokens[-4:]))


def draw_anew(patch: pytest.MonkeyPatch) -> None:
    submit = Engine.submit

    def drawn(engine: Engine, request: EngineRequest) -> None:
        if request.resumed_token_ids:
            request = replace(request, sampling=replace(request.sampling, seed=99))
        submit(engine, request)

    patch.setattr(Engine, "submit", drawn)


@pytest.mark.parametrize(
    ("plant", "how"),
    [
        (believe_guesses, "alone"),
        (mix_rows, "alone"),
        (forget_how_a_block_begins, "alone"),
        (draw_anew, "resumed"),
    ],
)
def test_a_planted_fault_is_found(plant: Plant, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [
        make_request(f"r{number}", prompt, max_tokens=12, temperature=1.0, seed=number)
        for number, prompt in enumerate(PROMPTS)
    ]
    engine = make_engine(tiny_pair(drift=0.5))
    verification.verify(engine, requests, serve(engine, requests))
    plant(monkeypatch)
    engine = make_engine(tiny_pair(drift=0.5))
    late = {"r1": 20} if plant is forget_how_a_block_begins else {}
    answers = serve(engine, requests, arrivals=late)
    with pytest.raises(AssertionError, match=f"another answer {how}"):
        verification.verify(engine, requests, answers)
