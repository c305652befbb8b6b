"""The scripts of examples/clients, as users run them, against a gateway on the shipped pair."""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from outrider.gateway.cli import app as cli
from tests.gateway.waiting import wait_for

ROOT = Path(__file__).parents[4]
EXAMPLES = ROOT / "examples" / "clients"
LIMIT = 50_000


@dataclass(frozen=True)
class Running:
    """A gateway with keys."""

    url: str
    database_url: str

    def new_key(self, *flags: str) -> str:
        """A key, made as an operator makes one."""
        create = ["keys", "create", "--json", "--name", "k", *flags]
        made = CliRunner().invoke(cli, [*create, "--database-url", self.database_url])
        assert made.exit_code == 0, made.output
        key: str = json.loads(made.stdout)["key"]
        return key

    def run(self, script: str) -> dict[str, str]:
        """Return what a script prints, by the topic of each line."""
        limited = self.new_key("--requests-per-minute", "1")
        environ = {
            **os.environ,
            "OUTRIDER_URL": self.url,
            "OUTRIDER_KEY": self.new_key("--tokens-per-minute", str(LIMIT)),
            "LIMITED_KEY": limited,
        }
        wait_for(
            lambda: (
                httpx.get(f"{self.url}/v1/models", headers={"x-api-key": limited}).status_code
                == 200
            )
        )
        command = [sys.executable, "-W", "error", str(EXAMPLES / script)]
        ran = subprocess.run(
            command, capture_output=True, text=True, env=environ, timeout=280, check=False
        )
        assert (ran.returncode, ran.stderr) == (0, ""), ran.stderr
        return dict(line.split(": ", 1) for line in ran.stdout.splitlines() if ": " in line)


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    """One process for all scripts."""
    with tempfile.TemporaryDirectory() as folder:
        database_url = f"sqlite:///{folder}/outrider.db"
        command = [sys.executable, "-m", "outrider.gateway.cli", "serve", "--port", "0"]
        command += ["--large", "demo", "--small", "demo"]
        command += ["--num-threads", "1", "--set", "speculation.adaptive=false"]
        command += ["--set", f"database_url={database_url}", "--set", "keys.mode=required"]
        command += ["--set", "keys.refresh_s=0.05", "--set", "ledger.flush_ms=10"]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
        ) as process:
            try:
                assert process.stdout is not None
                line = next((line for line in process.stdout if "http://" in line), "")
                found = re.search(r"http://[\d.:]+", line)
                assert found, process.stderr and process.stderr.read()
                wait_for(lambda: httpx.get(f"{found.group()}/ready").status_code == 200)
                yield Running(found.group(), database_url)
            finally:
                process.kill()


@pytest.mark.slow
def test_openai(running: Running) -> None:
    told = running.run("openai_client.py")
    assert told["chat"]
    assert re.fullmatch(r"(small|large) because .+", told["tier"])
    assert re.match(r"[1-9]\d* tokens, \S", told["stream"])
    assert told["tool"] == "add({'a': 48, 'b': 37}) = 85"
    assert "after the tool" in told
    assert told["structured"] == "name='Ines' city='Athens' age=41"
    assert "wrong" not in told["chat"] + told["response"]
    assert re.match(r"(completed|incomplete) \S", told["response"])
    assert re.match(r"[1-9]\d* tokens, \S", told["response stream"])
    assert told["x-ratelimit-limit-tokens"] == str(LIMIT)
    assert 0 < int(told["x-ratelimit-remaining-tokens"]) < LIMIT
    assert re.fullmatch(r"[\dhms.]+", told["x-ratelimit-reset-tokens"])
    assert told["completion"] == "chatcmpl"
    assert re.fullmatch(r"[1-9]\d* requests", told["usage"])
    assert re.fullmatch(r"AuthenticationError 401 invalid_api_key req-\w+", told["authentication"])
    assert re.fullmatch(r"NotFoundError 404 model_not_found req-\w+", told["not found"])
    assert told["bad request"].startswith("BadRequestError 400 ")
    waits = re.fullmatch(r"RateLimitError rate_limit_exceeded again in (\d+) s", told["rate limit"])
    assert waits
    assert 1 <= int(waits[1]) <= 61


@pytest.mark.slow
def test_anthropic(running: Running) -> None:
    told = running.run("anthropic_client.py")
    assert re.match(r"(end_turn|max_tokens) \S", told["message"])
    assert re.fullmatch(r"[1-9]\d* in, [1-9]\d* out", told["tokens"])
    assert re.match(r"[1-9]\d* tokens, \S", told["stream"])
    assert re.fullmatch(r"add\(\{'a': -?\d+, 'b': -?\d+\}\) = -?\d+", told["tool"])
    assert "after the tool" in told
    assert re.fullmatch(r"[1-9]\d* tokens", told["prompt"])
    assert told["x-ratelimit-limit-tokens"] == str(LIMIT)
    assert 0 < int(told["x-ratelimit-remaining-tokens"]) < LIMIT
    assert told["request id"] == "req"
    assert told["authentication"] == "AuthenticationError 401 authentication_error"
    assert told["not found"] == "NotFoundError 404 not_found_error"
    assert re.fullmatch(r"RateLimitError again in \d+ s", told["rate limit"])
