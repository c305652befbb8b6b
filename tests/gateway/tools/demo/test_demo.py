"""The demo's verdict, against a scripted gateway that keeps its word or does not."""

import io

import pytest
from rich.console import Console

from outrider.engine.request import EngineRequest
from outrider.gateway.settings.sections import bundled_pair
from outrider.gateway.tools.demo import comparing
from outrider.gateway.tools.demo import pair as demo
from tests.gateway.conftest import Server
from tests.gateway.scripted_client import Script, Step


@pytest.fixture(autouse=True)
def short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparing, "MAX_TOKENS", 20)  # the scripted gateway's context is small


@pytest.fixture
def output() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def console(output: io.StringIO) -> Console:
    return Console(file=output, width=200, highlight=False)


def test_equal_answers_pass(server: Server, console: Console, output: io.StringIO) -> None:
    server.says("The quick brown fox jumps over the lazy dog.", group=3)
    assert demo.run(console, server.url) == 0
    text = output.getvalue()
    assert "token for token the same" in text
    assert text.count("yes") == len(demo.FRESH) + 1
    assert f"0 of {len(demo.ROUTED)} answers are right" in text
    assert "no: 8743" in text
    asked = [r for r in server.engine.submitted if r.sampling.temperature > 0]
    assert {request.sampling.seed for request in asked} == {1234}
    assert [request.speculation.enabled for request in asked] == [True, False]


def test_a_right_answer_is_marked(server: Server, console: Console, output: io.StringIO) -> None:
    server.says("Answer: 71.")
    demo.run(console, server.url)
    assert f"1 of {len(demo.ROUTED)} answers are right" in output.getvalue()


def test_no_question_is_asked_twice_with_speculation() -> None:
    prompts = [question.prompt for question in (*demo.ROUTED, *demo.FRESH, demo.SAMPLED)]
    assert len(set(prompts)) == len(prompts)


@pytest.mark.slow
def test_the_grown_pair_answers_all_questions(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparing, "MAX_TOKENS", 400)
    assert demo.main([]) == 0
    printed = capsys.readouterr().out
    assert f"{len(demo.ROUTED)} of {len(demo.ROUTED)} answers are right" in printed, printed
    assert "no: " not in printed


def test_one_different_token_fails(server: Server, console: Console, output: io.StringIO) -> None:
    same, other = server.encode("The quick brown fox"), server.encode("The quick brown dog")

    def script(request: EngineRequest) -> Script:
        ids = same if request.speculation.enabled else other
        return Script(steps=[Step(token_ids=(token_id,)) for token_id in ids])

    server.engine.script = script
    assert demo.run(console, server.url) == 1
    assert "Not equal" in output.getvalue()
    assert "brown dog" in output.getvalue()


def test_the_same_text_from_other_tokens_fails(server: Server, console: Console) -> None:
    """Equality is of tokens: one token for `Hello` is not the tokens of its letters."""
    whole = server.encode("Hello")
    letters = [token_id for letter in "Hello" for token_id in server.encode(letter)]
    assert whole != letters

    def script(request: EngineRequest) -> Script:
        ids = whole if request.speculation.enabled else letters
        return Script(steps=[Step(token_ids=(token_id,)) for token_id in ids])

    server.engine.script = script
    assert demo.run(console, server.url) == 1


def test_an_empty_answer_fails(server: Server, console: Console, output: io.StringIO) -> None:
    server.engine.script = lambda _: Script()
    assert demo.run(console, server.url) == 1
    assert "No answer" in output.getvalue()


@pytest.mark.slow
def test_a_gateway_that_does_not_start_is_explained(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "kept_pair", lambda report: bundled_pair())
    assert demo.main(["--device", "gpu"]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "the gateway did not start" in printed
    assert "engine.device (flag --device) = 'gpu'" in printed


def test_long_texts_are_shortened_at_a_sensible_place() -> None:
    text = "first line\n" + "middle " * 30 + "\nAnswer: 42."
    short = str(comparing.short_answer(text))
    assert short.startswith("first line / middle")
    assert short.endswith("Answer: 42.")
    assert len(short) <= 65
    assert str(comparing.short_answer("Answer: 1.\n")) == "Answer: 1."
