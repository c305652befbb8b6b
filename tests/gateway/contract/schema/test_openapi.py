"""The OpenAPI document tells the truth: schemathesis finds no 5xx and no violation."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

from outrider.gateway.answering.text.chat import ChatTokenizer
from outrider.gateway.contract.schema.openapi import build_document
from outrider.gateway.http.edge.bounds import ConnectionBounds
from outrider.gateway.http.server import openapi_document
from tests.gateway.http.edge.fuzzing import LATE, Outcome, fuzz
from tests.gateway.http.edge.gateways import ADMIN_TOKEN, Whole, keyed_gateway, whole_gateway
from tests.gateway.http.edge.serving import served
from tests.sizes import repeats

GENERATING = (
    "POST /v1/chat/completions",
    "POST /v1/completions",
    "POST /v1/responses",
    "POST /v1/messages",
    "POST /api/chat",
    "POST /api/generate",
    "POST /infill",
)
ADMINISTRATING = ("POST /admin/keys", "POST /admin/teams", "GET /admin/keys/{key_id}")
SEEDS = range(1, 5)
OPEN = frozenset({"GET /health", "GET /ready", "GET /ping", "POST /ping"})


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder: Path) -> ChatTokenizer:
    """Return one of a code model, so that requests with a suffix are answered too."""
    backend = AutoTokenizer.from_pretrained(tokenizer_folder)
    backend.add_tokens([f"<|fim_{name}|>" for name in ("prefix", "suffix", "middle")])
    return ChatTokenizer(backend)


@pytest.fixture
def keyed(
    tokenizer: ChatTokenizer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Whole, str]]:
    """A gateway that wants keys, and one that may do all but administrate."""
    with keyed_gateway(tokenizer, tmp_path_factory.mktemp("fuzzed")) as whole:
        yield whole, whole.new_key("fuzzer")


def asked(
    whole: Whole,
    max_examples: int,
    key: str | None = None,
    *phases: str,
    seeds: Sequence[int] = (1,),
    is_enough: Callable[[Outcome], bool] = lambda _: False,
) -> Outcome:
    """Everything in the schema, over real sockets. Fails for what should not have come back.

    With one seed after the other, until it is enough.
    """
    headers = None if key is None else {"authorization": f"Bearer {key}"}
    phases = phases or ("fuzzing",)
    outcome = Outcome()
    # requests, which schemathesis asks with, closes its connections when it is collected.
    with served(whole.app, ConnectionBounds(), clients_stay=True) as running:
        for seed in seeds:
            if not is_enough(outcome):
                outcome.add(
                    fuzz(
                        running.url,
                        max_examples=max_examples,
                        phases=phases,
                        headers=headers,
                        seed=seed,
                    )
                )
    assert outcome.failures == []
    assert not [status for status in outcome.statuses if status >= 500 and status != LATE]
    assert not whole.engine.running
    return outcome


def asked_in_sequences(whole: Whole, max_examples: int, num_cases: int) -> Outcome:
    """Sequences of requests until there were enough that went on with each other's ids.

    The ids are drawn by the gateway, so how far one seed's sequences get is not the same twice.
    """
    outcome = Outcome()
    for seed in range(1, 13):
        outcome.add(asked(whole, max_examples, ADMIN_TOKEN, "stateful", seeds=[seed]))
        is_found = all(outcome.operations.get(label, {}).get(200) for label in ADMINISTRATING)
        if is_found and outcome.num_linked > 5 and outcome.num_cases > num_cases:
            return outcome
    return outcome


def gets_through(outcome: Outcome) -> bool:
    """True if each way to an answer was answered and refused: few requests do not hold both."""
    found = [outcome.operations.get(label, {}) for label in GENERATING]
    return all(each.get(200) and each.get(400) for each in found)


def check_generating(outcome: Outcome) -> None:
    """It got through: neither everything nor nothing was refused."""
    for label in GENERATING:
        assert outcome.operations[label][200], label
        assert outcome.operations[label][400], label


def check_administrating(outcome: Outcome) -> None:
    """Keys and teams were found by the ids that their making answered with."""
    assert outcome.num_linked > 5
    for label in ADMINISTRATING:
        assert outcome.operations[label][200], label
    assert 401 not in outcome.statuses


@pytest.mark.slow
def test_the_whole_schema_without_keys(tokenizer: ChatTokenizer) -> None:
    outcome = asked(whole_gateway(tokenizer), 28, seeds=SEEDS, is_enough=gets_through)
    check_generating(outcome)
    assert outcome.num_cases > 450
    # Without any key there is nobody who could administrate.
    assert set(outcome.operations["POST /admin/keys"]) <= {401, 404, 405}


def test_the_document_is_built_once_and_not_on_the_event_loop(
    tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_loop = []

    def build(*arguments: Any, **options: Any) -> dict[str, Any]:
        has_loop.append(asyncio._get_running_loop() is not None)
        return build_document(*arguments, **options)

    monkeypatch.setattr(openapi_document, "build_document", build)
    with served(whole_gateway(tokenizer).app, ConnectionBounds()) as running:
        pages = [httpx.get(f"{running.url}/openapi.json", timeout=30) for _ in range(3)]
    assert has_loop == [False]
    assert len({page.content for page in pages}) == 1
    assert pages[0].headers["content-type"] == "application/json"
    assert "/v1/chat/completions" in pages[0].json()["paths"]


def test_the_document_names_the_tiers_that_keys_may_have_limits_for(
    tokenizer: ChatTokenizer,
) -> None:
    with served(whole_gateway(tokenizer).app, ConnectionBounds()) as running:
        schemas = httpx.get(f"{running.url}/openapi.json", timeout=30).json()["components"]
    made = schemas["schemas"]["KeyLimits"]["properties"]["models"]
    assert set(made["properties"]) == {"small", "large"}
    assert made["additionalProperties"] is False
    changed = schemas["schemas"]["LimitsPatch"]["properties"]["models"]["anyOf"][0]
    assert set(changed["properties"]) == {"small", "large"}
    assert changed["additionalProperties"] == {"type": "null"}


@pytest.mark.slow
def test_the_whole_schema_with_a_key(keyed: tuple[Whole, str]) -> None:
    whole, key = keyed
    outcome = asked(whole, repeats(20, 8), key, seeds=SEEDS, is_enough=gets_through)
    check_generating(outcome)
    assert outcome.num_cases > repeats(350, 120)
    assert outcome.operations["GET /v1/usage"][200]
    assert set(outcome.operations["POST /admin/keys"]) <= {403, 404, 405}
    assert 401 not in outcome.statuses


@pytest.mark.slow
def test_sequences_of_requests_with_the_admin_token(keyed: tuple[Whole, str]) -> None:
    whole, _ = keyed
    outcome = asked_in_sequences(whole, 45, 120)
    check_administrating(outcome)
    assert outcome.num_cases > 120


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_ten_thousand_cases(tokenizer: ChatTokenizer, keyed: tuple[Whole, str]) -> None:
    whole, key = keyed
    without = asked(whole_gateway(tokenizer), 40, None, "coverage", "fuzzing")
    with_key = asked(whole, 40, key, "coverage", "fuzzing")
    with_token = asked_in_sequences(whole, 100, 240)
    check_generating(without)
    check_generating(with_key)
    check_administrating(with_token)
    assert without.num_cases + with_key.num_cases + with_token.num_cases > 10_000


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_without_a_key_nothing_is_learned(keyed: tuple[Whole, str]) -> None:
    whole, key = keyed
    headers = {"authorization": f"Bearer {key[:-1]}!"}
    with served(whole.app, ConnectionBounds(), clients_stay=True) as running:
        outcome = fuzz(
            running.url,
            max_examples=20,
            headers=headers,
            document_headers={"authorization": f"Bearer {key}"},
        )
    for label, statuses in outcome.operations.items():
        if label not in OPEN:
            assert set(statuses) <= {401, 404, 429}, label
