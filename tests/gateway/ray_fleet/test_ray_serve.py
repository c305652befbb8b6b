"""A fleet on a real Ray Serve: engines are listed, replaced when they are killed, and drained."""

import os
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.backends.fleet_keys import write_fleet_keys
from gateway.fleet.discovery import resolve
from gateway.ray_fleet.plan import EnginePlan, FleetPlan
from tests.gateway.backends.clients import run

ray = pytest.importorskip("ray", reason="pip install 'outrider[fleet]': Ray Serve is not here")

SMALL = Path(__file__).parents[3] / "draft" / "pair" / "small"
PORT = 7863
URL = f"http://127.0.0.1:{PORT}/"


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Any]:
    """The handle of a deployment with one engine, which may have two."""
    from ray import serve

    from gateway.ray_fleet.deployments import build_application

    write_fleet_keys(tmp_path / "fleet.key")
    engine = EnginePlan(
        small=str(SMALL),
        max_replicas=2,
        num_cpus=0.5,
        drain_timeout_s=5.0,
        settings={"engine.num_threads": 1},
    )
    plan = FleetPlan(
        key=tmp_path / "fleet.key", host="127.0.0.1", http_port=PORT, engines={"small": engine}
    )
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=80 * 2**20,
    )
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": PORT})
        serve.run(build_application(plan), name="fleet", route_prefix="/")
        yield serve.get_deployment_handle("small", "fleet")
    finally:
        serve.shutdown()
        ray.shutdown()


def listed() -> set[str]:
    """Return the addresses that the fleet's page has; none while it has just started."""

    async def look_up() -> set[str]:
        return await resolve(URL)

    try:
        found: set[str] = run(look_up())
    except OSError:
        return set()
    return found


def until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 120.0
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.2)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_an_engine_that_is_killed_is_replaced(fleet: Any) -> None:
    until(lambda: len(listed()) == 1)
    (first,) = listed()
    pid = fleet.pid.remote().result(timeout_s=60.0)
    os.kill(pid, signal.SIGKILL)
    until(lambda: bool(listed()) and first not in listed())
    assert fleet.pid.remote().result(timeout_s=60.0) != pid
    with urllib.request.urlopen(URL, timeout=5.0) as page:
        assert page.headers["content-type"] == "application/json"
