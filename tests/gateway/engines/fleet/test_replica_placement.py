"""Placement: the replica where a request costs the least time."""

from collections import Counter

import numpy as np

from outrider.engine.request import EngineRequest
from outrider.gateway.engines.fleet.replica_placement import (
    LeastWork,
    LoadBoard,
    Loads,
    ReplicaLoad,
)
from outrider.verifier.params import SamplingParams


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

    assert LeastWork().choose(_request(100), Loads.of([busy, slow, writing, free])) == 3


def test_work_is_in_seconds_so_a_fast_replica_takes_more() -> None:
    fast = ReplicaLoad(
        replica_id="fast", num_queued_prompt_tokens=5000, seconds_per_prompt_token=1e-5
    )
    slow = ReplicaLoad(replica_id="slow", seconds_per_prompt_token=1e-3)

    assert LeastWork().choose(_request(100), Loads.of([slow, fast])) == 1


def test_equal_replicas_are_chosen_by_chance_and_a_seed_repeats_it() -> None:
    loads = Loads.of(ReplicaLoad(replica_id=str(number)) for number in range(4))
    first, second = LeastWork(seed=7), LeastWork(seed=7)

    chosen = [first.choose(_request(10), loads) for _ in range(200)]

    assert chosen == [second.choose(_request(10), loads) for _ in range(200)]
    assert min(Counter(chosen).values()) > 20


def test_a_board_follows_replicas_that_come_go_and_work() -> None:
    board = LoadBoard()
    columns = [board.add(ReplicaLoad(replica_id=str(n), index_lane=n)) for n in range(40)]
    assert len(set(columns)) == 40
    board.put(columns[33], ReplicaLoad(replica_id="33", index_lane=33, num_running=7))
    board.remove(columns[5])
    columns[5] = board.add(ReplicaLoad(replica_id="new", index_lane=90))
    loads = board.take(np.array([columns[33], columns[5], columns[0]]))
    assert loads.lanes.tolist() == [33, 90, 0]
    assert loads.work_s(100).argmax() == 0
    assert len(loads) == 3
