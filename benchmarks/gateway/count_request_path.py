"""Count the modules and the carriers that a request meets on its way to its first byte.

Method: the application as it is served, with the bundled pair's tokenizers over a mock engine,
requires keys and keeps a ledger. It is sent one streamed chat through ASGI, in this process. From
the call of the application to the first part of the body, every Python function that is entered in
the request's own context is noted (sys.setprofile). The request is sent twice: objects that the
first one met as well (services, caches) do not belong to the second.

Reading it: `modules` are the gateway's, in the order of their first entry. A *carrier* is an object
of a class of this repository that was made for this request and given to a function outside of the
module that defines the class. Each class stands with the first such module.

    python -m benchmarks.gateway.count_request_path           # lists for people
    python -m benchmarks.gateway.count_request_path --json    # the same as JSON
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Final

from benchmarks.shared.harness import DEMO_PAIR, quiet_transformers
from benchmarks.shared.mock_engine import MockEngine
from outrider.gateway.answering.text.chat import ChatTokenizer
from outrider.gateway.settings.tree import load_settings
from outrider.gateway.tenancy.keys.records import KeyOrder
from outrider.gateway.tenancy.metering.gateway_metrics import GatewayMetrics
from outrider.gateway.wiring.application import build_app
from outrider.gateway.wiring.gateway_parts import GatewayParts
from outrider.gateway.wiring.tenancy import build_tenancy
from outrider.router.policy import FixedPolicy

_PACKAGES: Final = tuple(f"outrider.{name}." for name in ("gateway", "engine", "router"))
_IS_COUNTED: Final[ContextVar[bool]] = ContextVar("is_counted", default=False)
_PATH: Final = "/v1/chat/completions"
_BODY: Final = json.dumps(
    {
        "model": "auto",
        "messages": [{"role": "user", "content": "How are you today?"}],
        "max_tokens": 8,
        "stream": True,
    }
).encode()


@dataclass(kw_only=True)
class RequestPath:
    """The modules and carriers that one request met, in the order of the first meeting.

    Attributes:
        `modules`: of the gateway.
        `carriers`: classes of the request's own objects, each with the first module that got one.
    """

    modules: list[str] = field(default_factory=list)
    carriers: dict[str, str] = field(default_factory=dict)


class _Recorder:
    """Notes function calls. Keeps every object that it met alive, so that no id is used twice."""

    def __init__(self) -> None:
        self.path = RequestPath()
        self.is_open = False
        self._before: dict[int, object] = {}
        self._met: dict[int, object] = {}

    def begin(self) -> None:
        """Begin a request: objects met until now are not its own."""
        self.path = RequestPath()
        self._before |= self._met
        self.is_open = True

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        """Note what a function is, and what it was given."""
        del arg
        if event != "call" or not self.is_open or not _IS_COUNTED.get():
            return
        module: str = frame.f_globals.get("__name__", "")
        if not module.startswith(_PACKAGES):
            return
        if module.startswith(_PACKAGES[0]) and module not in self.path.modules:
            self.path.modules.append(module)
        for given in _arguments(frame):
            kind = type(given)
            self._met[id(given)] = given
            if kind.__module__ != module and id(given) not in self._before:
                self.path.carriers.setdefault(f"{kind.__module__}.{kind.__qualname__}", module)


def _arguments(frame: FrameType) -> Iterator[object]:
    """Yield the arguments whose classes are the repository's."""
    code = frame.f_code
    for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
        given = frame.f_locals.get(name)
        if type(given).__module__.startswith(_PACKAGES):
            yield given


@contextmanager
def _recording() -> Iterator[_Recorder]:
    recorder = _Recorder()
    sys.setprofile(recorder)
    try:
        yield recorder
    finally:
        sys.setprofile(None)


@asynccontextmanager
async def started(app: Any) -> AsyncIterator[None]:
    """Run the application's lifespan around the block."""
    told: asyncio.Queue[dict[str, str]] = asyncio.Queue()
    answers: asyncio.Queue[dict[str, str]] = asyncio.Queue()
    task = asyncio.create_task(app({"type": "lifespan"}, told.get, answers.put))
    await told.put({"type": "lifespan.startup"})
    answer = await answers.get()
    if answer["type"] != "lifespan.startup.complete":
        raise RuntimeError(f"the application did not start: {answer}")
    try:
        yield
    finally:
        await told.put({"type": "lifespan.shutdown"})
        await task


async def _ask(app: Any, key: str, recorder: _Recorder) -> RequestPath:
    """Send one request and read its answer to the end; count until the first part of the body."""
    parts = [{"type": "http.request", "body": _BODY, "more_body": False}]
    is_over = asyncio.Event()
    status = 0

    async def receive() -> dict[str, Any]:
        if not parts:
            await is_over.wait()
        return parts.pop() if parts else {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        nonlocal status
        status = message.get("status", status)
        if message["type"] == "http.response.body":
            recorder.is_open = False

    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    scope = {
        "type": "http",
        "method": "POST",
        "path": _PATH,
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "client": ("127.0.0.1", 1),
    }
    token = _IS_COUNTED.set(True)
    recorder.begin()
    try:
        await app(scope, receive, send)
    finally:
        is_over.set()
        _IS_COUNTED.reset(token)
    if status != 200:
        raise RuntimeError(f"the request was answered with status {status}")
    return recorder.path


async def count_request_path(folder: Path) -> RequestPath:
    """Count the way of one streamed chat; `folder` is for the database of keys and the ledger."""
    flags = {"database_url": f"sqlite:///{folder}/outrider.db", "keys.mode": "required"}
    settings = load_settings(flags=flags, environ={})
    tokenizer = ChatTokenizer.load(DEMO_PAIR / "large")
    engine = MockEngine()
    metrics = GatewayMetrics()
    tenancy = build_tenancy(settings, metrics.registry)
    parts = GatewayParts(
        engine=engine,
        tokenizers={"small": tokenizer, "large": tokenizer},
        router=FixedPolicy("large"),
        metrics=metrics,
        tenancy=tenancy,
    )
    app = build_app(parts)
    assert tenancy.keys.store is not None
    key = tenancy.keys.store.create(KeyOrder(name="counted")).text
    await engine.start()
    with _recording() as recorder:
        async with started(app):
            await _ask(app, key, recorder)
            return await _ask(app, key, recorder)


def main(argv: Sequence[str] | None = None) -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(argv)
    quiet_transformers()
    with tempfile.TemporaryDirectory() as folder:
        path = asyncio.run(count_request_path(Path(folder)))
    if options.json:
        print(json.dumps(asdict(path), indent=2))
        return
    print(f"{len(path.modules)} modules of the gateway, in the order of first entry:")
    for number, module in enumerate(path.modules, 1):
        print(f"  {number:2} {module}")
    print(f"{len(path.carriers)} carriers, each with the first module that was given one:")
    for number, (carrier, given_to) in enumerate(path.carriers.items(), 1):
        print(f"  {number:2} {carrier} -> {given_to}")


if __name__ == "__main__":
    main()
