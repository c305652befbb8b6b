"""Which engines are started for the tiers that gateways ask for."""

import pytest

from outrider.gateway.wiring.ray.on_demand import OnDemand
from outrider.gateway.wiring.ray.plan import EnginePlan

ENGINES = OnDemand(
    {
        "pair": EnginePlan(small="s", large="l", min_replicas=0),
        "always": EnginePlan(small="s"),
        "large": EnginePlan(large="l", min_replicas=0),
    }
)


def test_engines_that_may_have_no_replica_are_named_by_their_tiers() -> None:
    assert ENGINES.startable == [["small", "large"], ["large"]]


@pytest.mark.parametrize(
    ("wanted", "started"),
    [
        ('[["large"]]', ["large"]),
        ('[["small"]]', ["pair"]),
        ('[["large", "small"], ["large"]]', ["pair", "large"]),
        ("[]", []),
    ],
)
def test_the_smallest_engine_that_will_do_is_started(wanted: str, started: list[str]) -> None:
    assert ENGINES.to_start(f'{{"wanted": {wanted}}}'.encode()) == started


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff",
        b"[" * 3000,
        b"{}",
        b'{"wanted": 7}',
        b'{"wanted": [[]]}',
        b'{"wanted": [[{}]]}',
        b'{"wanted": [["huge"]]}',
        b'{"wanted": [' + b'["large"],' * 100 + b'["large"]]}',
    ],
)
def test_what_asks_for_nothing_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError, match="wanted"):
        ENGINES.to_start(body)
