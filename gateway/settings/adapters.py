"""Settings of LoRA adapters: `[adapters]`."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Final, Literal, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_settings import NoDecode

from outrider.gateway.settings.sections import (
    Count,
    ModelSettings,
    Seconds,
    Section,
    split_list,
)
from outrider.gateway.settings.tiers import RESERVED_NAMES, Complaint

AdapterTier = Literal["small", "large", "auto"]
ADAPTER_TIERS: Final[tuple[AdapterTier, ...]] = ("small", "large", "auto")
ADAPTER_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class NamedAdapter(NamedTuple):
    """An adapter's name, its folder, and the tier whose model it changes.

    auto: the large one's, and the router chooses between that and the small model as it is.
    """

    name: str
    folder: str
    tier: AdapterTier


def parse_adapter(text: str) -> NamedAdapter:
    """Read "name=folder" or "name=folder@tier"; without a tier the large one. Raises ValueError."""
    name, equals, place = (part.strip() for part in text.partition("="))
    folder, at, end = place.rpartition("@")
    tier = next((each for each in ADAPTER_TIERS if at and each == end), None)
    folder = place if tier is None else folder
    if not equals or not folder:
        raise ValueError(f"{text!r}: write it as name=folder or name=folder@small")
    if not ADAPTER_NAME.fullmatch(name) or name in RESERVED_NAMES:
        raise ValueError(
            f"{name!r} cannot be an adapter's name: take 1 to 64 letters, digits, '.', '-' and "
            f"'_', and none of {', '.join(sorted(RESERVED_NAMES))}"
        )
    return NamedAdapter(name=name, folder=folder, tier=tier or "large")


def _all_different(texts: tuple[str, ...]) -> tuple[str, ...]:
    names = [parse_adapter(text).name for text in texts]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{name} is there twice; give each adapter a name of its own")
    return texts


Adapters = Annotated[
    tuple[str, ...], NoDecode, BeforeValidator(split_list), AfterValidator(_all_different)
]


class AdapterSettings(Section):
    """LoRA adapters of the local models. Requests name one as their model."""

    lora: Adapters = ()
    """Adapters, as name=folder, name=folder@small or name=folder@auto (routed between the small
    model and the large one with the adapter); each folder holds adapter_config.json and
    adapter_model.safetensors, as PEFT saves them."""
    folder: Path | None = None
    """Folder to watch: each folder in it is an adapter of that name, loaded when it appears and
    unloaded when it is gone; name@small and name@auto as in lora."""
    poll_s: Seconds = 5.0
    """Time between two looks into the watched folder."""
    max_resident: Count = 64
    """Adapters in memory, of each model; the one used least recently makes room for another."""
    memory_mib: int = Field(default=1024, ge=1, le=1 << 20)
    """Memory of all resident adapters of a model together."""
    max_named: Count = 1024
    """Adapters that have a name, in memory or not."""


def adapter_complaints(
    adapters: AdapterSettings, models: ModelSettings, taken: Sequence[str]
) -> Iterator[Complaint]:
    """Yield contradictions with the models and with the other names that requests may use."""
    path = ("adapters", "lora")
    for text in adapters.lora:
        name, _, tier = parse_adapter(text)
        if name in taken:
            yield Complaint(path, text, f"{name} is a tier or an alias; choose another name")
        has_own = models.large is not None or models.small is not None
        own = "large" if tier == "auto" else tier
        if has_own and getattr(models, own) in (None, "none"):
            yield Complaint(path, text, f"{name} is for the {own} tier, which has no model here")
    if len(adapters.lora) > adapters.max_named:
        yield Complaint(path, None, f"there are more than adapters.max_named={adapters.max_named}")
