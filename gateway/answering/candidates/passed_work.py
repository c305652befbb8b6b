"""The most that a passed-on request can take, and whether the limits of its key can count that."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Any, Final, get_args

import msgspec

from outrider.gateway.contract.errors.tree import BadRequestError, PermissionDeniedError
from outrider.gateway.contract.schema.kinds import PassedEndpoint, PassedUnit, Units
from outrider.gateway.settings.passed import PassedBounds
from outrider.gateway.tenancy.keys.amounts import LimitName
from outrider.gateway.tenancy.keys.keys import Principal
from outrider.gateway.tenancy.ledger.prices import PriceBook
from outrider.gateway.upstream.bounds import most_prompt_tokens
from outrider.gateway.upstream.passing import PassedWork
from outrider.gateway.upstream.tally import size_bytes, tokens_of
from outrider.gateway.upstream.tier import UpstreamTier

_MOST_IMAGES: Final = 64
_MAX_DIGITS: Final = 3
COUNTS: Final = frozenset(
    {
        *("n", "num_images", "n_images", "number_of_images", "images_per_prompt", "samplecount"),
        *("num_outputs", "num_outputs_per_prompt", "num_images_per_prompt", "sample_count"),
        *("samples", "num_samples", "batch_size", "batch_count", "n_iter", "count", "max_images"),
    }
)
"""Names by which servers take the number of images; several of them multiply."""
GIVEN: Final = ("image", "mask", "init_image", "input_image", "reference_image", "control_image")
"""Prefixes of the names of fields that hold images."""
ELSEWHERE: Final = frozenset({"url", "uri", "file_url", "audio_url", "audio_uri"})
"""Fields that tell where a sound is that is not in the request."""
_TOKEN_LIMITS: Final = ("tokens_per_minute", "tokens_per_day")
_MONEY_LIMITS: Final = tuple(name for name in get_args(LimitName) if name.startswith("usd"))
_PRICES: Final[Mapping[PassedUnit, str]] = {
    "image": "price.image",
    "audio_second": "price.audio_minute",
    "speech_byte": "price.speech",
}
_TOKENS: Final[Mapping[PassedUnit, str]] = {
    "image": "bounds.image_tokens",
    "audio_second": "bounds.audio_tokens",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PassedSize:
    """The size of a request, as its body tells it."""

    num_text_tokens: int = 0
    """Most tokens of its text."""
    num_images: int = 1
    """Images to be made."""
    num_given: int = 0
    """Images in it."""
    num_spoken_bytes: int = 0
    """Bytes of the text to be spoken."""
    num_sound_bytes: int | None = 0
    """Bytes of its sound; None where its server fetches it."""


def json_size(endpoint: PassedEndpoint, document: Mapping[str, Any]) -> PassedSize:
    """Return the size of a body in JSON. Raises BadRequestError for a number of images."""
    num_text = most_prompt_tokens(document, 0)
    documents, query = document.get("documents"), document.get("query")
    if endpoint == "rerank" and isinstance(documents, list) and isinstance(query, str):
        # The model reads the query again with each document.
        num_text += size_bytes(query) * max(len(documents) - 1, 0)
    spoken = (document.get("input"), document.get("instructions"))
    given = {name: value for name, value in document.items() if name.startswith(GIVEN)}
    return PassedSize(
        num_text_tokens=num_text,
        num_images=number_of_images(document) if endpoint == "images" else 1,
        num_given=sum(map(_num_items, given.values())) if endpoint == "images" else 0,
        num_spoken_bytes=sum(map(_spoken_bytes, spoken)),
    )


def _spoken_bytes(value: object) -> int:
    """Return the most bytes of a text; a server may speak those of a list or an object, too."""
    if isinstance(value, str):
        return size_bytes(value)
    return 0 if value is None else len(msgspec.json.encode(value))


def _num_items(value: object) -> int:
    return len(value) if isinstance(value, list) else int(value is not None)


def number_of_images(fields: Mapping[str, object]) -> int:
    """Return the most images that a request can ask for. Raises BadRequestError."""
    return prod(_number(name, fields[name]) for name in sorted(COUNTS & fields.keys()))


def _number(name: str, value: object) -> int:
    if value is None:
        return 1
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= _MAX_DIGITS:
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= _MOST_IMAGES:
        return value
    raise BadRequestError(
        f"{name}: a whole number from 1 to {_MOST_IMAGES} is required.", param=name
    )


def work_of(
    path: str, endpoint: PassedEndpoint, size: PassedSize, tier: UpstreamTier
) -> PassedWork:
    """Return the most that a request can take on a tier, as far as its settings tell."""
    bounds = tier.settings.bounds
    units, each, given = None, 0, 0
    if endpoint == "images":
        units, each = Units("image", size.num_images), bounds.image_tokens or 0
        given = size.num_given * each
    elif path == "/audio/speech":
        units = Units("speech_byte", size.num_spoken_bytes)
    elif endpoint == "audio":
        units = Units("audio_second", _most_seconds(size, bounds) or 0)
        each = bounds.audio_tokens or 0
    return PassedWork(
        num_prompt_tokens=size.num_text_tokens + given,
        num_likely_tokens=tokens_of(size.num_text_tokens) + given,
        units=units,
        tokens_per_unit=each,
    )


def _most_seconds(size: PassedSize, bounds: PassedBounds) -> int | None:
    """Return the most seconds of a request's sound; None where no bound is set."""
    bounds_s = [] if bounds.audio_seconds is None else [bounds.audio_seconds]
    if bounds.audio_bytes_per_second is not None and size.num_sound_bytes is not None:
        bounds_s.append(ceil(size.num_sound_bytes / bounds.audio_bytes_per_second))
    return min(bounds_s, default=None)


def check_budget(
    principal: Principal, tier: UpstreamTier, size: PassedSize, work: PassedWork, prices: PriceBook
) -> None:
    """Refuse a request whose price or bound is not known and counts for a limit of its key.

    Raises PermissionDeniedError, which says what the operator sets.
    """
    if work.units is None:
        return  # it is text, whose length bounds its tokens
    unit = work.units.unit
    missing = list(_missing(principal, tier, size, unit, prices))
    if missing:
        raise PermissionDeniedError(
            f"This key has a limit of tokens or money, and the most that the request can take on "
            f"the {tier.name} tier is not known; the operator sets "
            f"{' and '.join(f'tiers.{tier.name}.{name}' for name in missing)}.",
            code="price_unknown",
        )


def _missing(
    principal: Principal,
    tier: UpstreamTier,
    size: PassedSize,
    unit: PassedUnit,
    prices: PriceBook,
) -> Iterator[str]:
    """Yield the tier's settings that the key's limits need."""
    bounds = tier.settings.bounds
    counts_money = _has_limit(principal, tier.name, _MONEY_LIMITS)
    counts_tokens = _has_limit(principal, tier.name, _TOKEN_LIMITS)
    each = {
        "image": bounds.image_tokens,
        "audio_second": bounds.audio_tokens,
        "speech_byte": 0,  # its server tells no tokens, and those of its text are counted
    }[unit]
    has_token_price = tier.settings.has_price or prices.is_known(tier.name)
    if counts_money and not prices.charges_for(tier.name, unit) and not (each and has_token_price):
        yield _PRICES[unit]
    if counts_tokens and each is None:
        yield _TOKENS[unit]
    needs_seconds = unit == "audio_second" and (counts_money or (counts_tokens and each != 0))
    if needs_seconds and _most_seconds(size, bounds) is None:
        yield "bounds.audio_seconds"


def _has_limit(principal: Principal, tier: str, names: Sequence[str]) -> bool:
    """Return whether the key or its team has one of these limits, for all tiers or for this one."""
    own = (principal.limits, principal.team_limits)
    specs = [*own, *(spec.models[tier] for spec in own if tier in spec.models)]
    specs += [spec.end_user for spec in own if spec.end_user is not None]
    return any(getattr(spec, name) is not None for spec in specs for name in names)
