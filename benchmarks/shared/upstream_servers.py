"""The servers that benchmarks start, each as a process of its own."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from benchmarks.shared.harness import console, without_engine_environment
from benchmarks.shared.record import ROOT

HOST: Final = "127.0.0.1"
_START_TIMEOUT_S: Final = 180.0
_STOP_TIMEOUT_S: Final = 20.0
_NO_MODELS: Final = ("--large", "none", "--small", "none")
_NO_TENANTS: Final = ("--set", "database_url=none")
_LLAMA: Final = ROOT / "examples" / "device_and_cloud" / "llama_server.py"
_LAG_METRIC: Final = "outrider_event_loop_lag_seconds_bucket"


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A program that listens on `port`."""

    name: str
    port: int
    pid: int

    @property
    def url(self) -> str:
        """Base URL as OpenAI's clients take it."""
        return f"http://{HOST}:{self.port}/v1"

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """It gets no processor time: what it does beside answering must not disturb another one."""
        os.kill(self.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.pid, signal.SIGCONT)

    def get(self, path: str, *, key: str | None = None) -> str:
        """The text of a page of it, asked for with a key where it wants one."""
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        url = f"http://{HOST}:{self.port}{path}"
        with urllib.request.urlopen(
            urllib.request.Request(url, headers=headers), timeout=10
        ) as answer:
            return str(answer.read().decode())


def free_port() -> int:
    """Return a port without a listener."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
    return port


def cores() -> tuple[int | None, int | None]:
    """A core for the server that is measured, and one for all else; None where they are one."""
    if not hasattr(os, "sched_getaffinity"):
        return None, None
    usable = sorted(os.sched_getaffinity(0))
    return (usable[0], usable[-1]) if len(usable) > 1 else (None, None)


@contextlib.contextmanager
def mock_server(options: Sequence[str], *, core: int | None) -> Iterator[Server]:
    """A mock upstream with these options of its command line."""
    command = [sys.executable, "-m", "benchmarks.shared.mock_upstream", *options]
    port = free_port()
    with _running([*command, "--port", str(port)], core=core) as (process, log):
        yield _ready("mock", process, port, "/v1/models", log)


@contextlib.contextmanager
def verdict_server(*, core: int | None) -> Iterator[Server]:
    """A service of checks that passes everything at once."""
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.shared.verdict_server", "--port", str(port)]
    with _running(command, core=core) as (process, log):
        yield _ready("verdicts", process, port, "/", log)


@contextlib.contextmanager
def relay_server(target: Server, *, core: int | None) -> Iterator[Server]:
    """A relay of bytes in front of that server, which must have the path /v1/models."""
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.shared.byte_relay", "--port", str(port)]
    command += ["--to", str(target.port)]
    with _running(command, core=core) as (process, log):
        yield _ready("relay", process, port, "/v1/models", log)


@contextlib.contextmanager
def gateway_server(
    tiers: Sequence[tuple[str, str]],
    *,
    options: Sequence[str] = (*_NO_MODELS, *_NO_TENANTS),
    core: int | None = None,
    root: Path = ROOT,
    variables: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """`outrider serve` with these tiers: name and URL, the same name again for replicas.

    `root`: the checkout whose gateway runs; `variables`: of its environment.
    """
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "outrider.gateway.cli",
        "serve",
        "--host",
        HOST,
        "--port",
        str(port),
    ]
    command += [word for name, url in tiers for word in ("--tier", f"{name}={url}")]
    command += ["--log-level", "WARNING", *options]
    with _running(command, core=core, root=root, variables=variables) as (process, log):
        yield _ready("outrider", process, port, "/ready", log)


@contextlib.contextmanager
def tenant_server(
    name: str, options: Sequence[str], *, core: int | None = None, root: Path = ROOT
) -> Iterator[Server]:
    """A gateway over a mock engine (tenant_server.py), of the checkout in `root`."""
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "benchmarks.shared.tenant_server",
        "--port",
        str(port),
        *options,
    ]
    with _running(command, core=core, root=root) as (process, log):
        yield _ready(name, process, port, "/ready", log)


@contextlib.contextmanager
def xllamacpp_server(file: Path, *, python: Path, num_threads: int = 1) -> Iterator[Server]:
    """llama.cpp's server on a GGUF file, by an interpreter that has the wheel `xllamacpp`."""
    port = free_port()
    command = [str(python), str(_LLAMA), str(file), str(port), str(num_threads)]
    with _running(command, core=None) as (process, log):
        yield _ready("llama.cpp", process, port, "/health", log)


@contextlib.contextmanager
def litellm_server(
    environment: Path, tiers: Mapping[str, str], *, core: int | None
) -> Iterator[Server]:
    """LiteLLM's proxy out of its own virtual environment: one worker, nothing but the proxying."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.yaml"
        config.write_text(_litellm_config(tiers), encoding="utf-8")
        command = [str(environment / "bin" / "litellm"), "--config", str(config)]
        command += ["--host", HOST, "--port", str(port), "--num_workers", "1"]
        command += ["--telemetry", "False"]
        variables = {
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it asks the network at its start
            "LITELLM_LOG": "ERROR",
            "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
        }
        with _running(command, core=core, variables=variables) as (process, log):
            yield _ready("litellm", process, port, "/health/liveliness", log)


def _litellm_config(tiers: Mapping[str, str]) -> str:
    lines = ["model_list:"]
    for name, url in tiers.items():
        lines += [f"  - model_name: {name}", "    litellm_params:"]
        lines += ["      model: openai/mock-model", f"      api_base: {url}", "      api_key: none"]
    lines += ["litellm_settings:", "  telemetry: false", ""]
    return "\n".join(lines)


@contextlib.contextmanager
def _running(
    command: Sequence[str],
    *,
    core: int | None,
    variables: Mapping[str, str] | None = None,
    root: Path = ROOT,
) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes]]]:
    """The program on its core, until the context ends; also its log."""
    places = os.pathsep.join((str(root / ".ci" / "src"), str(root)))
    with tempfile.TemporaryFile() as log:
        with without_engine_environment():
            process = subprocess.Popen(
                command,
                cwd=root,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | {"PYTHONPATH": places} | dict(variables or {}),
            )
        if core is not None:
            os.sched_setaffinity(process.pid, {core})
        try:
            yield process, log
        finally:
            process.terminate()
            try:
                process.wait(timeout=_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _ready(
    name: str, process: subprocess.Popen[bytes], port: int, path: str, log: IO[bytes]
) -> Server:
    """The server when it answers there. Raises SystemExit with its log where it does not."""
    server = Server(name=name, port=port, pid=process.pid)
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline_s and process.poll() is None:
        with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
            server.get(path)
            return server
        time.sleep(0.1)
    log.seek(0)
    console.print(log.read().decode(errors="replace")[-2000:], markup=False)
    raise SystemExit(f"{name} did not get ready; the end of its log is above")


def loop_lag(server: Server, *, key: str | None = None) -> dict[float, float]:
    """The gateway's event-loop lag so far: cumulated counts by upper bound in seconds."""
    pattern = re.compile(_LAG_METRIC + r'\{le="([^"]+)"\} (\S+)')
    found = pattern.findall(server.get("/metrics", key=key))
    return {float(bound): float(count) for bound, count in found}


def bucket_quantile(
    before: Mapping[float, float], after: Mapping[float, float], share: float
) -> float:
    """The bound below which that share of what came in between lies. Raises ValueError for none."""
    counts = {bound: after[bound] - before.get(bound, 0.0) for bound in sorted(after)}
    total = max(counts.values(), default=0.0)
    if total == 0:
        raise ValueError("nothing was measured in between")
    return next(bound for bound, count in counts.items() if count >= share * total)
