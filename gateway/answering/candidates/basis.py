"""What an answer follows from."""

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.gateway.answering.reading.parsed_request import ParsedRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerBasis:
    """A request as it was read for its first model, its JSON, and the chain's further models."""

    parsed: ParsedRequest
    body: bytes
    models_behind: Sequence[str] = ()
