"""Events of /v1/responses, held against OpenAI's own types and against our document's."""

import json
from typing import Any

from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from outrider.gateway.http.apis.responses.answers import ResponseEvent, ResponseObject
from tests.gateway.answers import read_answer

# What OpenAI's server sends and its client's types leave out, here and there, and our own report.
BESIDE = {"store", "bytes", "outrider", "status"}

_event_type: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def unknown_fields(value: Any) -> set[str]:
    """The names of fields, at any depth, that the types of OpenAI's client do not declare."""
    if isinstance(value, list):
        return {name for item in value for name in unknown_fields(item)}
    if not isinstance(value, BaseModel):
        return set()
    own = set(value.__pydantic_extra__ or {})
    fields = [getattr(value, name) for name in type(value).model_fields]
    return own | {name for field in fields for name in unknown_fields(field)}


def read_response(body: bytes) -> dict[str, Any]:
    """A whole response."""
    document = json.loads(body)
    read_answer(ResponseObject, body)
    assert unknown_fields(Response.model_validate(document)) <= BESIDE
    return dict(document)


def read_events(stream: bytes) -> list[dict[str, Any]]:
    """The events of a stream, in order and of the right types; comments are left out."""
    events = []
    for block in stream.decode().split("\n\n")[:-1]:
        if block.startswith(":"):
            continue
        name, data = block.split("\n")
        document = json.loads(data.removeprefix("data: "))
        assert name == f"event: {document['type']}"
        assert document["sequence_number"] == len(events)
        read_answer(ResponseEvent, data.removeprefix("data: "))
        typed = _event_type.validate_python(document)
        assert typed.type == document["type"]
        assert unknown_fields(typed) <= BESIDE
        events.append(document)
    return events


def rebuilt(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The output, made of nothing but what was added and the deltas."""
    items: dict[int, dict[str, Any]] = {}
    for event in events:
        index = event.get("output_index")
        match event["type"].removeprefix("response."):
            case "output_item.added":
                assert index == len(items)
                items[index] = json.loads(json.dumps(event["item"]))
            case "content_part.added":
                items[index]["content"].append(json.loads(json.dumps(event["part"])))
            case "reasoning_summary_part.added":
                items[index]["summary"].append(json.loads(json.dumps(event["part"])))
            case "output_text.delta":
                part = items[index]["content"][event["content_index"]]
                part["text"] += event["delta"]
                part["logprobs"] += event["logprobs"]
            case "refusal.delta":
                items[index]["content"][event["content_index"]]["refusal"] += event["delta"]
            case "reasoning_summary_text.delta":
                items[index]["summary"][event["summary_index"]]["text"] += event["delta"]
            case "function_call_arguments.delta" | "custom_tool_call_input.delta" as kind:
                items[index]["input" if "custom" in kind else "arguments"] += event["delta"]
            case "output_item.done":
                items[index]["status"] = event["item"]["status"]
                assert items[index] == event["item"]
    return [items[index] for index in sorted(items)]
