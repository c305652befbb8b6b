"""The fields that are read of every request, whichever tier answers it.

An upstream server may know fields that the local models do not, so that the rest of the request is
kept as it came; the local models read it again with their own, strict schema.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Final, NoReturn

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from outrider.gateway.contract.errors.tree import BadRequestError
from outrider.gateway.contract.errors.validation import bad_request
from outrider.gateway.contract.schema.common import (
    WHOLE,
    EndUser,
    ModelName,
    OutriderOptions,
    TokenLimit,
)
from outrider.gateway.contract.schema.completions import PromptText
from outrider.gateway.contract.schema.kinds import AUTO, Endpoint
from outrider.gateway.contract.schema.parsing import RequestJson

MAX_ENVELOPE_CHOICES = 128

_MAX_NESTING: Final = 200  # as pydantic's own reader of JSON has it
_WHOLE_NUMBERS: Final = ("max_tokens", "max_completion_tokens", "n", "best_of", "seed")
_NO_OPTIONS: Final = OutriderOptions()


class _Lenient(BaseModel):
    """Base: strict in declared fields; other fields are kept for upstream servers."""

    model_config = ConfigDict(
        extra="ignore", strict=True, frozen=True, allow_inf_nan=False, protected_namespaces=()
    )


class EnvelopeStreamOptions(_Lenient):
    """Options of a stream."""

    include_usage: bool | None = None


class Envelope(_Lenient):
    """The fields that decide which tier answers a request, and how the answer is passed on."""

    model: ModelName = AUTO
    max_tokens: TokenLimit = None
    max_completion_tokens: TokenLimit = None
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1), WHOLE] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_ENVELOPE_CHOICES), WHOLE] | None = None
    best_of: Annotated[int, Field(ge=0, le=MAX_ENVELOPE_CHOICES), WHOLE] | None = None
    stream: bool | None = None
    stream_options: EnvelopeStreamOptions | None = None
    user: EndUser | None = None
    safety_identifier: EndUser | None = None
    outrider: OutriderOptions | None = None

    @property
    def is_streamed(self) -> bool:
        """True if the client requests a stream."""
        return bool(self.stream)

    @property
    def wants_usage_chunk(self) -> bool:
        """True if a stream ends with a chunk that carries `usage`."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def num_choices(self) -> int:
        """Answers to each prompt."""
        return self.n or 1

    @property
    def token_limit(self) -> int | None:
        """The most tokens a choice may have; None for the server's default."""
        newer = self.max_completion_tokens
        return self.max_tokens if newer is None else newer

    @property
    def end_user(self) -> str:
        """The end user, as the request names it; empty where it names none."""
        return self.safety_identifier or self.user or ""

    @property
    def options(self) -> OutriderOptions:
        """The `outrider` object; where there is none, one that asks for nothing."""
        return self.outrider or _NO_OPTIONS


class ChatEnvelope(Envelope):
    """Envelope of a chat request. The contents of messages are not validated."""

    messages: Annotated[list[Any], Field(min_length=1)]


class CompletionEnvelope(Envelope):
    """Envelope of a completion request. The contents of the prompt are not validated."""

    suffix: Any = None
    input_extra: Any = None
    prompt: PromptText | Annotated[list[Any], Field(min_length=1)]


_ENVELOPES: Final[dict[Endpoint, type[Envelope]]] = {
    "chat": ChatEnvelope,
    "completion": CompletionEnvelope,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRequest:
    """A request's JSON, and what was read of it."""

    envelope: Envelope
    document: dict[str, Any]

    def outward(self) -> dict[str, Any]:
        """A shallow copy of the document without its `outrider` object.

        Whole numbers are written as they were read: 2.0 is not 2 for every reader.
        """
        sent = {name: value for name, value in self.document.items() if name != "outrider"}
        return sent | {
            name: getattr(self.envelope, name) for name in _WHOLE_NUMBERS if sent.get(name)
        }


def read_request(body: RequestJson, endpoint: Endpoint) -> ReadRequest:
    """JSON to an envelope. Raises BadRequestError that names the field."""
    envelope_type = _ENVELOPES[endpoint]
    try:
        document = body.document
        envelope = envelope_type.model_validate(document)
    except (ValueError, RecursionError) as error:
        _refuse(body.raw, envelope_type, error)
    if _is_nested_too_deeply(body.raw, document):
        # In the words of pydantic, which says so where such a body also has other faults.
        raise BadRequestError(
            "The body is not valid JSON: recursion limit exceeded.", code="invalid_json"
        )
    return ReadRequest(envelope=envelope, document=document)


def _refuse(body: bytes, envelope_type: type[Envelope], error: Exception) -> NoReturn:
    """Raise pydantic's complaint about the body; the slow path of an invalid body."""
    try:
        envelope_type.model_validate_json(body)
    except ValidationError as complaint:
        raise bad_request(complaint, body) from None
    # pydantic reads NaN and numbers beyond all bounds, which are no JSON.
    raise BadRequestError(f"The body is not valid JSON: {error}.", code="invalid_json") from None


def _is_nested_too_deeply(body: bytes, document: dict[str, Any]) -> bool:
    """Return whether JSON is nested too deeply for some parsers and encoders."""
    if body.count(b"[") + body.count(b"{") <= _MAX_NESTING:
        return False
    level: list[Any] = [document]
    for _ in range(_MAX_NESTING):
        level = [
            child
            for parent in level
            for child in (parent.values() if type(parent) is dict else parent)
            if type(child) is dict or type(child) is list
        ]
        if not level:
            return False
    return True
