"""`service_tier`: a place in the queue, and the word for it in the response."""

import pytest

from outrider.engine.request import HIGH, LOW, NORMAL
from outrider.gateway.answering.jobs.engine_requests import read_service_tier
from outrider.gateway.contract.errors.tree import BadRequestError


@pytest.mark.parametrize(
    ("value", "priority", "reported"),
    [
        (None, NORMAL, "default"),
        ("auto", NORMAL, "default"),
        ("default", NORMAL, "default"),
        ("priority", HIGH, "priority"),
        ("flex", LOW, "flex"),
    ],
)
def test_known_tiers(value: str | None, priority: int, reported: str) -> None:
    tier = read_service_tier(value)
    assert (tier.priority, tier.reported) == (priority, reported)


@pytest.mark.parametrize("value", ["", "scale", "Priority", 1, True, ["auto"], {"auto": 1}])
def test_invalid_service_tiers_are_refused(value: object) -> None:
    with pytest.raises(BadRequestError) as caught:
        read_service_tier(value)
    assert caught.value.param == "service_tier"
    assert "'priority'" in str(caught.value)
