"""Real gateways on the shipped pair, in this process, and what clients are told by them."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any

import httpx
import pytest

from outrider.engine.model.load import load_model
from outrider.engine.passes.runner import ModelRunner
from outrider.gateway.engines.backends.in_process import InProcessEngineClient
from outrider.gateway.engines.backends.process_client import ProcessEngineClient
from outrider.gateway.engines.fleet.pool import EnginePool
from outrider.gateway.settings.tree import Settings, load_settings
from outrider.gateway.wiring.application import build_app
from outrider.gateway.wiring.build import build_client, build_parts
from outrider.gateway.wiring.engine import join, named_models
from outrider.gateway.wiring.gateway_parts import GatewayParts
from outrider.router.policy import RoutePolicy
from outrider.verifier.params import Tier
from tests.engines import PAIR_FOLDER, shipped_pair
from tests.gateway.conftest import running, wait_for

ENGINE = {
    "engine.process": False,
    "engine.dtype": "float32",
    "engine.device": "cpu",
    "engine.num_threads": 1,
    "speculation.adaptive": False,  # or the trees would follow the machine's mood
}
_NUM_BLOCKS = 128
_NEAR = 1e-3
"""Of log-probabilities: the same sum in another order differs in its last digits."""


@dataclass
class Gateway:
    """A running gateway. Its answers are read by `Told`."""

    url: str
    context: GatewayParts
    http: httpx.Client = field(repr=False)

    def ask(self, path: str = "chat/completions", **document: Any) -> "Told":
        """One answer, whole or streamed as the request says."""
        response = self.http.post(f"/v1/{path}", json=document)
        return Told.of(response)

    def heal(self) -> None:
        """Close all breakers, as successful requests between failures would."""
        for tier in self.context.upstream.tiers.values():
            for replica in tier.replicas.replicas:
                for _ in range(3):
                    replica.begin(is_streamed=False).succeeded()


@contextmanager
def gateway(
    flags: Mapping[str, Any] | None = None,
    *,
    policy: RoutePolicy | None = None,
    client: ProcessEngineClient | EnginePool | None = None,
) -> Iterator[Gateway]:
    """A gateway with these settings. Its engine is its own; the weights are shared.

    `policy` decides in the place of the pair's router; `client` is another engine's.
    """
    settings = load_settings(flags={**ENGINE, **(flags or {})}, environ={}, config_file=None)
    engine = client or build_client(settings)
    if isinstance(engine, InProcessEngineClient):
        engine = InProcessEngineClient(lambda _: join(settings, _runners(settings), None))
    parts = build_parts(settings, engine)
    if policy is not None:
        parts = replace(parts, router=policy)
    with running(build_app(parts)) as url, httpx.Client(base_url=url, timeout=120) as http:
        wait_for(lambda: engine.is_ready, 120)
        yield Gateway(url, parts, http)


def _runners(settings: Settings) -> dict[Tier, ModelRunner]:
    pair = shipped_pair("float32")
    shipped = {str(PAIR_FOLDER / "large"): pair.large, str(PAIR_FOLDER / "small"): pair.small}
    return {
        tier: ModelRunner(
            model=shipped.get(path) or load_model(path, dtype="float32"),
            num_blocks=settings.engine.num_blocks or _NUM_BLOCKS,
            block_size=settings.engine.block_size,
            prefix_caching=True,
        )
        for tier, path in named_models(settings).items()
    }


@dataclass(frozen=True)
class Told:
    """All that a client learns from an answer, however it was cut into events.

    `num_tokens`: of the prompt, and of the answer. `pieces`: the text as it came.
    """

    text: str
    reasoning: str
    calls: tuple[tuple[str, str], ...]
    tokens: tuple[str, ...]
    logprobs: tuple[float, ...] = field(compare=False)
    finish_reason: str | None
    num_tokens: tuple[int, int] | None
    report: dict[str, Any] = field(compare=False)
    error: dict[str, Any] | None = field(default=None, compare=False)
    pieces: tuple[str, ...] = field(default=(), compare=False)

    @classmethod
    def of(cls, response: httpx.Response) -> "Told":
        """Reads it, and checks that it is one answer."""
        assert response.status_code == 200, response.text
        if response.headers["content-type"].startswith("application/json"):
            return cls._of_parts([response.json()])
        events = [event for event in response.text.split("\n\n") if event]
        chunks = [json.loads(e.removeprefix("data:")) for e in events if not e.endswith("[DONE]")]
        is_broken = "error" in chunks[-1]
        assert [e for e in events if e.endswith("[DONE]")] == ["data: [DONE]"] * (not is_broken)
        assert is_broken or events[-1] == "data: [DONE]"
        told = cls._of_parts(chunks)
        choices = [choice for chunk in chunks for choice in chunk.get("choices", ())]
        assert len({chunk["id"] for chunk in chunks if "error" not in chunk}) == 1
        assert sum("role" in choice.get("delta", {}) for choice in choices) <= 1, response.text
        assert all(not choice["index"] for choice in choices)
        assert sum(bool(choice["finish_reason"]) for choice in choices) == (not is_broken)
        assert sum("outrider" in chunk for chunk in chunks) == 1
        return told

    @classmethod
    def _of_parts(cls, documents: Sequence[dict[str, Any]]) -> "Told":
        choices = [choice for document in documents for choice in document.get("choices", ())]
        messages = [choice.get("delta") or choice.get("message") or choice for choice in choices]
        entries = [entry for choice in choices for entry in _entries(choice.get("logprobs"))]
        usages = [document["usage"] for document in documents if document.get("usage")]
        ends = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
        pieces = tuple(m.get("content") or m.get("text") or "" for m in messages)
        calls: list[list[str]] = []
        for call in (call for message in messages for call in message.get("tool_calls") or ()):
            name, arguments = call["function"].get("name"), call["function"].get("arguments", "")
            if name:
                calls.append([name, ""])
            calls[-1][1] += arguments
        return cls(
            text="".join(pieces),
            reasoning="".join(m.get("reasoning_content") or "" for m in messages),
            calls=tuple((name, arguments) for name, arguments in calls),
            tokens=tuple(token for token, _ in entries),
            logprobs=tuple(logprob for _, logprob in entries),
            finish_reason=ends[-1] if ends else None,
            num_tokens=(
                (usages[-1]["prompt_tokens"], usages[-1]["completion_tokens"]) if usages else None
            ),
            report=next((d["outrider"] for d in documents if "outrider" in d), {}),
            error=documents[-1].get("error"),
            pieces=pieces,
        )

    def check(self, right: "Told") -> None:
        """It is the right answer, or its beginning and an error."""
        near = pytest.approx(right.logprobs[: len(self.logprobs)], abs=_NEAR)
        assert self.logprobs == near
        if self.error is None:
            for name in _COMPARED:
                assert getattr(self, name) == getattr(right, name), name
            return
        assert right.text.startswith(self.text)
        assert right.reasoning.startswith(self.reasoning)
        assert right.tokens[: len(self.tokens)] == self.tokens
        assert right.calls[: len(self.calls) - 1] == self.calls[:-1]
        assert _joined(right.calls).startswith(_joined(self.calls))


_COMPARED = tuple(field.name for field in fields(Told) if field.compare)


def _joined(calls: Sequence[tuple[str, str]]) -> str:
    return "".join(name + arguments for name, arguments in calls)


def _entries(logprobs: dict[str, Any] | None) -> list[tuple[str, float]]:
    """Token by token, in either endpoint's form."""
    if logprobs is None:
        return []
    if "content" in logprobs:
        return [(entry["token"], entry["logprob"]) for entry in logprobs["content"] or ()]
    return list(zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True))
