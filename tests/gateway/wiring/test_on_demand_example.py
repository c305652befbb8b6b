"""docs/models.md: its models on demand, with real processes."""

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from typer.testing import CliRunner

from outrider.gateway.cli import app
from outrider.gateway.tools.demo.process import GatewayProcess
from tests.engines import PAIR_FOLDER
from tests.gateway.waiting import wait_for

ROOT = Path(__file__).parents[3]
SECTION = (ROOT / "docs" / "models.md").read_text("utf-8").partition("## Models on demand")[2]
TOKEN = "0123456789abcdef0123456789abcdef"
CHAT = {"messages": [{"role": "user", "content": "What is 17 + 25?"}], "max_tokens": 8}


def block(kind: str) -> str:
    """The section's first block of a kind."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", SECTION, re.DOTALL | re.MULTILINE)
    return next(text for its_kind, text in blocks if its_kind == kind)


@pytest.fixture
def gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GatewayProcess]:
    """The example's gateway, with memory for one of its two models."""
    (tmp_path / "outrider.toml").write_text(block("toml"))
    for name, tier in (("coder", "large"), ("writer", "small")):
        (tmp_path / name).symlink_to(PAIR_FOLDER / tier)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    arguments = ["--config", "outrider.toml", "--set", f"keys.admin_token={TOKEN}"]
    arguments += ["--set", "keys.mode=off", "--set", "on_demand.memory_gib=3"]
    arguments += ["--set", "engine.device=cpu", "--set", "engine.num_threads=1"]
    with GatewayProcess(arguments) as process:
        yield process


def runs(process: psutil.Process) -> bool:
    """Return whether it still does anything; one that nobody has waited for does not."""
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


@pytest.mark.slow
def test_the_example_answers_with_either_model_and_leaves_no_process(
    gateway: GatewayProcess,
) -> None:
    others = set(psutil.Process().children(recursive=True))  # of earlier tests
    url = gateway.start()

    def states() -> dict[str, str]:
        cards = httpx.get(f"{url}/v1/models", timeout=60).json()["data"]
        return {card["id"]: card["outrider"][0]["state"] for card in cards if "/" not in card["id"]}

    def ask(model: str) -> None:
        body = {**CHAT, "model": model}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=300)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] > 0

    ask("coder")
    assert states()["coder"] == "loaded"
    ask("write")
    assert (states()["coder"], states()["writer"]) == ("unloaded", "loaded")
    for line in block("").splitlines():
        command = line.partition("#")[0].split()[1:]
        result = CliRunner().invoke(app, [*command, "--url", url, "--key", TOKEN])
        assert result.exit_code == 0, result.output
    assert set(states().values()) == {"unloaded"}
    ask("writer")
    children = set(psutil.Process().children(recursive=True)) - others
    assert len(children) >= 3  # the gateway, the model's process, its engine's
    gateway.kill()
    wait_for(lambda: not any(runs(each) for each in children), 60)
