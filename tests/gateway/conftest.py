"""A real tokenizer, a scripted engine and a real server on the loopback interface."""

import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from uvicorn._types import ASGIApplication

from outrider.gateway.answering.reading.gateway_limits import GatewayLimits
from outrider.gateway.answering.text.chat import ChatTokenizer
from outrider.gateway.engines.backends.client import EngineClient
from outrider.gateway.engines.backends.step_loop import no_progress
from outrider.gateway.http.edge.connection_class import connection_class
from outrider.gateway.settings.http_bounds import HttpSettings
from outrider.gateway.settings.tree import load_settings
from outrider.gateway.wiring.application import build_app
from outrider.gateway.wiring.gateway_parts import GatewayParts
from outrider.gateway.wiring.serving import background_gateway
from outrider.router.policy import NO_CONSTRAINTS, Route, RouteConstraints
from outrider.verifier.params import Tier
from tests.gateway.scripted_client import Script, ScriptedClient, Step
from tests.gateway.waiting import wait_for as wait_for

# As `outrider serve` reads it: tests/gateway/http/server/test_stock_uvicorn.py sets it.
HTTP = HttpSettings(edge=os.environ.get("OUTRIDER_HTTP__EDGE") != "false")
CORPUS = (
    "Hello there, how are you today? I am fine, thank you.",
    "The quick brown fox jumps over the lazy dog. STOP here, please.",
    "Ça va? Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    "漢字かな交じり文 🙂🙃 один два три",
    "def f(x):\n    return x + 1\n",
)

TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role == 'user' and not loop.first and messages[loop.index0 - 1].role == 'user' -%}
{{- raise_exception('Conversation roles must alternate user/assistant/user') -}}
{%- endif -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% if enable_thinking %}<think>
{% endif -%}
{%- endif -%}
"""


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE tokenizer with a chat template, as a checkpoint's folder holds it."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS * 20, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    tokenizer.chat_template = TEMPLATE
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder: Path) -> ChatTokenizer:
    """The same, as the gateway loads it."""
    return ChatTokenizer.load(tokenizer_folder)


@pytest.fixture(scope="session")
def encode(tokenizer_folder: Path) -> Callable[[str], list[int]]:
    """Text to token ids, not through the code under test."""
    backend = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    return lambda text: backend.encode(text, add_special_tokens=False).ids


@dataclass(frozen=True)
class LengthPolicy:
    """Routes prompts of up to 20 characters to the small tier."""

    def route(self, text: str, constraints: RouteConstraints = NO_CONSTRAINTS) -> Route:
        if len(text) <= 20:
            return Route(tier="small", reason=f"router: short ({len(text)} <= 20)", quality=0.9)
        return Route(tier="large", reason=f"router: long ({len(text)} > 20)", quality=0.1)


@dataclass(frozen=True)
class Server:
    """A running gateway and the engine behind it."""

    url: str
    engine: ScriptedClient
    encode: Callable[[str], list[int]]

    def says(self, text: str, *, group: int = 1, **script: Any) -> None:
        """Make every answer this text, `group` tokens a step, all but the last of them drafted."""
        ids = self.encode(text)
        steps = [
            Step(
                token_ids=tuple(part),
                num_drafted=(group - 1) * 2,
                num_accepted=len(part) - 1,
            )
            for part in (ids[i : i + group] for i in range(0, len(ids), group))
        ]
        self.engine.script = lambda _: Script(steps=steps, **script)


@contextmanager
def running(app: ASGIApplication) -> Iterator[str]:
    """Serve an app in a thread; yields its address."""
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http=connection_class(HTTP, None),
        log_level="error",
        proxy_headers=False,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        thread.join(0.01)
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)


def parts_over(
    engine: EngineClient,
    tokenizer: ChatTokenizer,
    *,
    tiers: Iterable[Tier] = ("small", "large"),
    **parts: Any,
) -> GatewayParts:
    """A gateway over this engine whose tiers have one tokenizer; parts: further fields."""
    tokenizers = dict.fromkeys(tiers, tokenizer)
    return GatewayParts(engine=engine, tokenizers=tokenizers, **{"router": LengthPolicy(), **parts})


EXACT_ENGINE = {
    "engine.process": False,
    "engine.dtype": "float32",
    "engine.device": "cpu",
    "engine.num_threads": 1,
    "engine.num_blocks": 600,
    "speculation.adaptive": False,  # or the trees would follow the machine's mood
}


@contextmanager
def real_gateway(**flags: Any) -> Iterator[str]:
    """The address of a gateway on the bundled pair; flags: settings beside EXACT_ENGINE."""
    settings = load_settings(flags={**EXACT_ENGINE, **flags}, environ={}, config_file=None)
    with background_gateway(settings, no_progress) as url:
        yield url


@contextmanager
def scripted_server(
    tokenizer: ChatTokenizer, encode: Callable[[str], list[int]], **options: Any
) -> Iterator[Server]:
    """Serve a gateway over a scripted engine, made with these options."""
    engine = ScriptedClient(vocab_size=420, script=lambda _: Script(), **options)
    limits = GatewayLimits(default_max_tokens=32, max_body_bytes=100_000)
    with running(build_app(parts_over(engine, tokenizer, limits=limits))) as url:
        yield Server(url, engine, encode)
    assert engine.was_closed


@pytest.fixture(scope="session")
def running_server(
    tokenizer: ChatTokenizer, encode: Callable[[str], list[int]]
) -> Iterator[Server]:
    with scripted_server(tokenizer, encode) as server:
        yield server


@pytest.fixture
def server(running_server: Server) -> Iterator[Server]:
    """The server with a fresh memory; fails the test that leaves a sequence running."""
    engine = running_server.engine
    engine.is_ready, engine.is_paused = True, False
    engine.submitted.clear()
    engine.aborted.clear()
    running_server.says("Hello there!")
    yield running_server
    assert not engine.running


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


OpenWorld = Callable[..., AbstractContextManager[Any]]


@pytest.fixture(scope="session")
def open_world(tokenizer: ChatTokenizer, encode: Callable[[str], list[int]]) -> OpenWorld:
    """Opens a gateway with upstream tiers: `hybrid` of tests/gateway/hybrid.py."""
    from tests.gateway.hybrid import hybrid  # which is built on this file

    return partial(hybrid, tokenizer, encode)


@pytest.fixture
def opened(
    tokenizer: ChatTokenizer, encode: Callable[[str], list[int]], tmp_path: Path
) -> OpenWorld:
    """Opens a gateway with a key and a ledger: `books` of tests/gateway/tenancy."""
    from tests.gateway.tenancy.metering.tenants import books  # which is built on this file

    return partial(books, tokenizer, encode, tmp_path)
