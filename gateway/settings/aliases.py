"""Settings of aliases: further names that requests use as model (`[aliases.NAME]`)."""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Final, Self

from pydantic import AfterValidator, BeforeValidator, Field, JsonValue, model_validator
from pydantic_settings import NoDecode

from outrider.gateway.contract.schema.kinds import FallbackKind, Reveals
from outrider.gateway.settings.paths import did_you_mean
from outrider.gateway.settings.sections import ModelSettings, Section, split_list
from outrider.gateway.settings.tiers import RESERVED_NAMES, Complaint, UpstreamSettings

MAX_LINKS: Final = 16
"""Models of one alias, with those of the aliases that it names."""
_MAX_NAME_CHARS: Final = 128
_REQUEST_FIELDS: Final = frozenset(
    {"model", "models", "messages", "prompt", "stream", "stream_options", "tools", "user"}
)
"""Fields that are the client's own: a default of them would change what is asked."""
_LOCAL_NAMES: Final = ("auto", "small", "large")


def _free_defaults(defaults: dict[str, JsonValue]) -> dict[str, JsonValue]:
    for name in defaults:
        if name in _REQUEST_FIELDS:
            raise ValueError(f"{name} is the client's own; remove it from the defaults")
    return defaults


Names = Annotated[
    tuple[str, ...],
    NoDecode,
    BeforeValidator(split_list),
    Field(min_length=1, max_length=MAX_LINKS),
]
Weights = Annotated[
    tuple[Annotated[float, Field(ge=0, allow_inf_nan=False)], ...],
    NoDecode,
    BeforeValidator(split_list),
]
Defaults = Annotated[dict[str, JsonValue], AfterValidator(_free_defaults)]
FallbackKinds = Annotated[tuple[FallbackKind, ...], NoDecode, BeforeValidator(split_list)]


class AliasSettings(Section):
    """A name that stands for one model, or for a chain of models that are tried in order."""

    models: Names
    """Models in the order in which they are tried: auto, small, large, a tier, TIER/MODEL or
    another alias."""
    weights: Weights = ()
    """Share of requests that begin at each model, in the order of models; 0: only as a fallback.
    Unset: always the first one. The others follow in their order."""
    router: Path | None = None
    """Folder of a router (`outrider router train --tiers`) that orders the models for each request
    by what they are worth for it; its tiers are these models. Excludes weights."""
    fallback_on: FallbackKinds = ("failure", "context_length", "content_filter", "deadline")
    """When the next model is tried: failure (down, throttled, limit used up), context_length (the
    prompt or the answer does not fit), content_filter (the server withholds the answer), deadline
    (the model would leave the next one too little time)."""
    defaults: Defaults = Field(default_factory=dict)
    """Request fields for clients that leave them out, e.g. {temperature = 0.2}."""

    reveals: Reveals | None = None
    """What its answers tell keys without a `reveals` of their own: nothing (the alias as model, no
    tier, no reason), tiers, or costs (the operator's, too); unset: nothing to keys that may name
    only some models, else tiers."""

    @model_validator(mode="after")
    def _weights_fit(self) -> Self:
        if self.weights and self.router is not None:
            raise ValueError("a router orders the models; remove the weights")
        if self.weights and len(self.weights) != len(self.models):
            raise ValueError(
                f"{len(self.weights)} weights for {len(self.models)} models; give one for each"
            )
        if self.weights and not any(self.weights):
            raise ValueError("all weights are 0; give at least one model a share")
        if len(set(self.models)) < len(self.models):
            raise ValueError("a model is listed twice; each is tried once")
        return self


def alias_complaints(
    aliases: Mapping[str, AliasSettings],
    models: ModelSettings,
    tiers: Mapping[str, UpstreamSettings],
) -> Iterator[Complaint]:
    """Yield names that cannot be used, loops, and models that do not exist."""
    known = _known_names(models, tiers)
    for name, alias in aliases.items():
        if what := _name_complaint(name, tiers):
            yield Complaint(("aliases", name), None, what)
        path = ("aliases", name, "models")
        for model in alias.models:
            if what := _model_complaint(model, aliases, tiers, known):
                yield Complaint(path, model, what)
        if loop := _loop_from(name, aliases):
            yield Complaint(path, None, f"the aliases go round in a circle: {' -> '.join(loop)}")
        elif (count := _num_links(name, aliases)) > MAX_LINKS:
            what = f"with the aliases that it names it has {count} models; at most {MAX_LINKS}"
            yield Complaint(path, None, what)


def _known_names(models: ModelSettings, tiers: Mapping[str, UpstreamSettings]) -> frozenset[str]:
    """Return the names that exist whatever the servers list."""
    loaded = {name for name, path in models.resolved().items() if path is not None}
    own = {model for tier in tiers.values() if (model := tier.model) is not None}
    local = {str(path) for path in models.resolved().values() if path is not None}
    return frozenset({"auto", *loaded, *local, *tiers, *own})


def _name_complaint(name: str, tiers: Collection[str]) -> str:
    """Return why an alias cannot have this name; empty if it can."""
    if name in RESERVED_NAMES:
        return f"{name} is a reserved name; choose another name"
    if name in tiers:
        return f"{name} is the name of a tier; choose another name"
    if not name.isprintable() or not 1 <= len(name) <= _MAX_NAME_CHARS or name != name.strip():
        return f"a name has 1 to {_MAX_NAME_CHARS} printable characters and no space around them"
    if (tier := name.partition("/")[0]) != name and tier in tiers:
        return f"{tier}/... always means the tier {tier}; choose another name"
    return ""


def _model_complaint(
    model: str,
    aliases: Collection[str],
    tiers: Collection[str],
    known: Collection[str],
) -> str:
    """Return why a chain cannot go to this model; empty if it can."""
    tier, slash, rest = model.partition("/")
    if model in aliases or model in known or (slash and rest and tier in tiers):
        return ""
    if model in _LOCAL_NAMES:
        return f"no {model} model is loaded on this machine"
    near = did_you_mean(model, sorted({*aliases, *(name for name in known if "/" not in name)}))
    way = f"; {next(iter(tiers))}/NAME names a model that only its server knows" if tiers else ""
    return f"unknown model{near}{way}"


def _loop_from(name: str, aliases: Mapping[str, AliasSettings]) -> list[str]:
    """Return the way from an alias back to itself; empty where there is none."""
    ways = [[name]]
    seen = {name}
    while ways:
        way = ways.pop()
        for model in aliases[way[-1]].models:
            if model == name:
                return [*way, model]
            if model in aliases and model not in seen:
                seen.add(model)
                ways.append([*way, model])
    return []


def _num_links(name: str, aliases: Mapping[str, AliasSettings], depth: int = 0) -> int:
    """Count the models of an alias; a loop below it counts as too many."""
    if depth > MAX_LINKS:
        return MAX_LINKS + 1
    return sum(
        _num_links(model, aliases, depth + 1) if model in aliases else 1
        for model in aliases[name].models
    )
