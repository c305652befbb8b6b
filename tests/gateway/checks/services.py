"""A service that gives verdicts or gets alerts, and functions that give verdicts."""

import asyncio
import base64
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from pydantic import SecretStr

from outrider.gateway.settings.alerts import AlertSettings

Said = dict[str, Any] | bytes | int | None
"""What a service answers, or its status; None: nothing, for as long as it runs."""
KEY = bytes(range(32))
SECRET = f"whsec_{base64.b64encode(KEY).decode()}"

BLOCK = {"verdict": "block", "reason": "It names a secret."}
PASS = {"verdict": "pass"}


def texts(question: dict[str, Any]) -> list[str]:
    """The texts of a question."""
    return [each["text"] for each in question["texts"]]


def without_word(question: dict[str, Any]) -> dict[str, Any]:
    """Rewrite one word wherever it stands."""
    changed = [text.replace("fine", "****") for text in texts(question)]
    return {"verdict": "rewrite", "texts": changed}


async def without_word_soon(question: dict[str, Any]) -> dict[str, Any]:
    """The same, in the event loop."""
    return without_word(question)


def blocking(question: dict[str, Any]) -> dict[str, Any] | None:
    """Block one word."""
    is_seen = any("fine" in each["before"] + each["text"] for each in question["texts"])
    return BLOCK if is_seen else None


def blocking_secrets(question: dict[str, Any]) -> dict[str, Any] | None:
    """Block another word."""
    return BLOCK if any("secret" in text for text in texts(question)) else None


def raising(question: dict[str, Any]) -> None:
    """Fail."""
    raise KeyError(question["check"])


def lying(question: dict[str, Any]) -> dict[str, Any]:
    """Return too few texts."""
    return {"verdict": "rewrite", "texts": []}


def stuttering(question: dict[str, Any]) -> dict[str, Any]:
    """Return texts that no JSON can hold."""
    return {"verdict": "rewrite", "texts": ["\ud800"] * len(texts(question))}


def mumbling(question: dict[str, Any]) -> str:
    """Return no verdict."""
    return "perhaps"


def sleeping(question: dict[str, Any]) -> None:
    """Return long after the time is up."""
    time.sleep(1.5)


async def hanging(question: dict[str, Any]) -> None:
    """Never return."""
    await asyncio.Event().wait()


@dataclass
class Service:
    """A running service."""

    url: str
    say: Callable[[dict[str, Any]], Said] = field(default=lambda _: PASS)
    questions: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    num_cut: int = 0
    """Answers that were not read to their end."""

    def alert_settings(self, **more: Any) -> AlertSettings:
        """What has alerts sent to it."""
        return AlertSettings(url=SecretStr(self.url), secret=SecretStr(SECRET), **more)


@contextmanager
def running_service(say: Callable[[dict[str, Any]], Said]) -> Iterator[Service]:
    """A service on this machine."""
    is_over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            service.bodies.append(body)
            service.questions.append(json.loads(body))
            service.headers.append(dict(self.headers.items()))
            said = service.say(service.questions[-1])
            if said is None:
                is_over.wait()
                return
            status, answer = (said, b"") if isinstance(said, int) else (200, said)
            answer = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("location", "/elsewhere")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            try:
                self.wfile.write(answer)
            except OSError:
                service.num_cut += 1
                self.close_connection = True

        def log_message(self, *_: object) -> None:
            """Keep quiet."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        service = Service(f"http://127.0.0.1:{server.server_address[1]}/check", say)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield service
        finally:
            is_over.set()
            server.shutdown()
