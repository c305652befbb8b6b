"""The OpenAPI document tells the truth: schemathesis finds no 5xx and no violation."""

import json
import re
from typing import Any

import pytest
import schemathesis
from schemathesis.config import SchemathesisConfig
from schemathesis.engine import Status, events, from_schema

from gateway.app import GatewayContext, GatewayLimits, create_app
from gateway.chat import ChatTokenizer
from tests.gateway.conftest import LengthPolicy
from tests.gateway.scripted_client import Script, ScriptedClient, Step

LATE = 504
PHASES = {
    "coverage": {"enabled": True},
    "fuzzing": {"enabled": True},
    "examples": {"enabled": False},
    "stateful": {"enabled": False},
}


@pytest.fixture(scope="module")
def app(tokenizer: ChatTokenizer) -> Any:
    steps = [Step(token_ids=(70, 300, 310), num_drafted=4, num_accepted=2)] * 2
    engine = ScriptedClient(
        vocab_size=420, max_context=4096, script=lambda _: Script(steps=steps, top_ids=(5, 6, 7))
    )
    context = GatewayContext(
        engine=engine,
        tokenizers={"small": tokenizer, "large": tokenizer},
        router=LengthPolicy(),
        limits=GatewayLimits(),
    )
    return create_app(context)


def is_semantic(body: bytes) -> object:
    """Each field valid but the whole too long, or refused by the template: no schema can say so."""
    error = json.loads(body)["error"]
    return (
        error["code"] == "context_length_exceeded"
        or "chat template" in error["message"]
        or error["message"].startswith("min_tokens:")  # more than max_tokens, or with a grammar
        or error["message"].startswith("outrider.")  # tier and model, no prices, no router
        or re.search(
            "not supported together|no tool|two tools|schema's type|JSON object|valid JSON:",
            error["message"],
        )
    )


def is_late(response: Any) -> bool:
    """A deadline may be shorter than any answer takes: then the server's error is the truth."""
    if response.status_code != LATE:
        return False
    error = json.loads(response.content)["error"]
    return bool(error["code"] == "deadline_exceeded")


def test_schemathesis(app: Any) -> None:
    config = SchemathesisConfig.from_dict(
        {"seed": 1, "generation": {"max-examples": 8}, "phases": PHASES}
    )
    schema = schemathesis.openapi.from_asgi("/openapi.json", app, config=config)
    failures: list[Any] = []
    statuses = []
    for event in from_schema(schema).execute():
        assert not isinstance(event, events.NonFatalError | events.FatalError), event
        if not isinstance(event, events.ScenarioFinished):
            continue
        for case_id, checks in event.recorder.checks.items():
            response = event.recorder.interactions[case_id].response
            assert response is not None
            statuses.append(response.status_code)
            failures += [
                (check.name, check.failure_info, response.content[:300])
                for check in checks
                if check.status is Status.FAILURE
                and not (check.name == "positive_data_acceptance" and is_semantic(response.content))
                and not is_late(response)
            ]
    assert failures == []
    # It got through: not everything was refused, and enough was asked.
    assert statuses.count(200) > 100
    assert statuses.count(400) > 100
    assert not any(status >= 500 for status in statuses if status != LATE)
