"""POST /infill as a surface over completions."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

import msgspec

from outrider.gateway.answering.reading.misplaced_options import refuse_misplaced_options
from outrider.gateway.contract.errors.http import Problem
from outrider.gateway.http.apis.api import ANYONE, Caller, TranslatedRequest
from outrider.gateway.http.apis.infill.schema import IGNORED, InfillRequest
from outrider.gateway.http.apis.infill.writer import InfillWriter
from outrider.gateway.http.apis.reading import read_body

_SAMPLING: Final = {
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "seed", "stop")},
    **{name: name for name in ("presence_penalty", "frequency_penalty", "ignore_eos")},
    **{name: name for name in ("json_schema", "model")},
    "repeat_penalty": "repetition_penalty",
}
_NAMES: Final = {
    "suffix": "input_suffix",
    "prompt": "input_prefix",
    "max_tokens": "n_predict",
    "repetition_penalty": "repeat_penalty",
}
"""Fields with other names in this API."""
_encode: Final = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True, kw_only=True)
class InfillApi:
    """/infill. Keeps nothing between requests."""

    has_upstream_tiers: bool
    ignores_unknown: bool = False
    """Unknown fields are left out."""
    clock: Callable[[], float] = time.monotonic
    name: ClassVar[str] = "infill"

    async def read(self, body: bytes, _: Caller = ANYONE) -> TranslatedRequest:
        """Translate a request into a completion's. Raises BadRequestError."""
        read = await read_body(InfillRequest, body, ignores_unknown=self.ignores_unknown)
        if self.has_upstream_tiers:
            refuse_misplaced_options(read.document)
        request = read.request
        idle = (name for name in IGNORED if getattr(request, name) is not None)
        return TranslatedRequest(
            chat_body=_encode(completion_fields(request)),
            writer=InfillWriter(request.model, clock=self.clock),
            ignored=(*read.ignored, *idle),
            endpoint="completion",
        )

    def problem_body(self, problem: Problem) -> bytes:
        """The JSON of an error, in which fields have this API's names."""
        return _renamed(problem).body()


def completion_fields(request: InfillRequest) -> dict[str, Any]:
    """Return the request of the same text as a completion."""
    given = {theirs: getattr(request, ours) for ours, theirs in _SAMPLING.items()}
    fields: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if request.grammar:  # llama.cpp's default is an empty one
        fields["grammar"] = request.grammar
    fields["prompt"] = request.input_prefix + request.prompt
    fields["suffix"] = request.input_suffix
    files = request.input_extra or []
    if files or not request.input_suffix:  # other servers do not know the field
        fields["input_extra"] = [
            file.model_dump(exclude_none=True, exclude={"time"}) for file in files
        ]
    if request.n_predict is not None and request.n_predict >= 0:
        fields["max_tokens"] = request.n_predict
    if request.stream:
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
    own: dict[str, Any] = {"fit_context": True}
    if request.outrider is not None:
        own |= request.outrider.model_dump(by_alias=True, exclude_unset=True)
    return fields | {"outrider": own}


def _renamed(problem: Problem) -> Problem:
    param, message = problem.param, problem.message
    if param not in _NAMES:
        return problem
    name = _NAMES[param]
    if message.startswith(param):
        message = name + message.removeprefix(param)
    return replace(problem, param=name, message=message)
