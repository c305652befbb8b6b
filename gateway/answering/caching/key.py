"""The key of an answer: everything that shapes it."""

import hashlib
from typing import Any, Final

import msgspec

from outrider.gateway.answering.candidates.basis import AnswerBasis

_LABELS: Final = frozenset(
    {
        *("user", "metadata", "safety_identifier", "store"),
        *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
        "anthropic_billing",
    }
)
"""Fields that change no answer."""
_OPTIONS: Final = "outrider"
_FREE_OPTIONS: Final = frozenset({"cache", "deadline_ms", "slo"})
"""Options that bound the time of an answer, not its text."""
_encode: Final = msgspec.json.Encoder(order="sorted").encode


def answer_key(basis: AnswerBasis, document: dict[str, Any], version: bytes) -> bytes:
    """Return 32 bytes that are equal for requests whose answers are distributed alike.

    They cover the request without its labels, whatever the order of its fields; the models behind
    its first one; its arms of experiments; the tiers that its key may use; the tenant's salt; and
    `version`, which stands for the gateway's models and settings.
    """
    context = basis.parsed.context
    principal = context.principal
    kept = {name: value for name, value in document.items() if name not in _LABELS}
    options = kept.get(_OPTIONS)
    if isinstance(options, dict):
        kept[_OPTIONS] = {k: v for k, v in options.items() if k not in _FREE_OPTIONS}
        if not kept[_OPTIONS]:
            del kept[_OPTIONS]
    tiers = principal.scopes.tiers
    shaped = (
        basis.parsed.endpoint,
        kept,
        basis.models_behind,
        context.arm,
        None if tiers is None else sorted(tiers),
        principal.cache_salt,
    )
    return hashlib.blake2b(_encode(shaped), key=version, digest_size=32).digest()


def decoded(body: bytes) -> dict[str, Any]:
    """Return the JSON of a request that was read before."""
    document = msgspec.json.decode(body)
    assert isinstance(document, dict)
    return document
