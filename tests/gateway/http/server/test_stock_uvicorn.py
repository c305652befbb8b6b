"""A gateway on uvicorn's own connections (`http.edge = false`)."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from outrider.gateway.engines.backends.step_loop import no_progress
from outrider.gateway.settings.tree import load_settings
from outrider.gateway.wiring.serving import background_gateway

ROOT = Path(__file__).parents[4]
UPSTREAM_ONLY = {
    "models.large": "none",
    "models.small": "none",
    "tiers": {"a": {"url": "http://127.0.0.1:1/v1"}},
}
API_TESTS = (
    *("http/server/test_official_clients.py", "http/server/test_openai_client.py"),
    *("http/server/test_serving.py::test_serve_answers_survives_its_engine_and_drains",),
    *("http/apis/test_messages_client.py", "http/apis/test_responses_client.py"),
)


@pytest.mark.slow_cases
@pytest.mark.parametrize("edge", [True, False])
def test_the_start_says_what_the_proxy_has_to_bound(
    edge: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    settings = load_settings(environ={}, flags={**UPSTREAM_ONLY, "http.edge": edge})
    with background_gateway(settings, no_progress) as url:
        refused = httpx.get(f"{url}/health", headers={"x-long": "a" * 40_000})
    assert refused.status_code == (431 if edge else 200)
    lines = [line for line in caplog.messages if "http.edge=false" in line]
    assert len(lines) == (0 if edge else 1)
    for name in ("header_timeout_s", "max_header_bytes", "max_connections", "repeated headers"):
        assert all(name in line for line in lines)


@pytest.mark.slow
def test_the_api_works_with_it() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        + [f"tests/gateway/{name}" for name in API_TESTS],
        cwd=ROOT,
        env={**os.environ, "OUTRIDER_HTTP__EDGE": "false"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
