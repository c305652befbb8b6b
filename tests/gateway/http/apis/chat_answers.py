"""Chat answers as gateway/answering/streaming/sse.py writes them, for what reads them."""

import json
from typing import Any

DONE = b"data: [DONE]\n\n"
ANSWER_ID = "chatcmpl-ab12"
REPORT = {
    "tier": "small",
    "reason": "router: short",
    "route_tier": "small",
    "escalated": False,
    "quality": 0.9,
    "confidence": None,
    "held_tokens": 0,
    "reused_tokens": 0,
    "discarded_tokens": 0,
    "drafted_tokens": 0,
    "accepted_tokens": 0,
    "unratified_tokens": 0,
    "mean_emitted_tokens": 1.0,
    "ttft_s": 0.1,
    "cached_tokens_by_level": {"device": 0, "disk": 0, "peer": 0},
    "queue_s": 0.0,
    "seed": None,
    "hand_off": None,
    "degraded": False,
    "arm": None,
}
USAGE = {
    "prompt_tokens": 9,
    "completion_tokens": 5,
    "total_tokens": 14,
    "prompt_tokens_details": {"cached_tokens": 4},
    "completion_tokens_details": {
        "reasoning_tokens": 2,
        "accepted_prediction_tokens": 0,
        "rejected_prediction_tokens": 0,
        "discarded_tokens": 0,
    },
}


def event(document: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(document, ensure_ascii=False).encode() + b"\n\n"


def chunk(
    *, finish: str | None = None, logprobs: Any = None, fields: Any = None, **delta: Any
) -> bytes:
    """One event with a choice; `fields` stand at the top level."""
    choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
    document = {
        "id": ANSWER_ID,
        "object": "chat.completion.chunk",
        "created": 1700000000,
        "model": "test/small-model",
        "choices": [choice],
        "usage": None,
    }
    return event(document | (fields or {}))


def call(index: int, arguments: str, call_id: str = "", name: str = "") -> dict[str, Any]:
    """A call's delta; its first one has an id and a name."""
    delta: dict[str, Any] = {"index": index, "function": {"arguments": arguments}}
    if name:
        delta |= {"id": call_id, "type": "function"}
        delta["function"]["name"] = name
    return delta


def ending(**fields: Any) -> bytes:
    """The usage chunk, and [DONE]."""
    document = {
        "id": ANSWER_ID,
        "created": 1700000000,
        "model": "test/small-model",
        "choices": [],
        "usage": USAGE,
        "outrider": REPORT,
    }
    return event(document | fields) + DONE


def completion(finish: str = "stop", logprobs: Any = None, **message: Any) -> bytes:
    """A whole answer."""
    choice = {
        "index": 0,
        "message": {"role": "assistant", "refusal": None, **message},
        "logprobs": logprobs,
        "finish_reason": finish,
    }
    document = {
        "id": ANSWER_ID,
        "object": "chat.completion",
        "created": 1700000000,
        "model": "test/small-model",
        "choices": [choice],
        "usage": USAGE,
        "outrider": REPORT,
    }
    return json.dumps(document, ensure_ascii=False).encode()


def logprobs_of(*texts: str) -> dict[str, Any]:
    """OpenAI's object."""
    entries = [
        {"token": text, "logprob": -0.25, "bytes": list(text.encode()), "top_logprobs": []}
        for text in texts
    ]
    return {"content": entries, "refusal": None}
