"""`outrider serve` as a real process over a tiny real pair: start, trouble, end."""

import contextlib
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from outrider.gateway.http.server.listening import listen, url_of
from outrider.gateway.settings.tree import SettingsError, load_settings
from outrider.gateway.wiring.serving import background_gateway
from tests.gateway.http.server.random_pair import pair
from tests.gateway.waiting import wait_for

__all__ = ["pair"]

ROOT = Path(__file__).parents[4]


@dataclass
class Gateway:
    """A gateway's process and where it listens."""

    process: subprocess.Popen[str]
    url: str
    banner: str

    def engine(self) -> psutil.Process:
        (child,) = psutil.Process(self.process.pid).children()
        return child

    def is_ready(self) -> bool:
        return httpx.get(f"{self.url}/ready").status_code == 200


@contextlib.contextmanager
def serving(pair: dict[str, Path], *arguments: str) -> Iterator[Gateway]:
    command = [sys.executable, "-m", "outrider.gateway.cli", "serve", "--port", "0"]
    command += ["--large", str(pair["large"]), "--small", str(pair["small"])]
    # Timing the passes would take longer than these tests.
    command += ["--num-threads", "1", "--set", "speculation.adaptive=false"]
    # A busy machine may take longer than a minute to start an engine again.
    command += ["--set", "engine.resume_within_s=600", *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        try:
            yield _started(process)
        finally:
            process.kill()


def _started(process: subprocess.Popen[str]) -> Gateway:
    assert process.stdout is not None
    assert process.stderr is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if "outrider chat" in line:
            found = re.search(r"http://\S+", lines[0])
            assert found
            return Gateway(process, found.group(), "".join(lines))
    raise AssertionError(process.stderr.read())


def body(max_tokens: int, **more: Any) -> dict[str, Any]:
    message = {"role": "user", "content": "Hello there"}
    greedy = {"model": "large", "messages": [message], "temperature": 0}
    return greedy | {"max_tokens": max_tokens} | more


def chunks(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


@pytest.mark.slow
def test_serve_answers_survives_its_engine_and_drains(pair: dict[str, Path]) -> None:
    with serving(pair) as gateway:
        assert "speculation on" in gateway.banner
        assert "float32 on cpu" in gateway.banner
        _answers_the_same_with_and_without_speculation(gateway)
        _survives_the_death_of_its_engine(gateway)
        _drains_on_sigterm(gateway)


def _answers_the_same_with_and_without_speculation(gateway: Gateway) -> None:
    url = f"{gateway.url}/v1/chat/completions"
    plain = body(40, outrider={"speculation": "off"})
    answers = [httpx.post(url, json=request, timeout=180).json() for request in (body(40), plain)]
    contents = [answer["choices"][0]["message"]["content"] for answer in answers]
    assert contents[0] == contents[1]
    assert answers[0]["outrider"]["drafted_tokens"] > 0
    assert answers[1]["outrider"]["drafted_tokens"] == 0


def _survives_the_death_of_its_engine(gateway: Gateway) -> None:
    dead = gateway.engine()
    url = f"{gateway.url}/v1/chat/completions"
    undisturbed = httpx.post(url, json=body(160), timeout=180).json()
    request = body(160, stream=True, stream_options={"include_usage": True})
    with httpx.stream("POST", url, json=request, timeout=180) as response:
        stream = chunks(response)
        begun = [next(stream)]
        dead.kill()
        wait_for(lambda: not gateway.is_ready())
        assert httpx.post(url, json=body(3), timeout=180).status_code == 200  # it has waited
        answer = begun + list(stream)
    deltas = [choice["delta"] for chunk in answer for choice in chunk["choices"]]
    text = "".join(delta.get("content") or "" for delta in deltas)
    assert text == undisturbed["choices"][0]["message"]["content"]
    assert answer[-1]["usage"]["completion_tokens"] == undisturbed["usage"]["completion_tokens"] > 0
    assert gateway.engine().pid != dead.pid
    assert httpx.post(url, json=body(3), timeout=180).status_code == 200


def _drains_on_sigterm(gateway: Gateway) -> None:
    """Check that running requests finish, no new one is accepted and nothing is left."""
    engine = gateway.engine()
    url = f"{gateway.url}/v1/chat/completions"
    request = body(80, stream=True, stream_options={"include_usage": True})
    with httpx.stream("POST", url, json=request, timeout=180) as response:
        stream = chunks(response)
        next(stream)
        gateway.process.send_signal(signal.SIGTERM)
        rest = list(stream)
    assert rest[-1]["usage"]["completion_tokens"] > 0
    assert any(c["choices"] and c["choices"][0]["finish_reason"] for c in rest)
    assert gateway.process.wait(timeout=120) == 0
    assert not engine.is_running()


@pytest.mark.slow
def test_a_second_signal_does_not_wait(pair: dict[str, Path]) -> None:
    with serving(pair, "--set", "speculation.enabled=false") as gateway:
        engine = gateway.engine()
        url = f"{gateway.url}/v1/chat/completions"
        with httpx.stream("POST", url, json=body(3500, stream=True), timeout=180) as response:
            next(chunks(response))
            gateway.process.send_signal(signal.SIGINT)
            time.sleep(0.2)
            gateway.process.send_signal(signal.SIGINT)
            gateway.process.wait(timeout=15)
        assert not engine.is_running()


@pytest.mark.slow
def test_a_signal_while_loading_ends_it(pair: dict[str, Path]) -> None:
    arguments = ["--large", str(pair["large"]), "--port", "0"]
    with subprocess.Popen(
        [sys.executable, "-m", "outrider.gateway.cli", "serve", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    ) as process:
        me = psutil.Process(process.pid)
        wait_for(lambda: bool(me.children()))
        (engine,) = me.children()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=120) == 0
        assert not engine.is_running()


def run_serve(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "outrider.gateway.cli", "serve", "--port", "0", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, timeout=180, check=False
    )


@pytest.mark.slow
def test_a_model_that_is_not_there_ends_it_with_a_sentence(tmp_path: Path) -> None:
    result = run_serve(["--large", str(tmp_path / "nothing")])
    assert result.returncode == 2
    assert "no such folder" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_the_gateways_process_does_without_torch(pair: dict[str, Path]) -> None:
    script = """
import sys
from outrider.gateway.wiring.build import build_client, build_parts
from outrider.gateway.wiring.start import keep_torch_out
from outrider.gateway.settings.tree import load_settings
keep_torch_out()
import outrider.gateway.wiring.serving
settings = load_settings(environ={}, flags={"models.large": sys.argv[1]})
parts = build_parts(settings, build_client(settings))
assert parts.tokenizers["large"].stop_token_ids
assert sys.modules["torch"] is None
"""
    subprocess.run([sys.executable, "-c", script, str(pair["large"])], check=True, cwd=ROOT)


@pytest.mark.slow
def test_a_private_gateway_lives_as_long_as_its_block(pair: dict[str, Path]) -> None:
    flags = {
        "models.large": str(pair["large"]),
        "models.small": str(pair["small"]),
        "speculation.adaptive": False,
        "engine.process": False,
        "engine.num_threads": 1,
    }
    stages: list[str] = []
    settings = load_settings(environ={}, flags=flags)
    with background_gateway(settings, lambda stage, fraction: stages.append(stage)) as url:
        answer = httpx.post(f"{url}/v1/chat/completions", json=body(5), timeout=180)
        assert answer.status_code == 200
    assert "loading the large model" in stages
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)


def test_a_private_gateway_that_cannot_start_says_why(tmp_path: Path) -> None:
    settings = load_settings(
        environ={}, flags={"models.large": str(tmp_path / "nothing"), "engine.process": False}
    )
    with (
        pytest.raises(SettingsError, match="no such folder"),
        background_gateway(settings, lambda stage, fraction: None),
    ):
        pass


def test_listen_takes_ipv6_and_tells_the_url() -> None:
    with listen("127.0.0.1", 0) as listener:
        assert url_of(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"
    with listen("0.0.0.0", 0) as listener:
        assert url_of(listener).startswith("http://127.0.0.1:")
    if Path("/proc/net/if_inet6").exists() and Path("/proc/net/if_inet6").read_text():
        with listen("::1", 0) as listener:
            assert url_of(listener).startswith("http://[::1]:")
    with pytest.raises(SettingsError, match="cannot listen on"):
        listen("203.0.113.1", 0)
