"""A second Outrider in the small and in the large model's part: texts are its own, to the token.

Two real gateways on the bundled pair in float32. The watch reads the second one's log-probabilities
over HTTP, and they have to be those of its own answer.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.gateway.hybrid import TestPolicy
from tests.gateway.watches import PlannedWatch
from tests.laws.gateways import Gateway, Told, gateway

CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "What weekday comes 225 days after a Sunday?"}],
    "temperature": 0,
    "max_tokens": 40,
}
SAMPLED = {**CHAT, "temperature": 0.9, "seed": 4}
HELD = 5
LONG_HOLD = {"hold_back_ms": 60_000}
NEAR = 1e-3


@pytest.fixture(scope="module")
def second() -> Iterator[Gateway]:
    """The other Outrider, with both models."""
    with gateway() as made:
        yield made


def tier(name: str, second: Gateway, model: str) -> dict[str, Any]:
    return {
        f"tiers.{name}.url": f"{second.url}/v1",
        f"tiers.{name}.model": model,
        f"tiers.{name}.server": "outrider",
    }


def own(second: Gateway, model: str, chat: dict[str, Any]) -> Told:
    return second.ask(model=model, logprobs=True, **chat)


def ask(front: Gateway, is_streamed: bool, chat: dict[str, Any]) -> Told:
    return front.ask(model="auto", stream=is_streamed, outrider=LONG_HOLD, **chat)


@pytest.mark.parametrize(
    "chat",
    [
        pytest.param(CHAT, id="greedy"),
        pytest.param(SAMPLED, id="sampled", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("action", ["commit", "escalate"])
def test_in_both_parts(second: Gateway, action: Any, chat: dict[str, Any]) -> None:
    """A gateway without models: one Outrider is its small tier and its large one."""
    watches: list[PlannedWatch] = []

    def watch() -> PlannedWatch:
        watches.append(PlannedWatch(action, at=HELD))
        return watches[-1]

    flags = {
        "models.small": "none",
        "models.large": "none",
        "handoff.small": "device",
        "handoff.tier": "cloud",
        **tier("device", second, "small"),
        **tier("cloud", second, "large"),
    }
    small, large = (own(second, model, chat) for model in ("small", "large"))
    assert small.text != large.text
    with gateway(flags, policy=TestPolicy(watch=watch)) as front:
        for is_streamed in (True, False):
            told = ask(front, is_streamed, chat)
            right = small if action == "commit" else large
            assert told.error is None
            assert told.text == right.text
            assert told.finish_reason == right.finish_reason
            assert told.report["tier"] == ("device" if action == "commit" else "cloud")
            assert told.report["escalated"] is (action == "escalate")
            seen = watches[-1].logprobs
            assert len(seen) >= HELD
            assert seen == pytest.approx(small.logprobs[: len(seen)], abs=NEAR)


@pytest.mark.slow
@pytest.mark.parametrize("action", ["commit", "escalate"])
def test_in_the_small_part_with_a_large_model_here(second: Gateway, action: Any) -> None:
    flags = {
        "models.small": "none",
        "models.large": "demo",
        "handoff.small": "device",
        "handoff.strong": "local",
        **tier("device", second, "small"),
    }
    policy = TestPolicy(watch=lambda: PlannedWatch(action, at=HELD))
    with gateway(flags, policy=policy) as front:
        told = ask(front, True, CHAT)
    assert told.text == own(second, "small" if action == "commit" else "large", CHAT).text
    assert told.report["tier"] == ("device" if action == "commit" else "large")


@pytest.mark.slow
@pytest.mark.parametrize("action", ["commit", "escalate"])
def test_in_the_large_part_with_a_small_model_here(second: Gateway, action: Any) -> None:
    flags = {
        "models.large": "none",
        "models.small": "demo",
        "handoff.tier": "cloud",
        **tier("cloud", second, "large"),
    }
    policy = TestPolicy(watch=lambda: PlannedWatch(action, at=HELD))
    with gateway(flags, policy=policy) as front:
        told = ask(front, True, CHAT)
    assert told.text == own(second, "small" if action == "commit" else "large", CHAT).text
    assert told.report["tier"] == ("small" if action == "commit" else "cloud")
