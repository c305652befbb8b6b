"""Real questions to a gateway over a scripted large model: what came back, how, and when."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import httpx
import msgspec

from benchmarks.routing.real_questions import RealQuestion
from benchmarks.shared.harness import progress_bar
from benchmarks.shared.mock_upstream import MockRequest, MockScript
from benchmarks.shared.upstream_servers import Server

Way = Literal["kept", "handed over", "at once"]
WAYS: Final[tuple[Way, ...]] = ("kept", "handed over", "at once")
_READY_S: Final = 120.0
_TIMEOUT_S: Final = 120.0
# On a busy machine as many tokens are held as on a quiet one.
_HOLD_BACK_MS: Final = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RealAnswer:
    """An answer as a client sees it, with its report."""

    way: Way
    text: str
    first_s: float
    """Until the first text."""
    whole_s: float
    num_tokens: int
    tokens: tuple[str, ...]
    """With their log-probabilities, where these were asked for."""
    logprobs: tuple[float, ...]
    held_tokens: int
    discarded_tokens: int
    confidence: float | None
    reason: str


def scripted(
    questions: Sequence[RealQuestion], *, max_words: int, first_token_s: float, gap_s: float
) -> Callable[[MockRequest], MockScript]:
    """Return a large model that writes each question's reference, a word at a time."""
    pieces = {
        question.prompt: tuple(_words(question.reference)[:max_words]) for question in questions
    }

    def script(request: MockRequest) -> MockScript:
        return MockScript(
            pieces=pieces[request.document["messages"][-1]["content"]],
            first_token_delay_s=first_token_s,
            gap_s=gap_s,
        )

    return script


def _words(text: str) -> list[str]:
    """Split a text into words with the white space in front of them."""
    pieces: list[str] = []
    for char in text:
        if not pieces or (char.isspace() and not pieces[-1].isspace()):
            pieces.append(char)
        else:
            pieces[-1] += char
    return pieces


def wait_for_small(server: Server) -> None:
    """Wait until the small model answers: with an upstream tier the gateway is ready before."""
    deadline_s = time.monotonic() + _READY_S
    body = {"model": "small", "prompt": "A", "max_tokens": 8}
    while httpx.post(f"{server.url}/completions", json=body, timeout=_TIMEOUT_S).is_error:
        if time.monotonic() > deadline_s:
            raise SystemExit("the small model did not get ready")
        time.sleep(0.2)


def ask_all(
    server: Server, questions: Sequence[RealQuestion], *, model: str, max_tokens: int
) -> list[RealAnswer]:
    """Ask one question after the other."""
    answers = []
    with progress_bar(model, len(questions)) as advance, httpx.Client(timeout=_TIMEOUT_S) as client:
        for question in questions:
            answers.append(_ask(client, server, question, model=model, max_tokens=max_tokens))
            advance(answers[-1].way)
    return answers


def _ask(
    client: httpx.Client, server: Server, question: RealQuestion, *, model: str, max_tokens: int
) -> RealAnswer:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question.prompt}],
        "temperature": 0,
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        "logprobs": model == "small",
        "outrider": {"hold_back_ms": _HOLD_BACK_MS},
    }
    sent_s = time.perf_counter()
    with client.stream("POST", f"{server.url}/chat/completions", json=body) as response:
        response.raise_for_status()
        lines = [
            (time.perf_counter() - sent_s, line)
            for line in response.iter_lines()
            if line.startswith("data: {")
        ]
    return _answer_of([(at_s, msgspec.json.decode(line[6:])) for at_s, line in lines])


def _answer_of(events: Sequence[tuple[float, Mapping[str, Any]]]) -> RealAnswer:
    texts, tokens = list[tuple[float, str]](), list[Mapping[str, Any]]()
    for at_s, event in events:
        for choice in event["choices"]:
            if text := choice["delta"].get("content"):
                texts.append((at_s, text))
            told = choice.get("logprobs") or {}
            tokens += told.get("content") or ()
    last = events[-1][1]
    report, usage = last["outrider"], last["usage"]
    return RealAnswer(
        way=_way_of(report),
        text="".join(text for _, text in texts),
        first_s=texts[0][0] if texts else events[-1][0],
        whole_s=events[-1][0],
        num_tokens=usage["completion_tokens"],
        tokens=tuple(token["token"] for token in tokens),
        logprobs=tuple(token["logprob"] for token in tokens),
        held_tokens=report["held_tokens"],
        discarded_tokens=report["discarded_tokens"],
        confidence=report["confidence"],
        reason=report["reason"],
    )


def _way_of(report: Mapping[str, Any]) -> Way:
    if report["tier"] == "small":
        return "kept"
    return "handed over" if report["escalated"] else "at once"
