"""A judged completion, written as the report of a verification."""

from dataclasses import dataclass
from typing import Final

import msgspec

from outrider.gateway.contract.errors.http import Problem
from outrider.gateway.contract.errors.tree import GenerationError
from outrider.gateway.contract.schema.errors import DeliveredReport
from outrider.gateway.contract.schema.receipts import Receipt
from outrider.gateway.contract.schema.responses import JudgementReport, Usage
from outrider.gateway.http.apis.api import EVENT_STREAM
from outrider.gateway.http.apis.verify.claim import CLAIMED
from outrider.gateway.http.apis.verify.given import opens
from outrider.gateway.http.apis.verify.schema import (
    CheckedReceipt,
    JudgedHypothesis,
    VerificationReport,
)

EDITED: Final = "edited text"
_ENOUGH: Final = 0.9
"""The share from which on a hypothesis explains an answer. Wrong seeds have half of it."""


class _Choice(msgspec.Struct):
    judgements: list[JudgementReport]
    prompt_token_ids: list[int] | None = None


class _Judged(msgspec.Struct):
    """A completion's or a chat's answer, as far as it is read here."""

    model: str
    choices: list[_Choice]
    usage: Usage
    prompt_token_ids: list[int] | None = None
    system_fingerprint: str | None = None


_read: Final = msgspec.json.Decoder(_Judged).decode
_encode: Final = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyWriter:
    """Writes one report. Use once."""

    index: int
    token_ids: tuple[int, ...]
    names: tuple[str, ...]
    """Of the hypotheses."""
    receipt: Receipt | None
    retokenised: bool
    notes: tuple[str, ...]
    is_edited: bool
    """The text is not that of its token ids."""
    media_type: str = EVENT_STREAM

    def part(self, part: bytes) -> bytes:
        """Return a part of a stream, which no verification is."""
        return part

    def ending_badly(self, problem: Problem, delivered: DeliveredReport | None) -> bytes:
        """Return the error that ends a stream."""
        del delivered
        return problem.body()

    def whole(self, body: bytes) -> bytes:
        """Return the report. Raises GenerationError where nothing was judged."""
        try:
            judged = _read(body)
            choice = judged.choices[0]
        except (msgspec.ValidationError, IndexError):
            raise GenerationError(
                "The model did not judge the answer.", code="not_judged"
            ) from None
        prompt = tuple(choice.prompt_token_ids or judged.prompt_token_ids or ())
        checked = self._checked(prompt[: -len(self.token_ids)], judged.system_fingerprint)
        found = [
            _hypothesis(name, one) for name, one in zip(self.names, choice.judgements, strict=True)
        ]
        claimed = found[0]
        return _encode(
            VerificationReport(
                object="verification",
                model=judged.model,
                matches=claimed.num_matching == len(self.token_ids)
                and not self.is_edited
                and (checked is None or checked.answer_matches is not False)
                and (checked is None or checked.prompt_matches is not False),
                num_tokens=len(self.token_ids),
                explanation=EDITED if self.is_edited else explain(found, checked),
                hypotheses=found,
                retokenised=self.retokenised,
                receipt=checked,
                notes=list(self.notes),
                usage=judged.usage,
            )
        )

    def _checked(self, prompt: tuple[int, ...], fingerprint: str | None) -> CheckedReceipt | None:
        receipt = self.receipt
        if receipt is None:
            return None
        payload = receipt.payload
        is_known = fingerprint is not None and payload.numerics is not None
        return CheckedReceipt(
            id=payload.id,
            issued_at=payload.issued_at,
            key_id=receipt.key_id,
            prompt_matches=opens(receipt, self.index, "prompt", prompt) if prompt else None,
            answer_matches=opens(receipt, self.index, "answer", self.token_ids),
            numerics_match=fingerprint == payload.numerics if is_known else None,
        )


def _hypothesis(name: str, found: JudgementReport) -> JudgedHypothesis:
    return JudgedHypothesis(
        name=name,
        num_matching=found.num_matching,
        share=round(found.num_matching / found.num_tokens, 6),
        mean_gap=round(found.total_gap / found.num_tokens, 6),
        first_difference=found.differences[0] if found.differences else None,
    )


def explain(found: list[JudgedHypothesis], checked: CheckedReceipt | None) -> str:
    """Return what explains an answer best: a hypothesis, an edit of its text, or nothing known."""
    best = max(found, key=lambda each: (each.share, -each.mean_gap))  # of equal ones the first
    if best.share < _ENOUGH:
        return "none"
    if best is not found[0] or best.share == 1.0:
        return best.name
    is_edited = checked is None or checked.answer_matches is False
    if is_edited:
        return EDITED
    return CLAIMED if checked is not None and checked.numerics_match is False else "none"


def notes_of(
    receipt: Receipt | None, retokenised: bool, now_s: float, *, is_edited: bool
) -> tuple[str, ...]:
    """Return what a reader should know of how the answer was verified."""
    notes: list[str] = []
    if receipt is None:
        notes.append("There is no receipt: what was claimed is not signed.")
    elif receipt.payload.issued_at > now_s + 300:
        notes.append("The receipt is of the future: a clock is wrong.")
    if is_edited:
        notes.append("The text is not that of its token ids: one of them was changed.")
    if retokenised:
        notes.append("The text was tokenised again, which may give other tokens than it had.")
    return tuple(notes)
