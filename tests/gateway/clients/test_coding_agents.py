"""Coding agents run a command that the model asks for and say what it printed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from tests.gateway.clients.conftest import Run
from tests.gateway.clients.report import Report
from tests.gateway.clients.scripted_model import WORD

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]

ASKED: Final = "Run echo and say what it prints"
SAID: Final = f"The command printed {WORD}."
TOOL_ROUND: Final = "a question, one round of its shell tool, the answer"
CLAUDE: Final = "2.1.197"
CODEX: Final = "0.171.0"
OPENCODE: Final = "1.18.33"
AIDER: Final = "0.86.2"
Install = Callable[[str], Path]


def claude_settings(url: str) -> dict[str, str]:
    return {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": "none", "ANTHROPIC_MODEL": "auto"}


def test_claude_code(scripted_url: str, npm: Install, run: Run, report: Report) -> None:
    claude = npm(f"@anthropic-ai/claude-code@{CLAUDE}") / ".bin/claude"
    ran = run(claude, "-p", ASKED, "--allowedTools", "Bash", env=claude_settings(scripted_url))
    assert (ran.status, ran.text.strip()) == (0, SAID)
    report.add("Claude Code", CLAUDE, TOOL_ROUND)


def test_claude_code_says_that_a_prompt_is_too_long(pair_url: str, npm: Install, run: Run) -> None:
    claude = npm(f"@anthropic-ai/claude-code@{CLAUDE}") / ".bin/claude"
    ran = run(claude, "-p", ASKED, env=claude_settings(pair_url))
    assert ran.status != 0
    assert "prompt is too long" in ran.text.lower()


def test_codex(scripted_url: str, npm: Install, run: Run, report: Report, tmp_path: Path) -> None:
    codex = npm(f"@openai/codex@{CODEX}") / ".bin/codex"
    home = tmp_path / "codex"
    home.mkdir()
    (home / "config.toml").write_text(
        'model = "auto"\nmodel_provider = "outrider"\n\n[model_providers.outrider]\n'
        f'name = "Outrider"\nbase_url = "{scripted_url}/v1"\nwire_api = "responses"\n'
    )
    options = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
    ran = run(codex, "exec", *options, ASKED, env={"CODEX_HOME": str(home)})
    assert ran.status == 0, ran.text
    assert ran.text.strip().endswith(SAID)
    report.add("Codex CLI", CODEX, TOOL_ROUND)


def test_opencode(
    scripted_url: str, npm: Install, run: Run, report: Report, tmp_path: Path
) -> None:
    opencode = npm(f"opencode-ai@{OPENCODE}") / ".bin/opencode"
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{scripted_url}/v1", "apiKey": "none"},
        "models": {"auto": {"name": "auto"}},
    }
    settings = {
        "provider": {"outrider": provider},
        "model": "outrider/auto",
        "small_model": "outrider/auto",
        "autoupdate": False,
        "permission": {"bash": "allow"},
    }
    (tmp_path / "opencode.json").write_text(json.dumps(settings))
    ran = run(opencode, "run", ASKED, env={})
    assert ran.status == 0, ran.text
    assert ran.text.strip().endswith(SAID)
    report.add("opencode", OPENCODE, TOOL_ROUND)


def test_aider(scripted_url: str, pip: Install, run: Run, report: Report) -> None:
    aider = pip(f"aider-chat=={AIDER}") / "aider"
    options = ("--no-git", "--yes-always", "--no-check-update", "--no-show-model-warnings")
    env = {"OPENAI_API_BASE": f"{scripted_url}/v1", "OPENAI_API_KEY": "none"}
    ran = run(aider, "--model", "openai/auto", *options, "--message", "Say hello", env=env)
    assert ran.status == 0, ran.text
    assert "Hello there!" in ran.text
    report.add("aider", AIDER, "a question, the streamed answer")
