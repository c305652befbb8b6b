"""Answers of `outrider chat` as they come from a server: whole, broken off, stopped, refused."""

import asyncio
import io
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from rich.console import Console
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from benchmarks.shared.mock_upstream import MockScript, MockThread, mock_in_thread
from benchmarks.shared.toxics import Toxic, ToxicKind
from outrider.gateway.tools.commands.chat_options import ChatOptions
from outrider.gateway.tools.commands.terminal_chat import (
    ChatAnswer,
    Gateway,
    converse,
    is_reachable,
)
from outrider.gateway.tools.commands.user_errors import ChatError
from tests.gateway.conftest import running

HELLO = MockScript(pieces=("Hello", " there"))


class RawGateway:
    """Answers every request with `response`, and keeps the requests."""

    def __init__(self) -> None:
        self.response = Response()
        self.requests: list[Request] = []
        self.gateway = Gateway(url="")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            self.requests.append(Request(scope))
            await self.response(scope, receive, send)


@pytest.fixture(scope="module")
def served() -> Iterator[RawGateway]:
    app = RawGateway()
    with running(app) as url:
        app.gateway = Gateway(url=url)
        yield app


@pytest.fixture
def raw(served: RawGateway) -> RawGateway:
    served.requests.clear()
    return served


def answer_of(gateway: Gateway) -> ChatAnswer:
    """Return what is understood of an answer. Raises ChatError."""
    answer = ChatAnswer()

    async def read() -> None:
        async for _ in gateway.stream(ChatOptions().body([]), answer):
            pass

    asyncio.run(read())
    return answer


@pytest.fixture
def mock() -> Iterator[MockThread]:
    with mock_in_thread(HELLO) as mock:
        yield mock


def gateway_at(mock: MockThread) -> Gateway:
    return Gateway(url=mock.url.removesuffix("/v1"), key="se cret")


def test_events_are_read_however_a_server_writes_them(raw: RawGateway) -> None:
    said = "\N{LINE SEPARATOR}a\N{NEXT LINE}b"
    chunk = f'{{"choices":[{{"delta":{{"content":"{said}"}}}}]}}'.encode()
    raw.response = Response(b": ping\r\n\r\ndata:" + chunk + b"\r\n\r\ndata: [DONE]\r\n\r\n")
    assert answer_of(raw.gateway).text == said


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (b"", "closed before the answer was complete"),
        (b'data: {"choices":[]}\n\n', "closed before the answer was complete"),
        (b"data: <html>\n\n", "not JSON"),
        (b'data: {"error":{"message":"It died."}}\n\n', "It died."),
        (b'data: {"error":"It died."}\n\n', "It died."),
    ],
)
def test_a_stream_that_ends_badly_is_an_error(raw: RawGateway, body: bytes, complaint: str) -> None:
    raw.response = Response(body)
    with pytest.raises(ChatError, match=complaint):
        answer_of(raw.gateway)


@pytest.mark.parametrize(
    ("kind", "after_events", "complaint"),
    [
        ("half_closed", 1, "closed before the answer was complete"),
        ("reset", 1, "broke|closed before"),
        ("reset", 0, "the connection to http://127.0.0.1:.* broke: "),
    ],
)
def test_a_connection_that_breaks_is_an_error(
    mock: MockThread, kind: ToxicKind, after_events: int, complaint: str
) -> None:
    toxic = Toxic(kind=kind, after_events=after_events)
    mock.script = MockScript(pieces=("One ", "two ", "three"), toxic=toxic)
    with pytest.raises(ChatError, match=complaint):
        answer_of(gateway_at(mock))


def test_a_redirect_is_told_and_not_followed(raw: RawGateway) -> None:
    """It could take the key to another server."""
    raw.response = RedirectResponse("/elsewhere")
    with pytest.raises(ChatError, match="status 307"):
        answer_of(raw.gateway)
    assert not is_reachable(raw.gateway.url)
    assert [request.url.path for request in raw.requests] == ["/v1/chat/completions", "/health"]


class Terminal(io.StringIO):
    """A terminal whose user types Ctrl-C when the text "enough" appears."""

    def write(self, text: str, /) -> int:
        if "enough" in text:
            signal.raise_signal(signal.SIGINT)
        return super().write(text)


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """A shell's jobs in the background ignore Ctrl-C, and so does the Python that they run."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_ends_the_answer_and_not_the_conversation(
    raw: RawGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_left = threading.Event()

    async def events() -> AsyncIterator[bytes]:
        yield b'data: {"choices":[{"delta":{"content":"enough"}}]}\n\n'
        try:
            await asyncio.sleep(60)
        finally:
            has_left.set()

    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n/new\n"))
    raw.response = StreamingResponse(events())
    terminal = Terminal()
    converse(Console(file=terminal), raw.gateway, ChatOptions())
    assert has_left.wait(10), "the connection stayed open"
    assert "enough (stopped)\n" in terminal.getvalue()
    assert "a new conversation" in terminal.getvalue()
    assert len(raw.requests) == 1


def test_the_key_is_sent_whatever_netrc_holds(
    mock: MockThread, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "netrc").write_text("default login other password other\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert answer_of(gateway_at(mock)).text == "Hello there"
    assert mock.requests[0].headers["authorization"] == "Bearer se cret"


def test_a_key_that_no_header_can_hold_is_an_error(mock: MockThread) -> None:
    with pytest.raises(ChatError, match=r"broke: .*header"):
        answer_of(Gateway(url=gateway_at(mock).url, key="a\nb"))


@pytest.mark.parametrize("variable", ["http_proxy", "all_proxy"])
@pytest.mark.parametrize("scheme", ["", "http://"])
def test_the_environments_proxy_is_used(
    mock: MockThread, monkeypatch: pytest.MonkeyPatch, variable: str, scheme: str
) -> None:
    monkeypatch.setenv(variable, scheme + gateway_at(mock).url.removeprefix("http://"))
    assert answer_of(Gateway(url="http://gateway.invalid")).text == "Hello there"
    assert mock.requests[0].headers["host"] == "gateway.invalid"


@pytest.mark.parametrize("direct", ["127.0.0.1", "10.0.0.0/8, 127.0.0.0/8", "*"])
def test_servers_that_the_environment_excepts_are_reached_directly(
    mock: MockThread, monkeypatch: pytest.MonkeyPatch, direct: str
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "example.com")
    with pytest.raises(ChatError, match="broke"):
        answer_of(gateway_at(mock))
    monkeypatch.setenv("no_proxy", direct)
    assert answer_of(gateway_at(mock)).text == "Hello there"


@pytest.mark.parametrize("url", ["", "nonsense", "ftp://a", "http://[", "http://a..b"])
def test_no_gateway_answers_at_what_is_no_url(url: str) -> None:
    assert not is_reachable(url)
