"""Requests that are passed on as they came: embeddings, reranking, images and audio."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, Final

import msgspec

from outrider.gateway.contract.schema.kinds import Endpoint, Units
from outrider.gateway.settings.server_traits import ServerTraits
from outrider.gateway.upstream.call import Chunk, UpstreamCall, WholeAnswer
from outrider.gateway.upstream.dialects.base import Resume, ServerRefusal, garbage, read_refusal
from outrider.gateway.upstream.upstream_usage import UpstreamUsage

_MOST_TOKENS: Final = 2**40


@dataclass(frozen=True, slots=True, kw_only=True)
class PassedWork:
    """The most that a request can take."""

    num_prompt_tokens: int
    """Of its text and of given images."""
    num_likely_tokens: int
    """The same by the text's length, to be booked where the server tells none."""
    units: Units | None = None
    """Images or sound."""
    tokens_per_unit: int = 0
    """Tokens that are written for one of them."""

    @property
    def num_completion_tokens(self) -> int:
        """Return the most tokens that are written."""
        return 0 if self.units is None else self.units.num * self.tokens_per_unit

    def usage(self, count: int | None = None) -> UpstreamUsage:
        """Return the usage where no tokens are told; `count`: of its units, if these are told."""
        if self.units is None:
            return UpstreamUsage(num_prompt_tokens=self.num_likely_tokens, source="estimated")
        units = self.units if count is None else self.units._replace(num=count)
        return UpstreamUsage(
            num_prompt_tokens=self.num_likely_tokens,
            num_completion_tokens=units.num * self.tokens_per_unit,
            source="estimated",
            units=units,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PassedRequest:
    """A request as a server gets it."""

    path: str
    """Below the server's base URL."""
    content_type: str
    body: bytes
    expects_json: bool
    """Its answer is JSON; else it is audio or plain text, and is not looked into."""
    work: PassedWork


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
        work = self._passed.work
        if not self._passed.expects_json:
            return WholeAnswer(body=body, usage=work.usage())
        try:
            document = msgspec.json.decode(body)
        except (ValueError, RecursionError):
            document = None
        if not isinstance(document, dict | list):
            raise garbage(self._tier, "an answer that is no JSON")
        told = document if isinstance(document, dict) else {}
        usage = work.usage(_reported_units(work, told))
        if (tokens := _tokens(told.get("usage"))) is not None:
            usage = replace(tokens, units=usage.units)
        return WholeAnswer(body=body, usage=usage)

    def refusal(self, status: int, body: bytes) -> ServerRefusal:
        """Read a 4xx answer; never raises."""
        return read_refusal(self._tier, status, body)


def _reported_units(work: PassedWork, document: Mapping[str, Any]) -> int | None:
    """Return the images or seconds that an answer tells of; None where it tells none."""
    match work.units:
        case ("image", _):
            images = document.get("data")
            return len(images) if isinstance(images, list) else None
        case ("audio_second", _):
            usage = document.get("usage")
            seconds = usage.get("seconds") if isinstance(usage, Mapping) else None
            seconds = document.get("duration") if seconds is None else seconds
            if isinstance(seconds, int | float) and 0 <= seconds <= _MOST_TOKENS:
                return ceil(seconds)
    return None


def _tokens(told: object) -> UpstreamUsage | None:
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
