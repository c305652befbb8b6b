"""schemathesis over a running gateway's whole schema: no 5xx, no answer that the schema lacks."""

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import schemathesis
from jsonschema_rs import Draft202012Validator
from schemathesis import GenerationMode
from schemathesis.config import SchemathesisConfig
from schemathesis.core.failures import AcceptedNegativeData
from schemathesis.core.parameters import ParameterLocation
from schemathesis.engine import Status, events, from_schema
from schemathesis.specs.openapi.checks import negative_data_rejection

LATE = 504

_SEMANTIC = re.compile(
    "not supported together|excludes response_format|no tool|unknown tool|two tools|schema's type|"
    "JSON object|valid JSON:|continue_final_message|read text only|holds no message|"
    "cannot be continued|the last message|at least 1 item after validation|nothing is said|"
    "give one of the two|not exist[:;]|cannot be a name or an id|no content to continue|"
    "log-probabilities of (the|at most)|Previous response with|response has no item|"
    "begins with none of the triggers|structures and triggers, or format alone|a raw prompt|"
    "after: there is no|Item with id .* not found|functions is missing|is none of functions|"
    r"^prompt(\.\d+)?: String should have at least 1 character|"  # but beside a suffix
    r"^answer\b|^request: needed|must be 0 with outrider\.judge|"  # an answer is any JSON object
    r"^response_format\.format\b"  # xgrammar's notation, which is not described
)


@dataclass
class Outcome:
    """A request, and the faults of its response."""

    failures: list[tuple[object, ...]] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    operations: dict[str, Counter[int]] = field(default_factory=dict)
    num_linked: int = 0
    """Requests made with what an earlier answer held."""

    @property
    def num_cases(self) -> int:
        return self.statuses.total()

    def add(self, other: "Outcome") -> None:
        """Count another run's requests with these."""
        self.failures += other.failures
        self.statuses += other.statuses
        self.num_linked += other.num_linked
        for label, statuses in other.operations.items():
            self.operations.setdefault(label, Counter()).update(statuses)


def fuzz(
    url: str,
    *,
    max_examples: int,
    phases: tuple[str, ...] = ("coverage", "fuzzing"),
    headers: Mapping[str, str] | None = None,
    document_headers: Mapping[str, str] | None = None,
    seed: int = 1,
) -> Outcome:
    """Ask by the schema that the gateway gives at /openapi.json, with these headers.

    `document_headers` are for the schema, where `headers` would not get it.
    """
    document = (
        httpx.get(f"{url}/openapi.json", headers=document_headers or headers)
        .raise_for_status()
        .json()
    )
    for operations in document["paths"].values():
        for operation in operations.values():
            # With the few keys that a fuzzer draws nearly all would be "used with another body".
            operation["parameters"] = [
                parameter
                for parameter in operation.get("parameters", ())
                if parameter["name"] != "idempotency-key"
            ]
    every = ("examples", "coverage", "fuzzing", "stateful")
    settings: dict[str, Any] = {
        "seed": seed,
        "base-url": url,
        "generation": {"max-examples": max_examples},
        "phases": {name: {"enabled": name in phases} for name in every},
        "checks": {
            # Judged below: schemathesis asks an operation no more after a failure.
            "positive_data_acceptance": {
                "expected-statuses": ["2xx", "400", "401", "403", "404", "409", "429", "5xx"]
            },
            "not_a_server_error": {"expected-statuses": ["2xx", "4xx", "504"]},
            # `wrong_bodies_are_refused` asks it, and looks at what it finds.
            "negative_data_rejection": {"enabled": False},
            # What comes back without a key is another test's.
            "ignored_auth": {"enabled": not headers},
            # Keys that are revoked can still be looked at: the ledger speaks of them.
            "use_after_free": {"enabled": False},
            # A 404 may be about the team that a change of a key names.
            "ensure_resource_availability": {"enabled": False},
        },
    }
    if headers:
        settings["headers"] = dict(headers)
    schema = schemathesis.openapi.from_dict(document, config=SchemathesisConfig.from_dict(settings))
    outcome = Outcome()
    for event in from_schema(schema).execute():
        assert not isinstance(event, events.NonFatalError | events.FatalError), event
        if isinstance(event, events.ScenarioFinished):
            _add(outcome, event)
    return outcome


def _add(outcome: Outcome, event: events.ScenarioFinished) -> None:
    for case_id, interaction in event.recorder.interactions.items():
        response = interaction.response
        assert response is not None
        node = event.recorder.cases[case_id]
        outcome.statuses[response.status_code] += 1
        label = node.value.operation.label
        outcome.operations.setdefault(label, Counter())[response.status_code] += 1
        outcome.num_linked += node.transition is not None
        outcome.failures += [
            (label, check.name, check.failure_info, response.content[:300])
            for check in event.recorder.checks.get(case_id, ())
            if check.status is Status.FAILURE
        ]
        wrongs = {
            "valid but refused": response.status_code == 400
            and _is_valid(node.value)
            and not is_semantic(response.content),
            "server error": response.status_code == LATE and not is_late(response.content),
        }
        outcome.failures += [
            (label, name, None, response.content[:300]) for name, is_so in wrongs.items() if is_so
        ]


@schemathesis.check
def wrong_bodies_are_refused(
    ctx: schemathesis.CheckContext, response: schemathesis.Response, case: schemathesis.Case
) -> bool | None:
    """Fail for a request that is wrong by the schema and was answered.

    schemathesis takes a message of one role, changed into one of another, for wrong: what conforms
    after all is right.
    """
    try:
        return negative_data_rejection(ctx, response, case)
    except AcceptedNegativeData:
        if _only_the_body_was_changed(case) and _body_conforms(case):
            return None
        raise


def _only_the_body_was_changed(case: schemathesis.Case) -> bool:
    assert case.meta is not None
    changed = {location for location, each in case.meta.components.items() if each.mode.is_negative}
    return changed == {ParameterLocation.BODY}


def _body_conforms(case: schemathesis.Case) -> bool:
    document = case.operation.schema.raw_schema
    asked = document["paths"][case.operation.path][case.operation.method.lower()]
    schema = asked["requestBody"]["content"]["application/json"]["schema"]
    validator = Draft202012Validator({**schema, "components": document["components"]})
    return bool(validator.is_valid(case.body))


def _is_valid(case: schemathesis.Case) -> bool:
    """Return whether the request is meant to conform to the schema."""
    return case.meta is not None and case.meta.generation.mode is GenerationMode.POSITIVE


def is_semantic(body: bytes) -> bool:
    """Each field valid but the whole too long, or refused by the template: no schema can say so."""
    error = _error_in(body)
    message = error["message"]
    return (
        error.get("code") == "context_length_exceeded"
        or "chat template" in message
        or message.startswith("min_tokens:")  # more than max_tokens, or with a grammar
        or message.startswith("outrider.")  # tier and model, no prices, no router
        or _SEMANTIC.search(message) is not None
    )


def is_late(body: bytes) -> bool:
    """A deadline may be shorter than any answer takes: then the server's error is the truth."""
    error = _error_in(body)
    # The Messages API has no codes, and Ollama's has the message only.
    return (
        error.get("code") == "deadline_exceeded"
        or error.get("type") == "timeout_error"
        or "deadline" in error["message"]
    )


def _error_in(body: bytes) -> dict[str, Any]:
    """The error, of which Ollama's API has the message only."""
    error: dict[str, Any] | str = json.loads(body)["error"]
    return {"message": error} if isinstance(error, str) else error
