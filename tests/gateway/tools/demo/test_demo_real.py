"""`make demo-real`: its table and its verdict, against a scripted gateway."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from outrider.engine.request import EngineRequest
from outrider.gateway.tools.demo import real
from outrider.gateway.tools.demo.real_prompts import REAL_PROMPTS, RealPrompt
from tests.gateway.conftest import Server
from tests.gateway.scripted_client import Script, Step

SHORT = tuple(
    RealPrompt(kind=kind, prompt=f"Write a {kind}.", max_tokens=20) for kind in ("list", "story")
)


@pytest.fixture
def output(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    monkeypatch.setattr(real, "REAL_PROMPTS", SHORT)  # the scripted gateway's context is small
    return io.StringIO()


def ask_all(server: Server, output: io.StringIO) -> int:
    return real.run(Console(file=output, width=200, highlight=False), server.url)


def test_each_prompt_is_shown_with_its_answer(server: Server, output: io.StringIO) -> None:
    server.says("The quick brown fox jumps over the lazy dog.", group=3)
    assert ask_all(server, output) == 0
    text = output.getvalue()
    assert "list: Write a list." in text
    assert "story: Write a story." in text
    assert text.count("The quick brown fox") == len(SHORT)
    assert "token for token the same" in text
    asked = [r for r in server.engine.submitted if r.sampling.max_tokens == 20]
    assert [request.speculation.enabled for request in asked] == [True, False] * len(SHORT)
    assert {request.sampling.temperature for request in asked} == {0.0}


def test_a_changed_token_fails(server: Server, output: io.StringIO) -> None:
    same, other = server.encode("The quick brown fox"), server.encode("The quick brown dog")

    def script(request: EngineRequest) -> Script:
        ids = same if request.speculation.enabled else other
        return Script(steps=[Step(token_ids=(token_id,)) for token_id in ids])

    server.engine.script = script
    assert ask_all(server, output) == 1
    assert "Not equal" in output.getvalue()


def test_an_empty_answer_fails(server: Server, output: io.StringIO) -> None:
    server.engine.script = lambda _: Script()
    assert ask_all(server, output) == 1
    assert "No answer came to: list, story" in output.getvalue()


def test_ten_different_prompts_of_ten_kinds() -> None:
    assert len({one.kind for one in REAL_PROMPTS}) == 10
    assert len({one.prompt for one in REAL_PROMPTS}) == 10
    assert max(one.max_tokens for one in REAL_PROMPTS) <= 200


def test_a_model_that_cannot_be_fetched_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert real.main([]) == 1
    assert "The demo failed" in capsys.readouterr().out
