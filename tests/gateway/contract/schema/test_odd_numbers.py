"""Numbers at and beyond every end, in each field that samples: a clear 400, never a 5xx."""

import json
from typing import Any

import httpx
import pytest

from tests.gateway.conftest import Server
from tests.sizes import repeats

NUMBERS = [
    "1e400",
    "1e308",
    "5e-324",
    "NaN",
    "1" + "0" * 400,
    "1" + "0" * 5000,  # more digits than Python reads
    "1.5e-5000",
    "-0.0",
    '"1"',
    "[]",
]
FIELDS = [
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "n",
    "max_tokens",
    "max_output_tokens",
    "min_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias.5",
    "stop_token_ids.0",
    "outrider.max_draft_nodes",
    "outrider.deadline_ms",
    "outrider.max_cost_usd",
    "outrider.slo.ttft_ms",
    "outrider.quality.cascade",
]
ENDPOINTS = {
    "/v1/chat/completions": '"messages": [{"role": "user", "content": "hi"}]',
    "/v1/completions": '"prompt": "hi"',
    "/v1/responses": '"input": "hi"',
    "/v1/messages": '"messages": [{"role": "user", "content": "hi"}]',
}


def body(path: str, field: str, number: str) -> bytes:
    """JSON that no JSON library would write."""
    name, *parts = field.split(".")
    own = ENDPOINTS[path]
    if path == "/v1/messages" and name != "max_tokens":  # which it demands
        own += ', "max_tokens": 5'
    for part in reversed(parts):
        number = f"[{number}]" if part == "0" else f"{{{json.dumps(part)}: {number}}}"
    return f'{{"model": "auto", {own}, "{name}": {number}}}'.encode()


@pytest.mark.slow_cases
@pytest.mark.parametrize("path", ENDPOINTS)
def test_no_number_is_a_failure_of_the_gateway(
    server: Server, http: httpx.Client, path: str
) -> None:
    headers = {"content-type": "application/json"}
    wrong: list[Any] = []
    statuses: set[int] = set()
    share = repeats(1, 3)
    for row, field in enumerate((*FIELDS, "top_logprobs", "logprobs")):
        for number in NUMBERS[row % share :: share]:  # of the quick tests each meets a third
            response = http.post(path, content=body(path, field, number), headers=headers)
            statuses.add(response.status_code)
            if response.status_code not in {200, 400, 404, 429, 504}:
                wrong.append((field, number[:12], response.status_code, response.text[:120]))
    assert wrong == []
    assert {200, 400} <= statuses, "some of them are numbers like any other"


@pytest.mark.slow_cases
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop", ["x"] * 5000),
        ("stop", ["x" * 5000]),
        ("stop_token_ids", [1] * 5000),
        ("logit_bias", {str(token): 1 for token in range(5000)}),
        ("n", 128),
        ("best_of", 1000),
        ("top_logprobs", 10**9),
        ("seed", 2**64),
    ],
)
def test_lists_and_counts_are_bounded_by_name(
    server: Server, http: httpx.Client, path: str, field: str, value: object
) -> None:
    own = json.loads(f"{{{ENDPOINTS[path]}}}")
    response = http.post(path, json={"model": "auto", **own, field: value})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"].split(".")[0] == field
    assert server.engine.submitted == []
