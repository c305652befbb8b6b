"""The hybrid demo: its verdict on a device that keeps its word or does not, and the real one."""

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import pytest
from rich.console import Console
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from benchmarks.shared.mock_upstream import MockScript, mock_in_thread
from benchmarks.shared.toxics import Toxic
from outrider.gateway.tools.demo import hybrid as demo_hybrid
from outrider.gateway.tools.demo.hybrid import Cloud, DeviceApp, HybridQuestion, HybridReply
from outrider.gateway.tools.demo.process import GatewayProcess
from tests.gateway.conftest import running


@dataclass
class Device:
    """Answers like a device whose cloud is there or not."""

    is_cloud_up: bool = True
    refuses: str = ""
    is_silent: bool = False
    breaks_off: bool = False
    url: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)

    async def answer(self, request: Request) -> Response:
        body = await request.json()
        self.asked.append(body)
        if self.refuses and self.refuses in body["messages"][0]["content"]:
            return JSONResponse({"error": {"message": "Nobody can answer."}}, 503)
        return StreamingResponse(self._events(body), media_type="text/event-stream")

    async def _events(self, body: dict[str, Any]) -> Any:
        options = body.get("outrider", {})
        is_wanted = options.get("policy") == "prefer_cloud" and "privacy" not in options
        for piece in [""] if self.is_silent else ["It ", "is ", "nine", "."]:
            yield _event(delta={"content": piece})
        if self.breaks_off and is_wanted and not self.is_cloud_up:
            return  # in the answer that it was cut in, or later
        report = {
            "tier": "cloud" if is_wanted and self.is_cloud_up else "small",
            "reason": "policy: prefer_cloud" if is_wanted else "router: easy",
            "degraded": is_wanted and not self.is_cloud_up,
        }
        yield _event(delta={}, finish_reason="stop", outrider=report)
        yield b"data: [DONE]\n\n"

    async def metrics(self, _: Request) -> Response:
        name = 'outrider_upstream_breaker_state{replica="a:1",state="%s",tier="cloud"}'
        samples = [f"{name % 'closed'} {float(self.is_cloud_up)}"]
        samples.append(f"{name % 'half_open'} {float(not self.is_cloud_up)}")
        return PlainTextResponse("\n".join(samples) + "\n")

    def cut(self) -> None:
        assert self.is_cloud_up
        self.is_cloud_up = False

    def restore(self) -> None:
        assert not self.is_cloud_up
        self.is_cloud_up = True


def _event(outrider: Any = None, **choice: Any) -> bytes:
    chunk = {"id": "c", "object": "chat.completion.chunk", "created": 0, "model": "auto"}
    chunk["choices"] = [{"index": 0, "finish_reason": None, **choice}]
    if outrider:
        chunk["outrider"] = outrider
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    monkeypatch.setattr(demo_hybrid, "_PAUSE_S", 0.01)
    monkeypatch.setattr(demo_hybrid, "_BACK_TIMEOUT_S", 0.1)
    device = Device()
    routes = [
        Route("/v1/chat/completions", device.answer, methods=["POST"]),
        Route("/metrics", device.metrics),
    ]
    with running(Starlette(routes=routes)) as device.url:
        yield device


def run(device: Device) -> tuple[int, str]:
    output = io.StringIO()
    console = Console(file=output, width=200, highlight=False)
    cloud = Cloud(cut=device.cut, restore=device.restore)
    status = demo_hybrid.run(console, device.url, cloud)
    return status, output.getvalue()


def test_all_answered(device: Device) -> None:
    status, text = run(device)
    assert status == 0
    assert f"All {len(device.asked)} questions were answered." in text
    assert "degraded" in text
    assert "privacy: private" in text
    assert "The breaker of the cloud is half-open." in text
    assert "The breaker is closed." in text
    assert device.is_cloud_up


def test_it_is_cut_in_the_middle_of_an_answer(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_asked = []

    def cut() -> None:
        num_asked.append(len(device.asked))
        Device.cut(device)

    monkeypatch.setattr(device, "cut", cut)
    assert run(device)[0] == 0
    assert device.asked[num_asked[0] - 1]["messages"][0]["content"] == demo_hybrid.LONG.prompt


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    "fault", [{"refuses": "weekday"}, {"is_silent": True}, {"breaks_off": True}]
)
def test_a_question_without_an_answer_fails(device: Device, fault: dict[str, Any]) -> None:
    for name, value in fault.items():
        setattr(device, name, value)
    status, text = run(device)
    assert status == 1
    assert "Not answered" in text
    assert "nobody" in text


def test_a_cloud_that_stays_away_fails(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "restore", lambda: None)
    status, text = run(device)
    assert status == 1
    assert "did not come back" in text


def test_a_wrong_answer_is_marked_with_the_right_one() -> None:
    question = demo_hybrid.RETURN
    text = io.StringIO()
    replies = [
        HybridReply(question=question, text=f"by steps\nAnswer: {said}.", finish_reason="stop")
        for said in ("8743", "8843")
    ]
    Console(file=text, width=120).print(demo_hybrid.table("title", replies))
    assert text.getvalue().count("wrong, it is 8743") == 1


def test_an_answer_whose_connection_breaks_is_an_error_of_its_own() -> None:
    toxic = Toxic(kind="half_closed", after_events=1)
    with (
        mock_in_thread(MockScript(toxic=toxic)) as mock,
        openai.OpenAI(base_url=mock.url, api_key="none", max_retries=0) as client,
    ):
        reply = DeviceApp(client).ask(HybridQuestion(prompt="Hi"))
    assert reply.text
    assert reply.error
    assert not reply.is_answered


@pytest.mark.slow
def test_a_gateway_that_does_not_start_is_explained(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(demo_hybrid, "_EXAMPLES", tmp_path)
    assert demo_hybrid.main([]) == 1
    assert "the gateway did not start" in capsys.readouterr().out


@pytest.mark.slow
def test_a_gateway_comes_back_at_the_same_address() -> None:
    models = ("--large", "none", "--small", "none")
    with GatewayProcess([*models, "--tier", "cloud=http://127.0.0.1:9/v1"]) as gateway:
        url = gateway.start()
        gateway.kill()
        assert gateway.start() == url


@pytest.mark.long
def test_the_demo_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo_hybrid.main([]) == 0
    text = capsys.readouterr().out
    assert "questions were answered" in text
    assert "degraded" in text
