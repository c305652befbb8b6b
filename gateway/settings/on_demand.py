"""Settings of models on demand: `[tiers.NAME.on_demand]`, and `[on_demand]` for all of them."""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_settings import NoDecode

from outrider.gateway.settings.sections import (
    Count,
    Dtype,
    Revision,
    Seconds,
    Section,
    split_list,
)

URL: Final = "http://127.0.0.1/v1"
"""Stands for the server's address, which is another one at each start."""
_FILLED: Final[Mapping[str, Any]] = {
    "url": (URL,),
    "server": "outrider",
    "local": True,
    "supports": ("tools",),
}
_NOT_THEIRS: Final = (
    *("preset", "url", "server", "model", "sign_in", "ca_file"),
    *("api_key_env", "api_key_file", "api_key_command"),
)

Gibibytes = Annotated[float, Field(gt=0, le=2**20)]


def _readable(texts: tuple[str, ...]) -> tuple[str, ...]:
    from outrider.gateway.settings.adapters import parse_adapter  # it imports tiers

    for text in texts:
        parse_adapter(text)
    return texts


class OnDemandSettings(Section):
    """A model that a process of this machine serves while requests name it. The tier has no url."""

    checkpoint: Annotated[str, Field(min_length=1)] | None = None
    """Folder, GGUF file or Hugging Face id of the model, or a name of `outrider models list`;
    unset: the tier is a server elsewhere."""
    revision: Revision | None = None
    """Branch, tag or full commit hash on the hub; unset: main."""
    quantize: Literal["", "int8", "int4", "exact", "decode"] = ""
    """Weights' width, as in models.quantize."""
    dtype: Dtype = "auto"
    """Precision of weights and KV cache; auto is the checkpoint's own."""
    lora: Annotated[
        tuple[str, ...], NoDecode, BeforeValidator(split_list), AfterValidator(_readable)
    ] = ()
    """LoRA adapters of the model, NAME=FOLDER; requests name them as TIER/NAME."""
    kv_cache_gib: Gibibytes = 1.0
    """Memory for its KV cache."""
    max_sequences: Count = 16
    """Answers that it generates concurrently."""
    num_threads: Count | None = None
    """CPU threads of its engine; unset: by its size, at most the physical cores."""
    memory_gib: Gibibytes | None = None
    """All memory that it takes; unset: its files, a tenth of them, its KV cache and 0.75 GiB.
    Needed for a model that is not on this machine yet."""
    keep_alive_s: Annotated[float, Field(ge=0)] | Literal["forever"] = 300.0
    """Time since its last request after which it is put out; forever: only where another model
    needs its memory."""

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """Return the names of its adapters."""
        return tuple(text.partition("=")[0].strip() for text in self.lora)


class OnDemandPoolSettings(Section):
    """What the models on demand share: memory, and the patience of requests."""

    memory_gib: Gibibytes | None = None
    """Memory for all of them together; unset: what this machine has free, which is not known of a
    GPU's: set it there."""
    start_within_s: Seconds = 120.0
    """Time that a request waits for its model: for room, and while it loads."""
    load_within_s: Seconds = 1800.0
    """Time for loading a model, with its download, after which its process is ended."""
    max_waiting: Count = 256
    """Requests that may wait for models; further ones are refused with status 503. A tenant with
    less than its share of these places is taken in all the same, up to twice as many in all."""


def with_on_demand(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tier's settings with those that follow from `on_demand`.

    Raises ValueError for one that contradicts it.
    """
    filled, model = dict(values), values.get("on_demand")
    checkpoint = model.get("checkpoint") if isinstance(model, Mapping) else None
    if checkpoint is None:
        return filled
    for name in _NOT_THEIRS:
        if filled.get(name) and filled[name] != _FILLED.get(name):
            raise ValueError(f"{name} is for a server elsewhere; remove it, or on_demand")
    return {**filled, **{name: filled.get(name) or value for name, value in _FILLED.items()}}
