"""Receipts of answers whose engine ended, or which another one took over: they verify whole.

The shipped pair. Requests of every kind run together while an engine's process is killed, and while
a fleet's replica ends and others hand their answers on. Whoever is left judges.
"""

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from outrider.gateway.engines.backends.process_client import ProcessEngineClient
from outrider.gateway.engines.backends.spawning import EngineRecipe
from outrider.gateway.engines.fleet.pool import EnginePool
from outrider.gateway.settings.tree import load_settings
from outrider.gateway.tools.commands.verify.answer_file import whole_of
from tests.engines import make_engine, shipped_pair
from tests.gateway.conftest import wait_for
from tests.laws.gateways import ENGINE, Gateway, gateway
from tests.laws.test_fleet_law import replica
from tests.laws.test_killed_streams_law import CHAT, KINDS, Escalating, body
from tests.laws.test_resumed_law import engine_of

Asked = tuple[dict[str, Any], dict[str, Any]]
"""A request, and its whole answer."""
NEED_THEIR_REQUEST: Final = ("grammar", "tools")
"""What decided their tokens is in no receipt."""


def request_of(kind: str, *, stream: bool) -> dict[str, Any]:
    request = body(kind) | {"stream": stream, "max_tokens": 60 if kind == "tools" else 28}
    if not stream:
        del request["stream_options"]
    return {**request, "outrider": {**request.get("outrider", {}), "receipt": True}}


def ask(served: Gateway, kind: str, *, stream: bool) -> Asked:
    request = request_of(kind, stream=stream)
    response = served.http.post(CHAT, json=request)
    assert response.status_code == 200, response.text
    if not stream:
        return request, response.json()
    lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
    return request, whole_of(map(json.loads, lines))


def ask_all(served: Gateway, *, stream: bool) -> dict[str, Asked]:
    """All kinds at once."""
    with ThreadPoolExecutor(len(KINDS)) as pool:
        return dict(zip(KINDS, pool.map(partial(ask, served, stream=stream), KINDS), strict=True))


def texts(answers: dict[str, Asked]) -> dict[str, list[list[int]]]:
    return {
        kind: [choice["token_ids"] for choice in answer["choices"]]
        for kind, (_, answer) in answers.items()
    }


def check_receipts(served: Gateway, answers: dict[str, Asked]) -> None:
    for kind, (request, answer) in answers.items():
        assert "receipt" in answer["outrider"], (kind, answer["outrider"])
        for choice in answer["choices"]:
            asked = {"answer": answer, "index": choice["index"]}
            if kind in NEED_THEIR_REQUEST:
                asked["request"] = request
            response = served.http.post("/v1/verify", json=asked)
            assert response.status_code == 200, response.text
            report = response.json()
            assert report["matches"], (kind, report)
            assert report["explanation"] == "claimed"
            receipt = report["receipt"]
            assert receipt["prompt_matches"] is receipt["answer_matches"] is True
            assert receipt["numerics_match"] is True
            assert report["num_tokens"] == len(choice["token_ids"])


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_a_receipt_of_answers_whose_engine_was_killed_verifies(
    tmp_path: Path, *, stream: bool
) -> None:
    armed = tmp_path / "armed"
    flags = {**ENGINE, "engine.process": True}
    settings = load_settings(flags=flags, environ={}, config_file=None)
    arguments = json.dumps({"settings": settings.model_dump_json(), "armed": str(armed)})
    client = ProcessEngineClient(
        EngineRecipe(builder="tests.laws.mortal_engine:build", arguments=arguments)
    )
    with gateway(policy=Escalating(), client=client) as served:
        right = ask_all(served, stream=stream)
        pid = client.pid
        armed.write_text("emitted 90", encoding="utf-8")
        answers = ask_all(served, stream=stream)
        assert client.pid != pid
        assert not armed.exists()
        assert texts(answers) == texts(right)
        check_receipts(served, answers)


class RestlessPool(EnginePool):
    """Hands answers from one replica to another while they are written."""

    async def start(self) -> None:
        await super().start()
        self._moves = asyncio.create_task(self._move_about())

    async def close(self) -> None:
        if not self._moves.cancel():
            self._moves.result()
        await super().close()

    async def _move_about(self) -> None:
        while self.failovers["moved"] < 20:
            await asyncio.sleep(0.01)
            for state in self.states():
                await self.move_off(state.name, 1)


@pytest.mark.slow
@pytest.mark.parametrize("make_pool", [EnginePool, RestlessPool])
def test_a_receipt_of_answers_that_another_replica_took_over_verifies(
    make_pool: Callable[..., EnginePool],
) -> None:
    ends_after = 8 if make_pool is EnginePool else None
    replicas = [replica("x", engine_of, ends_after), *(replica(n, engine_of) for n in "yz")]
    pool = make_pool(replicas, resume_within_s=60)
    with gateway(policy=Escalating(), client=pool) as served:
        wait_for(lambda: all(state.is_up for state in pool.states()), 120)
        answers = ask_all(served, stream=False)
        assert pool.failovers["died" if ends_after else "moved"], pool.failovers
        check_receipts(served, answers)


@pytest.mark.slow
def test_choices_of_different_arithmetic_share_no_receipt() -> None:
    """Their fleet has engines of two kinds, which take a request's choices in turn."""
    replicas = [
        replica("x", engine_of),
        replica("y", lambda: make_engine(shipped_pair("bfloat16"))),
    ]
    pool = EnginePool(replicas)
    with gateway(client=pool) as served:
        wait_for(lambda: all(state.is_up for state in pool.states()), 120)
        _, answer = ask(served, "choices", stream=False)
        assert "receipt" not in answer["outrider"]
        assert "different arithmetic" in answer["outrider"]["no_receipt"]
