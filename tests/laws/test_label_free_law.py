"""Without a router: what the large model is said to agree with is what it writes itself."""

from functools import partial

import pytest

from outrider.router.label_free import AgreementModel, LabelFreePolicy
from tests.gateway.conftest import wait_for
from tests.laws.gateways import gateway

PROMPTS = ("What is 48 + 37?", "Who are you?", "What weekday comes 225 days after a Sunday?")
HELD = 16


class Heard(AgreementModel):
    """Keeps what it is told."""

    def __init__(self, threshold: float) -> None:
        super().__init__()
        self.heard: list[tuple[float, float]] = []
        self._fixed = threshold

    def has_heard(self, number: int) -> bool:
        return len(self.heard) == number

    @property
    def threshold(self) -> float:
        return self._fixed

    def learn(self, score: float, agreement: float) -> None:
        self.heard.append((score, agreement))


def common_beginning(small: tuple[str, ...], large: tuple[str, ...]) -> int:
    """The tokens before the first one in which two answers differ."""
    pairs = zip(small, large, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(small), len(large)))


def test_kept_and_escalated_answers_are_judged_alike() -> None:
    """At temperature 0, whatever becomes of them; and texts are those of one model alone."""
    counts: dict[float, list[float]] = {0.0: [], 1.01: []}
    for threshold in counts:  # every answer is kept, and then none
        model = Heard(threshold)
        policy = LabelFreePolicy(model=model, explore_share=1.0, draw=lambda: 0.0)
        with gateway(policy=policy) as world:
            for number, prompt in enumerate(PROMPTS, 1):
                chat = {
                    "messages": [{"role": "user", "content": prompt}],
                    "temperature": 0,
                    "max_tokens": 40,
                    "logprobs": True,
                }
                small, large = (world.ask(model=tier, **chat) for tier in ("small", "large"))
                options = {"hold_back_ms": 60_000, "hold_back_tokens": HELD}
                told = world.ask(model="auto", stream=True, outrider=options, **chat)
                assert told.text == (large.text if threshold else small.text)
                wait_for(partial(model.has_heard, number))
                score, agreement = model.heard[-1]
                assert score == pytest.approx(told.report["confidence"], abs=1e-5)
                judged = told.report["held_tokens"]  # on a busy machine some more than HELD
                if threshold:  # and it goes on until the large model takes over
                    judged = told.report["reused_tokens"] + told.report["discarded_tokens"]
                same = min(common_beginning(small.tokens, large.tokens), judged)
                assert judged >= told.report["held_tokens"] >= HELD
                assert same - 1 <= agreement * judged <= judged
                counts[threshold].append(agreement * judged)
    for kept, escalated in zip(*counts.values(), strict=True):
        assert kept == pytest.approx(escalated, abs=4)
