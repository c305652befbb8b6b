"""Libraries do what their users do first: an answer, a stream, a tool, an object."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from tests.gateway.clients.conftest import Run
from tests.gateway.clients.report import Report

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]

DID: Final = "an answer, a stream, one tool round, an object by its schema"
GOT: Final[dict[str, Any]] = {
    "chat": "Hello there!",
    "stream": "Hello there!",
    "tool": "It is 7 degrees in Oslo.",
    "object": {"city": "Oslo"},
}
PYTHON: Final = {
    "openai": ("openai", "3.57.0", ""),
    "anthropic": ("anthropic", "2.14.0", ""),
    "openai_agents": ("openai-agents", "0.24.0", ""),
    "langchain_openai": ("langchain-openai", "1.7.4", ""),
    "llama_index": ("llama-index-llms-openai-like", "0.8.1", ""),
    "ollama": ("ollama", "0.6.3", ""),
    "pydantic_ai": ("pydantic-ai-slim", "2.68.0", "[openai]"),
}
"""Package, version and extras by program."""
INSPECT: Final = "0.3.285"
AI_SDK: Final = "6.0.326"
Install = Callable[[str], Path]


@pytest.mark.parametrize("name", PYTHON)
def test_python(
    name: str, scripted_url: str, pip: Install, programs: Path, run: Run, report: Report
) -> None:
    package, version, extras = PYTHON[name]
    python = pip(f"{package}{extras}=={version}") / "python"
    ran = run(python, programs / f"use_{name}.py", env={"OUTRIDER_URL": scripted_url})
    assert ran.status == 0, ran.text
    assert ran.last_json == GOT
    report.add(package, version, DID)


def test_inspect_ai(
    scripted_url: str, pip: Install, programs: Path, run: Run, report: Report
) -> None:
    python = pip(f"inspect-ai=={INSPECT} openai=={PYTHON['openai'][1]}") / "python"
    ran = run(python, programs / "use_inspect_ai.py", env={"OUTRIDER_URL": scripted_url})
    assert ran.status == 0, ran.text
    assert ran.last_json == {"status": "success", "accuracy": 1.0}
    report.add("inspect-ai", INSPECT, "a task, generated and scored")


def test_ai_sdk(scripted_url: str, npm: Install, programs: Path, run: Run, report: Report) -> None:
    modules = npm(f"ai@{AI_SDK} @ai-sdk/openai-compatible zod")
    program = modules.parent / "use_ai_sdk.mjs"
    program.write_text((programs / "use_ai_sdk.mjs").read_text())
    ran = run("node", program, env={"OUTRIDER_URL": scripted_url})
    assert ran.status == 0, ran.text
    assert ran.last_json == GOT
    report.add("Vercel AI SDK", AI_SDK, DID)
