"""Request and answer bodies of /v1/feedback."""

from typing import Annotated, Any, Final, Literal

from pydantic import Discriminator, Field, Tag

from outrider.gateway.contract.schema.common import RequestModel
from outrider.gateway.contract.schema.openapi import failures, json_content, success
from outrider.gateway.contract.schema.structs import CompleteModel

_MAX_SCORE: Final = 1e9
_ONE_LINE: Final = r"^[^\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]*$"
"""Excludes characters that move a terminal's cursor or turn the text around them."""

AnsweredId = Annotated[
    str,
    Field(
        min_length=1,
        max_length=256,
        description="The answer's id, or the x-request-id that came with it.",
    ),
]
FeedbackName = Annotated[
    str,
    Field(
        min_length=1,
        max_length=64,
        pattern=r"^[A-Za-z0-9._-]+$",
        description="The aspect that was judged. A request has one outcome under each name.",
    ),
]
FeedbackLabel = Annotated[str, Field(min_length=1, max_length=64, pattern=_ONE_LINE)]
Score = Annotated[float, Field(ge=-_MAX_SCORE, le=_MAX_SCORE)]


class ScoreFeedback(RequestModel):
    """A number: the higher, the better."""

    request_id: AnsweredId
    score: Score
    name: FeedbackName = "score"


class SuccessFeedback(RequestModel):
    """Feedback on whether the answer served its purpose."""

    request_id: AnsweredId
    success: bool
    name: FeedbackName = "success"


class LabelFeedback(RequestModel):
    """Feedback as a label."""

    request_id: AnsweredId
    label: FeedbackLabel
    name: FeedbackName = "label"


def _model_of(body: object) -> str:
    """Return the model that a body's fields select; a score where there are none."""
    if isinstance(body, dict) and "score" not in body:
        for field, name in (("success", "SuccessFeedback"), ("label", "LabelFeedback")):
            if field in body:
                return name
    return "ScoreFeedback"


AnyFeedback = Annotated[
    Annotated[ScoreFeedback, Tag("ScoreFeedback")]
    | Annotated[SuccessFeedback, Tag("SuccessFeedback")]
    | Annotated[LabelFeedback, Tag("LabelFeedback")],
    Discriminator(_model_of),
]


class FeedbackReceipt(CompleteModel, kw_only=True):
    """The feedback is stored; it replaces earlier feedback of this name."""

    object: Literal["feedback"] = "feedback"
    request_id: str
    name: str


FEEDBACK_MODELS: Final[tuple[type, ...]] = (
    ScoreFeedback,
    SuccessFeedback,
    LabelFeedback,
    FeedbackReceipt,
)
"""Models for the components of the OpenAPI document."""

_FAILURES: Final = {
    404: "This key has no recent answer with this id.",
    503: "The database is unavailable.",
}


FEEDBACK_OPERATION: Final[dict[str, Any]] = {
    "operationId": "giveFeedback",
    "requestBody": {"required": True, "content": json_content(*FEEDBACK_MODELS[:-1])},
    "responses": {"200": success(FeedbackReceipt, "It is kept.")}
    | failures(400, 401, 413, 415, *_FAILURES, words=_FAILURES),
}
"""The operation for the OpenAPI document."""
