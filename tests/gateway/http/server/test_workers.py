"""`outrider serve --workers` as real processes: load, deaths, and an end that leaves nothing."""

import contextlib
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from transformers import AutoModelForCausalLM

from tests.adapters import make_adapter
from tests.gateway.http.server.random_pair import pair
from tests.gateway.http.server.test_serving import Gateway, body, chunks, serving
from tests.gateway.waiting import wait_for

__all__ = ["pair"]

pytestmark = pytest.mark.slow

_TOKEN = "0123456789abcdef" * 3
_ADMIN = {"authorization": f"Bearer {_TOKEN}"}
_SUCCESS = re.compile(r"^outrider_request_success_total\{.*\} (\S+)$", re.MULTILINE)
_RUNNING = re.compile(r"^outrider_num_requests_running\{.*\} (\S+)$", re.MULTILINE)
_USAGE = re.compile(r"^outrider_kv_cache_usage_perc\{.*\} (\S+)$", re.MULTILINE)


def workers(gateway: Gateway) -> list[psutil.Process]:
    children = psutil.Process(gateway.process.pid).children()
    return [
        child for child in children if "outrider.gateway.wiring.gateway_worker" in child.cmdline()
    ]


def metric(gateway: Gateway, pattern: re.Pattern[str]) -> float:
    text = httpx.get(f"{gateway.url}/metrics", timeout=60).text
    return sum(float(found) for found in pattern.findall(text))


def up(gateway: Gateway) -> dict[str, int]:
    found: dict[str, int] = httpx.get(f"{gateway.url}/ready", timeout=60).json()["workers"]
    return found


def ask(gateway: Gateway, **more: Any) -> httpx.Response:
    url = f"{gateway.url}/v1/chat/completions"
    return httpx.post(url, json=body(3) | more, timeout=180)


@contextlib.contextmanager
def streams(gateway: Gateway, count: int, max_tokens: int) -> Iterator[list[httpx.Response]]:
    """Begin answers, each over a connection of its own; all have their first token."""
    url, request = f"{gateway.url}/v1/chat/completions", body(max_tokens, stream=True)
    with contextlib.ExitStack() as stack:
        begun = []
        for _ in range(count):
            client = stack.enter_context(httpx.Client(timeout=180))
            response = stack.enter_context(client.stream("POST", url, json=request))
            begun.append(response)
        yield begun


def is_whole(response: httpx.Response) -> bool:
    try:
        return [c["choices"][0]["finish_reason"] for c in chunks(response) if c["choices"]][-1]
    except httpx.RemoteProtocolError:
        return False


def test_two_workers(pair: dict[str, Path], tmp_path: Path) -> None:
    database = f"database_url=sqlite:///{tmp_path}/outrider.db"
    token = f"keys.admin_token={_TOKEN}"
    options = ("--workers", "2", "--set", database, "--set", token)
    with serving(pair, *options) as gateway:
        assert "workers 2" in gateway.banner
        assert up(gateway) == {"up": 2, "of": 2}
        _counts_add_up(gateway)
        _changes_reach_both(gateway, pair, tmp_path / "adapter")
        _one_dies(gateway)
        _drains(gateway)


def _counts_add_up(gateway: Gateway) -> None:
    for _ in range(5):
        assert ask(gateway).status_code == 200
    assert metric(gateway, _SUCCESS) == 5
    dashboard = httpx.get(f"{gateway.url}/v1/dashboard", timeout=60).json()
    assert dashboard["requests"]["num"] == 5


def _changes_reach_both(gateway: Gateway, pair: dict[str, Path], folder: Path) -> None:
    make_adapter(folder, AutoModelForCausalLM.from_pretrained(pair["large"]), seed=1)
    url = f"{gateway.url}/admin/adapters"
    wanted = {"name": "mine", "path": str(folder)}
    loaded = httpx.post(url, json=wanted, headers=_ADMIN, timeout=180)
    assert loaded.status_code == 200, loaded.text
    assert _status_of_both(gateway, "mine") == {200}
    assert httpx.delete(f"{url}/mine", headers=_ADMIN, timeout=180).status_code == 200
    assert _status_of_both(gateway, "mine") == {404}
    wrong = wanted | {"path": str(folder / "no")}
    assert httpx.post(url, json=wrong, headers=_ADMIN, timeout=180).status_code == 400
    assert httpx.post(url, json=wanted, headers=_ADMIN, timeout=180).status_code == 200


def _status_of_both(gateway: Gateway, model: str) -> set[int]:
    """Ask over two connections that are open at the same time."""
    with httpx.Client(timeout=180) as one, httpx.Client(timeout=180) as other:
        url = f"{gateway.url}/v1/chat/completions"
        return {
            each.post(url, json=body(1) | {"model": model}).status_code for each in (one, other)
        }


def _one_dies(gateway: Gateway) -> None:
    """Its clients' answers break off, the others' do not, and the engine frees what it had."""
    victim = workers(gateway)[0]
    counted = metric(gateway, _SUCCESS)
    with streams(gateway, 4, max_tokens=300) as begun:
        victim.kill()
        assert sorted(bool(is_whole(each)) for each in begun) == [False, False, True, True]
    assert ask(gateway).status_code == 200
    assert metric(gateway, _SUCCESS) > counted
    wait_for(lambda: metric(gateway, _RUNNING) == 0 and metric(gateway, _USAGE) == 0)
    wait_for(lambda: up(gateway) == {"up": 2, "of": 2})
    assert victim.pid not in {each.pid for each in workers(gateway)}
    assert _status_of_both(gateway, "mine") == {200}  # the new one knows the adapter, too


def _drains(gateway: Gateway) -> None:
    """Running answers end, and then all processes."""
    family = psutil.Process(gateway.process.pid).children(recursive=True)
    with streams(gateway, 4, max_tokens=60) as begun:
        gateway.process.send_signal(signal.SIGTERM)
        assert all(is_whole(each) for each in begun)
    assert gateway.process.wait(timeout=120) == 0
    wait_for(lambda: not any(each.is_running() for each in family))


def test_nothing_is_left_of_a_killed_parent(tmp_path: Path) -> None:
    none = {"large": Path("none"), "small": Path("none")}
    database = f"database_url=sqlite:///{tmp_path}/outrider.db"
    tier = ("--tier", "far=http://127.0.0.1:9/v1")
    with serving(none, *tier, "--workers", "2", "--set", database) as gateway:
        left = workers(gateway)
        assert len(left) == 2
        gateway.process.kill()
        wait_for(lambda: not any(each.is_running() for each in left))
