"""/metrics: names, labels, and that the numbers are what happened."""

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from outrider.gateway.tenancy.metering.gateway_metrics import GatewayMetrics
from tests.gateway.conftest import Server
from tests.gateway.scripted_client import some_stats

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


def samples(text: str) -> dict[tuple[str, tuple[str, ...]], float]:
    """Values by name and label values, in the labels' alphabetical order."""
    return {
        (sample.name, tuple(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_the_engines_numbers() -> None:
    text = GatewayMetrics().exposition(some_stats()).decode()
    found = samples(text)
    assert found["outrider_num_requests_running", ("large",)] == 3
    assert found["outrider_num_requests_waiting", ("small",)] == 2
    assert found["outrider_kv_cache_usage_perc", ("large",)] == 0.5
    assert found["outrider_prefix_cache_queries_total", ("large",)] == 60
    assert found["outrider_prefix_cache_hits_total", ("large",)] == 48
    assert found["outrider_num_preemptions_total", ("large",)] == 7
    assert found["outrider_num_requests_held", ("large",)] == 1
    assert found["outrider_request_holds_total", ("large",)] == 9
    assert found["outrider_request_held_seconds_total", ("large",)] == 2.5
    assert found["outrider_kv_folder_bytes", ()] == 9000
    assert found["outrider_kv_folder_restored_tokens_total", ()] == 320
    assert found["outrider_kv_folder_saved_seconds_total", ()] == 4.5
    assert found["outrider_kv_folder_damaged_total", ()] == 1
    assert found["outrider_engine_steps_total", ()] == 500
    assert found["outrider_spec_decode_compared_steps_total", ("large",)] == 300
    assert found["outrider_spec_decode_compared_plain_steps_total", ("large",)] == 390
    assert found["outrider_engine_step_seconds_total", ("host",)] == 1.25
    assert found["outrider_engine_step_seconds_total", ("passes",)] == 8.5
    assert found["outrider_spec_decode_num_drafts_total", ("large",)] == 11
    assert found["outrider_spec_decode_num_draft_tokens_total", ("large",)] == 130
    assert found["outrider_spec_decode_num_accepted_tokens_total", ("large",)] == 70
    per_position = "outrider_spec_decode_num_accepted_tokens_per_pos_total"
    assert found[per_position, ("0", "large")] == 40
    assert found[per_position, ("1", "large")] == 30
    assert found["outrider_spec_decode_num_unratified_tokens_total", ("large",)] == 6
    per_source = "outrider_spec_decode_num_{}_tokens_per_source_total"
    by_source = {
        name: {labels: value for (other, labels), value in found.items() if other == name}
        for name in (per_source.format("draft"), per_source.format("accepted"))
    }
    assert list(by_source.values()) == [
        {
            ("0", "model"): 50,
            ("1", "model"): 45,
            ("0", "suffix"): 20,
            ("0", "prediction"): 16,
            ("1", "prediction"): 15,
        },
        {
            ("0", "model"): 33,
            ("1", "model"): 22,
            ("0", "suffix"): 9,
            ("0", "prediction"): 14,
            ("1", "prediction"): 12,
        },
    ]


def test_no_engine_no_numbers() -> None:
    assert b"num_requests_running" not in GatewayMetrics().exposition(None)


def test_endless_reasons_are_bounded() -> None:
    metrics = GatewayMetrics()
    for i in range(200):
        metrics.routed("small", f"because of {i}")
        metrics.routed("large", f"weak ({i} < 9)")
    reasons = {
        key[1] for key in samples(metrics.exposition(None).decode())
        if key[0] == "outrider_router_decisions_total"
    }  # fmt: skip
    assert len(reasons) < 70
    assert ("weak", "large") in reasons
    assert ("other", "small") in reasons


def value(http: httpx.Client, name: str, *labels: str) -> float:
    return samples(http.get("/metrics").text).get((f"outrider_{name}", labels), 0.0)


def test_requests_are_counted(server: Server, http: httpx.Client) -> None:
    server.says("Hello there", group=2)
    names = [
        ("time_to_first_token_seconds_count", "large"),
        ("inter_token_latency_seconds_count", "large"),
        ("e2e_request_latency_seconds_count", "large"),
        ("request_queue_time_seconds_count", "large"),
        ("prompt_tokens_total", "large"),
        ("generation_tokens_total", "large"),
        ("request_success_total", "stop", "large"),
        ("router_decisions_total", "requested", "large"),
    ]
    before = [value(http, *name) for name in names]
    answer = http.post("/v1/chat/completions", json={**CHAT, "model": "large", "n": 2}).json()
    added = [value(http, *name) - start for name, start in zip(names, before, strict=True)]
    num_tokens = len(server.encode("Hello there"))
    num_gaps = 2 * (-(-num_tokens // 2) - 1)
    num_prompt = answer["usage"]["prompt_tokens"]
    assert added == [2, num_gaps, 1, 2, num_prompt, 2 * num_tokens, 2, 1]


@pytest.mark.parametrize(
    ("script", "outcome"), [({"failure": ("x", "y")}, "error"), ({"hangs": True}, "abort")]
)
def test_bad_ends_are_counted(
    server: Server, http: httpx.Client, script: dict[str, object], outcome: str
) -> None:
    server.says("Hello", **script)
    before = value(http, "request_success_total", outcome, "small")
    body = {**CHAT, "model": "small"}
    try:
        http.post("/v1/chat/completions", json=body, timeout=0.3)
    except httpx.ReadTimeout:
        assert outcome == "abort"
    after = before
    while after == before:  # the test's own time limit ends this
        after = value(http, "request_success_total", outcome, "small")
    assert after == before + 1


def test_decisions_without_their_figures(server: Server, http: httpx.Client) -> None:
    before = value(http, "router_decisions_total", "router: short", "small")
    http.post("/v1/chat/completions", json={**CHAT, "model": "auto"})
    assert value(http, "router_decisions_total", "router: short", "small") == before + 1
