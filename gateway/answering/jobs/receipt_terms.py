"""What a receipt says of an answer that has not begun: names of models, and what may be told."""

from collections.abc import Mapping

import msgspec

from outrider.engine.events import TierInfo
from outrider.gateway.answering.reading.parsed_request import ApiRequest, RequestContext
from outrider.gateway.contract.schema.kinds import AUTO
from outrider.gateway.receipts.signing_keys import SigningKeys
from outrider.verifier.params import Tier


class ReceiptTerms(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a receipt that is known with the job, and what signs it."""

    keys: SigningKeys
    model: str | None
    """As the request names it; None where the router chose."""
    reveals_tiers: bool
    checkpoints: Mapping[Tier, str]
    """The fingerprints of those that may answer, or have a part in its tokens."""
    adapters: Mapping[Tier, str]


def receipt_terms(
    request: ApiRequest,
    context: RequestContext,
    infos: tuple[TierInfo | None, ...],
    keys: SigningKeys,
) -> ReceiptTerms | None:
    """Return the terms of a request's receipt; None where it asked for none.

    `infos`: the tiers that may answer, or have a part in its tokens. What an alias or a chain
    stands for is not told.
    """
    if request.outrider is None or not request.outrider.receipt:
        return None
    known = [info for info in infos if info is not None]
    is_open = context.principal.scopes.shown() != "nothing" and not context.is_named_by_chain
    return ReceiptTerms(
        keys=keys,
        model=None if request.model == AUTO else request.model,
        reveals_tiers=is_open,
        checkpoints={info.tier: info.fingerprint for info in known},
        adapters={
            info.tier: f"{info.adapter.name} {info.adapter.version}".strip()
            for info in known
            if info.adapter is not None
        },
    )
