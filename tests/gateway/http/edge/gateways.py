"""A whole gateway over a scripted engine, open or with real keys in a database of its own."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.engine.request import EngineRequest
from outrider.gateway.answering.reading.gateway_limits import GatewayLimits
from outrider.gateway.answering.text.chat import ChatTokenizer
from outrider.gateway.http.edge.edge_metrics import EdgeMetrics
from outrider.gateway.http.edge.headers import EdgeHeaders
from outrider.gateway.settings.http_bounds import HttpSettings
from outrider.gateway.settings.tree import Settings, load_settings
from outrider.gateway.tenancy.keys.keys import Scopes
from outrider.gateway.tenancy.keys.records import KeyOrder
from outrider.gateway.tenancy.metering.gateway_metrics import GatewayMetrics
from outrider.gateway.tenancy.metering.tenancy import Tenancy
from outrider.gateway.wiring.application import build_app
from outrider.gateway.wiring.batches import build_batch_store
from outrider.gateway.wiring.gateway_parts import GatewayParts
from outrider.gateway.wiring.responses import build_response_store
from outrider.gateway.wiring.tenancy import build_tenancy
from tests.databases import with_tables
from tests.gateway.conftest import parts_over
from tests.gateway.scripted_client import Script, ScriptedClient, Step

STEPS = [Step(token_ids=(70, 300, 310), num_drafted=4, num_accepted=2)] * 2
ADMIN_TOKEN = "admin-token-of-these-tests"


def _script_of(request: EngineRequest) -> Script:
    """The script follows no grammar: where one is asked for, the answer is cut, not complete."""
    is_cut = request.grammar is not None
    return Script(steps=STEPS, top_ids=(5, 6, 7), finish_reason="length" if is_cut else "stop")


@dataclass(frozen=True)
class Whole:
    """The application, and what a test looks at behind it."""

    app: Any
    engine: ScriptedClient
    context: GatewayParts

    def new_key(self, name: str, **scopes: Any) -> str:
        """A key's text. Only where there is a database."""
        store = self.context.tenancy.keys.store
        assert store is not None
        return store.create(KeyOrder(name=name, scopes=Scopes(**scopes))).text


def whole_gateway(
    tokenizer: ChatTokenizer,
    *,
    folder: Path | None = None,
    max_body_bytes: int = 2 * 2**20,
    max_context: int = 4096,
    http: HttpSettings | None = None,
) -> Whole:
    """`folder` is for the database of keys and the ledger; None: no keys are wanted."""
    engine = ScriptedClient(vocab_size=420, max_context=max_context, script=_script_of)
    metrics = GatewayMetrics()
    tenancy, batches = Tenancy(), None
    if folder is not None:
        settings = _settings(folder)
        tenancy = build_tenancy(settings, metrics.registry)
        batches = build_batch_store(settings, tenancy.database)
    parts = parts_over(
        engine,
        tokenizer,
        limits=GatewayLimits(default_max_tokens=32, max_body_bytes=max_body_bytes),
        metrics=metrics,
        tenancy=tenancy,
        http=http or HttpSettings(),
        edge_metrics=EdgeMetrics(metrics.registry),
        batches=batches,
        responses=build_response_store(load_settings(flags={"responses.store": True}, environ={})),
    )
    return Whole(EdgeHeaders(build_app(parts)), engine, parts)


@contextmanager
def keyed_gateway(tokenizer: ChatTokenizer, folder: Path, **bounds: Any) -> Iterator[Whole]:
    """One that wants keys; the admin token is ADMIN_TOKEN. Closes its database in the end."""
    whole = whole_gateway(tokenizer, folder=folder, **bounds)
    try:
        yield whole
    finally:
        if whole.context.tenancy.database is not None:
            whole.context.tenancy.database.close()


def _settings(folder: Path) -> Settings:
    flags = {
        "database_url": with_tables(folder / "outrider.db"),
        "keys.mode": "required",
        "keys.admin_token": ADMIN_TOKEN,
        "batches.enabled": True,
    }
    return load_settings(flags=flags, environ={})
