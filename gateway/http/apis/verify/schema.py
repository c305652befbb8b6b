"""POST /v1/verify: the request, and what comes back."""

from typing import Annotated, Final, Literal

from pydantic import Field, JsonValue

from outrider.engine.request import MAX_HYPOTHESES
from outrider.gateway.contract.schema.common import (
    MAX_CHOICES,
    WHOLE,
    CascadeQuality,
    ListOf,
    OptionalModelName,
    RequestModel,
)
from outrider.gateway.contract.schema.responses import DifferenceReport, Usage
from outrider.gateway.contract.schema.structs import CompleteModel, says


class OtherHypothesis(RequestModel):
    """Another way in which the answer may have been written; what is absent is as claimed."""

    seed: Annotated[int, Field(ge=0, le=2**64 - 1), WHOLE] | None = None
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Field(ge=0, le=2**31 - 1), WHOLE] | None = None
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    quality: Literal["lossless"] | CascadeQuality | None = None


class VerifyRequest(RequestModel):
    """An answer to verify, with what it was an answer to."""

    answer: Annotated[
        dict[str, JsonValue],
        Field(description="A whole answer: of chat, completions, responses or messages."),
    ]
    request: Annotated[
        dict[str, JsonValue] | None,
        Field(
            description="Its request, as a chat or a completion; needed where the answer has no "
            "`prompt_token_ids`."
        ),
    ] = None
    index: Annotated[
        Annotated[int, Field(ge=0, lt=MAX_CHOICES * MAX_CHOICES), WHOLE],
        Field(description="Which of the answer's choices."),
    ] = 0
    model: Annotated[
        OptionalModelName, Field(description="The model that judges; absent: the receipt's.")
    ] = None
    hypotheses: Annotated[ListOf[OtherHypothesis], Field(max_length=MAX_HYPOTHESES - 1)] | None = (
        None
    )


class CheckedReceipt(CompleteModel):
    """What is known of the receipt without asking a model."""

    id: str
    issued_at: int
    key_id: str
    prompt_matches: Annotated[
        bool | None, says("The prompt is the receipt's; null where it could not be opened.")
    ]
    answer_matches: Annotated[bool | None, says("The answer's tokens are the receipt's.")]
    numerics_match: Annotated[
        bool | None, says("The judging model has the arithmetic of the answer.")
    ]


class JudgedHypothesis(CompleteModel):
    """How the answer agrees with one way of writing it."""

    name: Annotated[str, says("`claimed`, or what differs from it, such as `seed=7`.")]
    num_matching: int
    share: Annotated[float, says("Of the answer's tokens.")]
    mean_gap: Annotated[float, says("Between the chosen and the given token, over all tokens.")]
    first_difference: DifferenceReport | None


class VerificationReport(CompleteModel):
    """What a verification found."""

    object: Literal["verification"]
    model: str
    matches: Annotated[bool, says("Every token is the one that the claim leads to.")]
    num_tokens: int
    explanation: Annotated[
        str, says("The hypothesis that explains most; `edited text`, or `none` of them.")
    ]
    hypotheses: Annotated[list[JudgedHypothesis], says("The claim first.")]
    retokenised: Annotated[bool, says("The answer had no token ids, so its text was tokenised.")]
    receipt: Annotated[CheckedReceipt | None, says("Null for an answer without one.")]
    notes: list[str]
    usage: Usage


VERIFY_MODELS: Final[tuple[type, ...]] = (VerifyRequest, VerificationReport)
