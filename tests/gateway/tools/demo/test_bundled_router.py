"""The bundled router, and the command that trains it anew."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from outrider.engine.model.fingerprint import checkpoint_fingerprint
from outrider.gateway.settings.sections import bundled_pair
from outrider.gateway.tools.demo import bundled_router
from outrider.gateway.tools.demo.bundled_router import TimedAnswers, with_seconds
from outrider.gateway.tools.learning.collect.data import CollectQuestion
from outrider.router.dataset import LabelledPrompts
from outrider.router.features import SparseVector, prompt_features
from outrider.router.scorer import RouterScorer
from outrider.router.worth import CostRates
from outrider.verifier.params import Tier


def test_the_bundled_router_is_the_bundled_pairs_and_assures_and_weighs() -> None:
    router = RouterScorer.load(bundled_pair() / "router")
    prints = [checkpoint_fingerprint(bundled_pair() / tier) for tier in ("small", "large")]
    assert router.pair == "-".join(prints)
    assert [each.small_weights for each in router.assurances] == ["bfloat16"]
    setting = router.assurances[0].stage(may_watch=True).setting(0.95)
    assert setting.strong_share is not None
    assert 0.1 < setting.strong_share < 0.7
    assert router.worth is not None
    assert router.worth.model.unit == "second"
    costs = router.worth.costs(router.worth.tokens(*_features(router, "What is 4 + 5?")), "second")
    assert costs is not None
    assert costs.begun <= costs.small < costs.large


def _features(router: RouterScorer, text: str) -> tuple[SparseVector, int]:
    return prompt_features(text, router.features), len(text)


def test_labels_get_the_seconds_of_the_rates_that_were_timed() -> None:
    tokens = np.array([10.0, 20.0, 40.0, 80.0]), np.array([5.0, 9.0, 2.0, 3.0])
    rates = CostRates(request=0.5, prompt_token=0.01, answer_token=0.1)
    seconds = np.array([rates.cost(*each) for each in zip(*tokens, strict=True)])
    timed = TimedAnswers(num_prompt_tokens=tokens[0], num_answer_tokens=tokens[1], seconds=seconds)
    assert timed.rates.answer_token == pytest.approx(0.1)
    free = CostRates(request=0.0, prompt_token=0.0, answer_token=0.0)
    data = LabelledPrompts(
        prompts=["a", "b"],
        weak=np.ones(2),
        strong=np.ones(2),
        sha256="",
        num_prompt_tokens=np.array([10.0, 100.0]),
        num_weak_tokens=np.array([1.0, 2.0]),
        num_strong_tokens=np.array([3.0, 4.0]),
    )
    found = with_seconds(data, {"small": free, "large": timed.rates})
    assert found.weak_s is not None
    assert found.weak_s.tolist() == [0.0, 0.0]
    assert found.strong_s is not None
    assert found.strong_s.tolist() == pytest.approx([0.9, 1.9])


@pytest.mark.slow
def test_one_command_trains_a_router_of_the_pair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundled_router, "kept_pair", lambda report: bundled_pair())
    real = bundled_router.timed

    async def ten_times_dearer(questions: Sequence[CollectQuestion]) -> dict[Tier, TimedAnswers]:
        found = await real(questions)  # of a pair whose passes cost about the same
        assert all(answers.seconds.min() > 0.0 for answers in found.values())
        return {**found, "large": replace(found["large"], seconds=10.0 * found["small"].seconds)}

    monkeypatch.setattr(bundled_router, "timed", ten_times_dearer)
    out, work = tmp_path / "router", tmp_path / "work"
    words = ["--out", str(out), "--work", str(work), "--num-tasks", "160", "--num-timed", "4"]
    bundled_router.main(words)
    router = RouterScorer.load(out)
    assert router.training["num_rows"] == 160
    assert router.pair == RouterScorer.load(bundled_pair() / "router").pair
    assert router.worth is not None
    assert router.assurances[0].num_prompts == 160
