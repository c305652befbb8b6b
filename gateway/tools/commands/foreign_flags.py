"""Flags of vLLM, SGLang and llama-server without a counterpart, and what to use instead.

What changes nothing here is passed over; what would change the meaning of the command ends it.
Flags that mean the same as ours are names of ours (gateway/tools/commands/serve_command.py).
"""

from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

import typer
from typer.core import TyperCommand

from outrider.gateway.settings.errors import SettingsError
from outrider.gateway.tools.commands.user_errors import user_errors


class _Foreign(NamedTuple):
    """A flag of another server."""

    advice: str
    takes_value: bool = True
    is_harmless: bool = False


_NO_VALUE: Final = {"takes_value": False, "is_harmless": True}
_BY_ITSELF: Final = "the format of a model's tool calls is read from its chat template"
_TRUST: Final = "code that comes with a checkpoint is never run, so it is not needed"
_MEMORY: Final = (
    "the KV cache takes a share of the free memory; --set engine.kv_cache_gib=N sets it"
)
_WEIGHTS: Final = (
    "quantised checkpoints are recognised by themselves; --quantize int8 or int4 rounds plain ones"
)
_DEVICE: Final = "a model is whole on one device: --device cuda or --device cpu"
_ADAPTERS: Final = "use --lora NAME=FOLDER"
_DRAFTS: Final = "use --small MODEL for a model that drafts, or --drafter for a head"
_TLS: Final = "the gateway speaks plain HTTP: put TLS in front of it"
_REPLICAS: Final = "use outrider fleet, or several engines with --engines"
_PIPELINE: Final = "layers are not spread over devices; use --tensor-parallel"
_SURE: Final = "this is always so"


_FOREIGN: Final = {
    "--enable-auto-tool-choice": _Foreign(_BY_ITSELF, **_NO_VALUE),
    "--tool-call-parser": _Foreign(_BY_ITSELF, is_harmless=True),
    "--reasoning-parser": _Foreign("thinking is told from answers by itself", is_harmless=True),
    "--jinja": _Foreign("chat templates are always used", **_NO_VALUE),
    "--trust-remote-code": _Foreign(_TRUST, **_NO_VALUE),
    "--enable-prefix-caching": _Foreign(_SURE, **_NO_VALUE),
    "--enable-chunked-prefill": _Foreign(_SURE, **_NO_VALUE),
    "--cont-batching": _Foreign(_SURE, **_NO_VALUE),
    "-cb": _Foreign(_SURE, **_NO_VALUE),
    "--enable-lora": _Foreign(_ADAPTERS, **_NO_VALUE),
    "--enforce-eager": _Foreign("--no-cuda-graphs does it", **_NO_VALUE),
    "--disable-log-requests": _Foreign("requests' texts are never logged", **_NO_VALUE),
    "--disable-log-stats": _Foreign("statistics are in /metrics, not in the log", **_NO_VALUE),
    "--metrics": _Foreign("/metrics is always there", **_NO_VALUE),
    "--mlock": _Foreign("weights are held in memory as the system does", **_NO_VALUE),
    "--no-mmap": _Foreign("weights are held in memory as the system does", **_NO_VALUE),
    "--gpu-memory-utilization": _Foreign(_MEMORY, is_harmless=True),
    "--mem-fraction-static": _Foreign(_MEMORY, is_harmless=True),
    "--swap-space": _Foreign(_MEMORY, is_harmless=True),
    "--batch-size": _Foreign("--set engine.max_tokens_per_step=N does it", is_harmless=True),
    "--ubatch-size": _Foreign("--set engine.max_tokens_per_step=N does it", is_harmless=True),
    "--uvicorn-log-level": _Foreign("use --log-level", is_harmless=True),
    "--quantization": _Foreign(_WEIGHTS),
    "-q": _Foreign(_WEIGHTS),
    "--n-gpu-layers": _Foreign(_DEVICE),
    "--gpu-layers": _Foreign(_DEVICE),
    "-ngl": _Foreign(_DEVICE),
    "--pipeline-parallel-size": _Foreign(_PIPELINE),
    "-pp": _Foreign(_PIPELINE),
    "--data-parallel-size": _Foreign(_REPLICAS),
    "-dp": _Foreign(_REPLICAS),
    "--lora-modules": _Foreign(_ADAPTERS),
    "--lora-paths": _Foreign(_ADAPTERS),
    "--speculative-config": _Foreign(_DRAFTS),
    "--speculative-algorithm": _Foreign(_DRAFTS),
    "--speculative-draft-model-path": _Foreign(_DRAFTS),
    "--model-draft": _Foreign(_DRAFTS),
    "-md": _Foreign(_DRAFTS),
    "--hf-repo": _Foreign("name the model itself: outrider serve ORGANISATION/NAME"),
    "-hf": _Foreign("name the model itself: outrider serve ORGANISATION/NAME"),
    "--tokenizer": _Foreign("the tokenizer is the checkpoint's own"),
    "--tokenizer-path": _Foreign("the tokenizer is the checkpoint's own"),
    "--ssl-keyfile": _Foreign(_TLS),
    "--ssl-certfile": _Foreign(_TLS),
    "--ssl-key-file": _Foreign(_TLS),
    "--ssl-cert-file": _Foreign(_TLS),
}


class ForgivingCommand(TyperCommand):
    """A command that knows the flags of other servers."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments without the foreign flags, which are told of."""
        with user_errors(usage=(SettingsError,)):
            known = list(_known(args))
        return super().parse_args(ctx, known)


def _known(args: Iterable[str]) -> Iterator[str]:
    """Give the other arguments. Raises SettingsError for a flag that would change what is meant."""
    rest = iter(args)
    for argument in rest:
        if argument == "--":
            yield argument
            break
        flag, equals, _ = argument.partition("=")
        foreign = _FOREIGN.get(flag)
        if foreign is None:
            yield argument
            continue
        if not foreign.is_harmless:
            raise SettingsError(f"{flag} is a flag of other servers: {foreign.advice}")
        typer.secho(f"outrider: {flag} is left out: {foreign.advice}", err=True)
        if foreign.takes_value and not equals:
            next(rest, None)
    yield from rest
