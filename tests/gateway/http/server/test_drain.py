"""The end of a gateway: load balancers are told first, answers are finished, the books are kept."""

import asyncio
import contextlib
import json
import re
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from benchmarks.shared.mock_upstream import MockScript, mock_in_thread
from outrider.gateway.http.server.draining import DrainGate, Draining
from outrider.gateway.http.server.listening import listen, url_of
from outrider.gateway.settings.tree import load_settings
from outrider.gateway.wiring.serving import GatewayRun, background_gateway, settle_process
from tests.gateway.http.server.random_pair import pair
from tests.gateway.waiting import wait_for

__all__ = ["pair"]

ROOT = Path(__file__).parents[4]
PATH = "/v1/chat/completions"
CHAT = {"model": "auto", "messages": [{"role": "user", "content": "How are you today?"}]}
Process = subprocess.Popen[str]


@pytest.fixture
def collector() -> Iterator[tuple[str, list[bytes]]]:
    """Takes traces; yields its address and the bodies that came."""
    bodies: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", bodies
        server.shutdown()
        thread.join()


@contextlib.contextmanager
def serving(tier: str, folder: Path, **settings: object) -> Iterator[tuple[Process, str]]:
    """`outrider serve` without models of its own; yields the process and its URL."""
    settings["database_url"] = f"sqlite:///{folder / 'outrider.db'}"
    settings["tiers__cloud__model"] = "mock-model"
    command = [sys.executable, "-m", "outrider.gateway.cli", "serve", "--port", "0", "--tier", tier]
    command += ["--large", "none", "--small", "none"]
    for name, value in settings.items():
        command += ["--set", f"{name.replace('__', '.')}={value}"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        try:
            assert process.stdout is not None
            line = next((line for line in process.stdout if "http://" in line), None)
            assert line is not None, process.stderr and process.stderr.read()
            found = re.search(r"http://[\d.:]+", line)
            assert found
            yield process, found.group()
        finally:
            process.kill()


def test_sigterm_with_everything_on(tmp_path: Path, collector: tuple[str, list[bytes]]) -> None:
    endpoint, bodies = collector
    with (
        mock_in_thread(MockScript(num_pieces=100, gap_s=0.02)) as mock,
        serving(
            f"cloud={mock.url}",
            tmp_path,
            server__drain_grace_s=1.0,
            telemetry__log_format="json",
            telemetry__traces__endpoint=endpoint,
            telemetry__capture__folder=tmp_path / "captured",
            ledger__batch_ms=600_000,  # so that only the end writes
        ) as (process, url),
    ):
        request = {**CHAT, "stream": True}
        with httpx.stream("POST", f"{url}{PATH}", json=request, timeout=180) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            _says_so_while_the_port_is_open(url)
            wait_for(lambda: _is_refused(url))
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert process.wait(timeout=120) == 0
        assert process.stderr is not None
        log = process.stderr.read()
    _has_booked(tmp_path / "outrider.db", num_answers=1)
    names = [span.name for span in spans_of(bodies)]
    assert sorted(names) == [f"POST {PATH}", "chat mock-model"]
    (captured,) = (tmp_path / "captured").glob("*.jsonl")
    assert len(captured.read_text().splitlines()) == 1
    told = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    assert {"draining", "answered"} <= {line.get("event") for line in told}
    assert "How are you" not in log


def _says_so_while_the_port_is_open(url: str) -> None:
    """Within the grace: /ready says no, the process is well, and requests are still answered."""
    with httpx.Client(base_url=url, timeout=30) as http:
        wait_for(lambda: http.get("/ready").status_code == 503, timeout_s=1.0)
        ready = http.get("/ready")
        assert ready.json()["error"]["code"] == "draining"
        assert int(ready.headers["retry-after"]) >= 1
        assert ready.headers["connection"] == "close"
        assert http.get("/health").status_code == 200
        assert "outrider_draining 1.0" in http.get("/metrics").text


def _is_refused(url: str) -> bool:
    try:
        httpx.get(f"{url}/health", timeout=5)
    except httpx.TransportError:
        return True
    return False


def _has_booked(database: Path, *, num_answers: int) -> None:
    with sqlite3.connect(database) as connection:
        rows = connection.execute("SELECT outcome FROM ledger WHERE kind = 'answer'").fetchall()
    connection.close()
    assert rows == [("answered",)] * num_answers


def spans_of(bodies: list[bytes]) -> list[Any]:
    """Return what came to the collector."""
    return [
        span
        for data in bodies
        for resource in ExportTraceServiceRequest.FromString(data).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


@pytest.mark.slow
def test_a_second_word_ends_the_grace() -> None:
    flags = {
        "models.large": "none",
        "models.small": "none",
        "tiers.cloud.model": "mock-model",
        "server.drain_grace_s": 600,
        "database_url": "none",
    }

    async def scenario(url: str) -> None:
        settings = load_settings(environ={}, flags=flags | {"tiers.cloud.url": url})
        listener = listen("127.0.0.1", 0)
        run = GatewayRun(settings, listener)
        task = asyncio.create_task(run.run())
        async with httpx.AsyncClient(base_url=url_of(listener), timeout=20) as http:
            assert (await http.get("/ready")).status_code == 200
            run.stop()
            assert (await http.get("/ready")).status_code == 503
            assert (await http.get("/health")).status_code == 200
            run.stop()
            await asyncio.wait_for(task, 60)

    with mock_in_thread(MockScript()) as mock:
        asyncio.run(scenario(mock.url))


@pytest.mark.slow
def test_an_engines_own_counts_are_in_the_trace(
    pair: dict[str, Path], collector: tuple[str, list[bytes]]
) -> None:
    endpoint, bodies = collector
    flags = {
        "models.large": str(pair["large"]),
        "models.small": str(pair["small"]),
        "speculation.adaptive": False,
        "engine.process": False,
        "engine.num_threads": 1,
        "telemetry.traces.endpoint": endpoint,
    }
    settings = load_settings(environ={}, flags=flags)
    with background_gateway(settings, lambda stage, fraction: None) as url:
        request = {**CHAT, "model": "large", "max_tokens": 30, "temperature": 0}
        report = httpx.post(f"{url}{PATH}", json=request, timeout=180).json()
    (decode,) = [span for span in spans_of(bodies) if span.name == "decode"]
    said = {item.key: item.value.int_value for item in decode.attributes}
    assert said["outrider.output_tokens"] == report["usage"]["completion_tokens"]
    assert said["outrider.drafted_tokens"] == report["outrider"]["drafted_tokens"] > 0
    assert said["outrider.accepted_tokens"] == report["outrider"]["accepted_tokens"]
    assert 0 < said["outrider.steps"] <= said["outrider.output_tokens"]
    for span in spans_of(bodies):
        assert span.end_time_unix_nano >= span.start_time_unix_nano
        assert abs(span.start_time_unix_nano / 1e9 - time.time()) < 300


# ---- the gate by itself -----------------------------------------------------------------------


async def _app(scope: dict[str, Any], receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"x-a", b"1")]})
    await send({"type": "http.response.body", "body": scope["path"].encode()})


def ask(gate: DrainGate, path: str, method: str = "GET") -> tuple[int, dict[bytes, bytes], bytes]:
    """Status, headers and body."""
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b""}

    scope = {"type": "http", "path": path, "method": method, "headers": []}
    asyncio.run(gate(scope, receive, send))
    start, *parts = sent
    return start["status"], dict(start["headers"]), b"".join(part["body"] for part in parts)


def test_the_gate_does_nothing_until_the_draining_begins() -> None:
    gate = DrainGate(_app, Draining())
    assert ask(gate, "/ready") == (200, {b"x-a": b"1"}, b"/ready")


@pytest.mark.parametrize(
    ("path", "method", "status"),
    [
        ("/ready", "GET", 503),
        ("/ready", "HEAD", 503),
        ("/ready", "POST", 200),
        ("/ping", "GET", 503),
        ("/ping", "POST", 503),
        ("/v1/x", "GET", 200),
    ],
)
def test_from_then_on_connections_are_closed(path: str, method: str, status: int) -> None:
    found, headers, text = ask(DrainGate(_app, Draining(has_begun=True)), path, method)
    assert found == status
    assert headers[b"connection"] == b"close"
    if status == 503:
        assert json.loads(text)["error"]["code"] == "draining"
        assert headers[b"retry-after"] == b"1"


async def test_a_generator_that_its_reader_forgets_is_closed_in_a_settled_process() -> None:
    """The loop does not list those that are open, but it still closes what nobody refers to."""
    settle_process()
    is_closed = asyncio.Event()

    async def generator() -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            await asyncio.sleep(0)  # only a loop can close it
            is_closed.set()

    async def read_one() -> int:
        return await anext(generator())

    assert await read_one() == 1
    await asyncio.wait_for(is_closed.wait(), 5)
