"""Requests that are over, and a clock that goes on by hand."""

from typing import Any

from outrider.gateway.contract.answers.outcomes import RequestOutcome


def outcome(**fields: Any) -> RequestOutcome:
    made: dict[str, Any] = {
        "request_id": "r",
        "client_request_id": "c",
        "key_id": "key-a",
        "tier": "large",
        "slo_class": "short-chat",
        "slo_ttft_s": 1.0,
        "ttft_s": 0.1,
        "inter_token_s": 0.02,
        "duration_s": 0.5,
        "num_completion_tokens": 10,
        "cost_nanos": 2_000_000,
        "charge_nanos": 3_000_000,
    }
    return RequestOutcome(**(made | fields))
