"""Requests that are passed on as they came: embeddings, reranking, images and audio."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from gateway.schema.kinds import Endpoint
from gateway.settings.server_traits import ServerTraits
from gateway.upstream.call import Chunk, UpstreamCall, WholeAnswer
from gateway.upstream.dialects.base import Resume, ServerRefusal, garbage, read_refusal
from gateway.upstream.upstream_usage import UpstreamUsage

_MOST_TOKENS: Final = 2**40


@dataclass(frozen=True, slots=True, kw_only=True)
class PassedRequest:
    """A request as a server gets it. `path` is below its base URL.

    `expects_json`: its answer is JSON; else it is audio or plain text, and is not looked into.
    """

    path: str
    content_type: str
    body: bytes
    expects_json: bool


class _NoStream:
    """The reader of a stream that does not come."""

    is_complete = False

    def read(self, event: bytes) -> Chunk:
        """Raise: no stream was asked for."""
        del event
        raise AssertionError("no stream was asked for, and none is read")


class PassingDialect:
    """Writes the request's own bytes, and reads no more of the answer than its usage."""

    def __init__(self, tier: str, passed: PassedRequest) -> None:
        self._tier = tier
        self._passed = passed

    def path(self, endpoint: Endpoint) -> str:
        """Return the request's path."""
        del endpoint
        return self._passed.path

    def headers(self, api_key: str | None) -> dict[str, str]:
        """Return none: the tier has them already."""
        del api_key
        return {}

    def body(self, call: UpstreamCall, traits: ServerTraits, resume: Resume | None = None) -> bytes:
        """Return the request's own bytes."""
        del call, traits, resume
        return self._passed.body

    def chunk_reader(self, call: UpstreamCall) -> _NoStream:
        """Return a reader that reads nothing."""
        del call
        return _NoStream()

    def whole(self, call: UpstreamCall, body: bytes) -> WholeAnswer:
        """Read the answer's usage. Raises UpstreamError where it is not the JSON expected."""
        del call
        if not self._passed.expects_json:
            return WholeAnswer(body=body)
        try:
            document = msgspec.json.decode(body)
        except (ValueError, RecursionError):
            document = None
        if not isinstance(document, dict | list):
            raise garbage(self._tier, "an answer that is no JSON")
        usage = document.get("usage") if isinstance(document, dict) else None
        return WholeAnswer(body=body, usage=_usage(usage))

    def refusal(self, status: int, body: bytes) -> ServerRefusal:
        """Read a 4xx answer; never raises."""
        return read_refusal(self._tier, status, body)


def _usage(told: object) -> UpstreamUsage | None:
    """Read the usage of any of these APIs; None where it is missing or makes no sense."""
    if not isinstance(told, Mapping):
        return None
    prompt = _count(told, "prompt_tokens", "input_tokens")
    completion = _count(told, "completion_tokens", "output_tokens")
    if prompt is None:  # rerankers tell the sum only
        total = _count(told, "total_tokens")
        prompt = None if total is None else total - (completion or 0)
    if prompt is None or prompt < 0:
        return None
    return UpstreamUsage(
        num_prompt_tokens=prompt, num_completion_tokens=completion or 0, source="reported"
    )


def _count(told: Mapping[str, Any], *names: str) -> int | None:
    for name in names:
        value = told.get(name)
        if type(value) is int and 0 <= value <= _MOST_TOKENS:
            return value
    return None
