"""How an answer is said to have been written: by its receipt, or else by its request."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from outrider.gateway.contract.errors.tree import BadRequestError
from outrider.gateway.contract.schema.kinds import AUTO
from outrider.gateway.contract.schema.receipts import Receipt, ReceiptCascade
from outrider.gateway.http.apis.verify.given import GivenAnswer, receipt_choice
from outrider.gateway.http.apis.verify.schema import OtherHypothesis
from outrider.verifier.params import TIERS

CLAIMED: Final = "claimed"
_SAMPLING: Final = (
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "logit_bias", "min_tokens", "stop_token_ids"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What the answer's tokens are said to come from."""

    model: str
    """The one that judges, where the client names none."""
    hypothesis: Mapping[str, Any]
    """`HypothesisOptions`."""
    needs_request: str | None = None
    """What of the request decided tokens, and is in no receipt."""

    def variants(self, others: list[OtherHypothesis]) -> list[tuple[str, dict[str, Any]]]:
        """Return the hypotheses with their names, the claim first."""
        named = [(CLAIMED, dict(self.hypothesis))]
        for other in others:
            changed = other.model_dump(exclude_none=True)
            name = ", ".join(f"{field}={_shown(value)}" for field, value in changed.items())
            named.append((name or CLAIMED, {**self.hypothesis, **changed}))
        return named


def _shown(value: Any) -> str:
    """Return a hypothesis's value as its name has it; of a cascade its rule and alpha."""
    if isinstance(value, dict):
        return f"{value.get('rule') or 'opt'} {value['cascade']:g}"
    return value if isinstance(value, str) else f"{value:g}"


def claim_of(
    answer: GivenAnswer,
    receipt: Receipt | None,
    request: Mapping[str, Any] | None,
    defaults: Mapping[str, float],
) -> Claim:
    """Return the claim. Raises BadRequestError where nothing says how the answer was sampled.

    `defaults`: the server's, of sampling fields that a request does not set.
    """
    if receipt is not None:
        return _by_receipt(answer, receipt)
    if request is None:
        raise BadRequestError(
            "request: needed, since no receipt says how the answer was sampled.", param="request"
        )
    return _by_request(answer, request, defaults)


def _by_receipt(answer: GivenAnswer, receipt: Receipt) -> Claim:
    payload = receipt.payload
    _, choice = receipt_choice(receipt, answer.index)
    sampling = payload.sampling
    needs = [name for name in ("grammar", "thinking") if getattr(sampling, name) is not None]
    stream = choice.stream
    named = payload.model if payload.model not in (None, AUTO, *TIERS) else choice.tier
    return Claim(
        model=named or str(answer.document.get("model") or AUTO),
        hypothesis={
            "temperature": float(sampling.temperature),
            "top_p": float(sampling.top_p),
            "top_k": sampling.top_k,
            "min_p": float(sampling.min_p),
            "presence_penalty": float(sampling.presence_penalty),
            "frequency_penalty": float(sampling.frequency_penalty),
            "repetition_penalty": float(sampling.repetition_penalty),
            "logit_bias": {str(token): float(bias) for token, bias in sampling.logit_bias},
            "min_tokens": sampling.min_tokens,
            "stop_token_ids": sampling.stop_token_ids,
            "seed": int(payload.seed or 0),
            "choice": answer.index if stream is None else stream // 2,
            "tier": None if stream is None else TIERS[stream % 2],
            "quality": _quality(sampling.cascade),
        },
        needs_request=" and ".join(needs) or None,
    )


def _by_request(
    answer: GivenAnswer, request: Mapping[str, Any], defaults: Mapping[str, float]
) -> Claim:
    """Return what a request asks for; of an answer without a seed there is no telling."""
    options = request.get("outrider")
    quality = options.get("quality") if isinstance(options, dict) else None
    fields = {**defaults, "temperature": defaults.get("temperature", 1.0)}
    fields |= {name: request[name] for name in _SAMPLING if request.get(name) is not None}
    seed = request.get("seed")
    seed = answer.report.get("seed") if seed is None else seed
    if seed is None and fields["temperature"]:
        raise BadRequestError(
            "answer.outrider.seed: a sampled answer is verified by its seed, which neither answer "
            "nor request has.",
            param="answer.outrider.seed",
        )
    tier = answer.report.get("tier")
    named = request.get("model", AUTO)
    is_auto = named == AUTO and tier in TIERS
    if fields.get("top_k") == -1:
        fields["top_k"] = 0
    return Claim(
        model=str(tier if is_auto else named),
        hypothesis={
            **fields,
            "seed": int(seed or 0) % 2**64 if isinstance(seed, int | None) else seed,
            "choice": answer.index,
            "tier": tier if tier in TIERS else None,
            "quality": quality,
        },
        needs_request="request",
    )


def judged_by(claim: Claim, model: str | None) -> Claim:
    """Return the claim with the model that judges."""
    return claim if model is None else replace(claim, model=model)


def _quality(cascade: ReceiptCascade | None) -> dict[str, Any] | None:
    """Return a receipt's cascade as `outrider.quality` has it."""
    return None if cascade is None else {"cascade": float(cascade.alpha), "rule": cascade.rule}
