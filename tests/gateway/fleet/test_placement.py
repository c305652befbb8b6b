"""Placement: the replica where a request costs the least time."""

from collections import Counter

from engine.request import EngineRequest, SamplingParams
from gateway.fleet.placement import LeastWork, ReplicaLoad


def _request(num_tokens: int) -> EngineRequest:
    return EngineRequest(
        request_id="a",
        prompt_token_ids=tuple(range(num_tokens)),
        tier="large",
        sampling=SamplingParams(max_tokens=8),
    )


def test_the_replica_with_the_least_work_is_chosen() -> None:
    busy = ReplicaLoad(replica_id="busy", num_queued_prompt_tokens=5000)
    slow = ReplicaLoad(replica_id="slow", seconds_per_prompt_token=1e-2)
    writing = ReplicaLoad(replica_id="writing", num_running=20)
    free = ReplicaLoad(replica_id="free", num_running=2)

    assert LeastWork().choose(_request(100), [busy, slow, writing, free]) == 3


def test_work_is_in_seconds_so_a_fast_replica_takes_more() -> None:
    fast = ReplicaLoad(
        replica_id="fast", num_queued_prompt_tokens=5000, seconds_per_prompt_token=1e-5
    )
    slow = ReplicaLoad(replica_id="slow", seconds_per_prompt_token=1e-3)

    assert LeastWork().choose(_request(100), [slow, fast]) == 1


def test_equal_replicas_are_chosen_by_chance_and_a_seed_repeats_it() -> None:
    loads = [ReplicaLoad(replica_id=str(number)) for number in range(4)]
    first, second = LeastWork(seed=7), LeastWork(seed=7)

    chosen = [first.choose(_request(10), loads) for _ in range(200)]

    assert chosen == [second.choose(_request(10), loads) for _ in range(200)]
    assert min(Counter(chosen).values()) > 20
