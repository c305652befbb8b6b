"""What a gateway over a pool tells of its replicas."""

import dataclasses

import httpx

from outrider.engine.events import EngineStats, StoreStats, TierStats
from outrider.gateway.answering.text.chat import ChatTokenizer
from outrider.gateway.engines.fleet.fleet_stats import FleetStats
from outrider.gateway.engines.fleet.pool import EnginePool
from outrider.gateway.engines.fleet.replica import EngineReplica
from outrider.gateway.wiring.application import build_app
from tests.gateway.conftest import parts_over, running, wait_for
from tests.gateway.scripted_client import Script, ScriptedClient


def test_a_gateway_tells_how_many_replicas_are_up(tokenizer: ChatTokenizer) -> None:
    clients = {name: ScriptedClient(vocab_size=420, script=lambda _: Script()) for name in "xy"}
    pool = EnginePool(EngineReplica(name, client) for name, client in clients.items())
    app = build_app(parts_over(pool, tokenizer))
    with running(app) as url, httpx.Client(base_url=url, timeout=60) as http:
        wait_for(lambda: len([state for state in pool.states() if state.is_up]) == 2)
        assert http.get("/ready").json() == {"ready": True, "replicas": {"up": 2, "of": 2}}
        clients["y"].is_ready = False
        assert http.get("/ready").json() == {"ready": True, "replicas": {"up": 1, "of": 2}}
        message = {
            "model": "auto",
            "messages": [{"role": "user", "content": "hello"}],
            "max_tokens": 4,
        }
        answer = http.post("/v1/chat/completions", json=message)
        assert answer.status_code == 200, answer.text
        told = http.get("/metrics").text
        assert 'outrider_replica_up{replica="x"} 1.0' in told
        assert 'outrider_replica_up{replica="y"} 0.0' in told
        assert 'outrider_replica_requests_total{replica="x"} 1.0' in told
        figures = http.get("/v1/dashboard").json()["replicas"]
        assert [(each["name"], each["is_up"]) for each in figures] == [
            ("x", True),
            ("y", False),
        ]
        clients["x"].is_ready = False
        assert http.get("/ready").status_code == 503
        assert "None of 2 engine replicas" in http.get("/ready").text


def stats(num_steps: int, num_running: int = 0) -> EngineStats:
    tier = TierStats(num_output_tokens=10 * num_steps, num_running=num_running)
    return EngineStats(
        tiers={"large": tier},
        num_steps=num_steps,
        accepted_per_depth=(1,) * num_steps,
        store=StoreStats(num_bytes=num_running, num_restored_tokens=num_steps),
    )


def test_sums_of_counters_never_fall() -> None:
    sums = FleetStats()
    sums.note("x", stats(5, num_running=2))
    sums.note("y", stats(3, num_running=1))
    total = sums.total(["x", "y"])
    assert (total.num_steps, total.tiers["large"].num_running) == (8, 3)
    assert total.accepted_per_depth == (2, 2, 2, 1, 1)
    assert total.store == StoreStats(num_bytes=3, num_restored_tokens=8)
    sums.note("x", stats(1))  # it was started anew
    assert sums.total(["x", "y"]).num_steps == 9
    sums.drop("y")
    total = sums.total(["x"])
    assert (total.num_steps, total.tiers["large"].num_output_tokens) == (9, 90)
    assert total.tiers["large"].num_running == 0
    assert total.store == StoreStats(num_restored_tokens=9)
    assert {f.name for f in dataclasses.fields(total)} == {
        f.name for f in dataclasses.fields(EngineStats)
    }
