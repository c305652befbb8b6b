"""Revisions of models on the Hugging Face hub: to which names they belong."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from outrider.gateway.settings.sections import (
    DEMO,
    NONE,
    ModelSettings,
    Section,
    is_local,
    is_missing_folder,
)
from outrider.gateway.settings.tiers import Complaint, UpstreamSettings

_SUFFIX: Final = "_revision"
_PLACELESS: Final = (None, NONE, DEMO, "mtp")


def revision_complaints(
    models: ModelSettings, tiers: Mapping[str, UpstreamSettings]
) -> Iterator[Complaint]:
    """Yield revisions of what is not on the hub."""
    sections: dict[tuple[str, ...], Section] = {("models",): models}
    sections |= {("tiers", name): tier for name, tier in tiers.items()}
    for path, section in sections.items():
        for field in (name for name in type(section).model_fields if name.endswith(_SUFFIX)):
            revision, name = getattr(section, field), field.removesuffix(_SUFFIX)
            model = getattr(section, name)
            if revision is not None and not _is_on_hub(model):
                what = (
                    f"{'.'.join((*path, name))} is {model or 'not set'}, and only models on the "
                    "Hugging Face hub have revisions; name one by its id, such as Qwen/Qwen3-0.6B, "
                    "or leave the revision out"
                )
                yield Complaint((*path, field), revision, what)


def _is_on_hub(name: str | None) -> bool:
    return not (name in _PLACELESS or is_local(str(name)) or is_missing_folder(str(name)))


def forget_revisions(weaker: Mapping[str, Any], stronger: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a source without revisions of names that a stronger one replaces.

    A revision belongs to the name beside it: `--large ./mine` must not get the one that
    outrider.toml has for the model that it names.
    """
    kept = dict(weaker)
    for name, value in stronger.items():
        own = weaker.get(name)
        if isinstance(own, Mapping) and isinstance(value, Mapping):
            kept[name] = forget_revisions(own, value)
        elif own is not None and own != value:
            kept.pop(f"{name}{_SUFFIX}", None)
    return kept
