"""Where a tier's checkpoint lies: a folder, a hub id, or what stands for a GGUF file."""

import functools
import os
import tempfile
from pathlib import Path

from engine.errors import UnsupportedModelError
from engine.model.gguf.folder import find_gguf, gguf_folder
from engine.request import TIERS, Tier
from gateway.settings.paths import cache_folder
from gateway.settings.tree import Settings
from gateway.text.gguf_tokenizer import write_tokenizer


def named_models(settings: Settings) -> dict[Tier, str]:
    """Return folder or hub id of each tier to load.

    A GGUF file gets a folder of its own in the cache, made when it is first asked for. Raises
    UnsupportedModelError for a file that cannot be read.
    """
    resolved = settings.models.resolved()
    return {tier: checkpoint(path) for tier in TIERS if (path := resolved[tier]) is not None}


def checkpoint(path_or_id: str) -> str:
    """Return the folder or hub id that a setting means. Raises as `named_models` does."""
    file = find_gguf(path_or_id)
    if file is None:
        return path_or_id
    try:
        return str(gguf_folder(file, _place(), add_tokenizer=write_tokenizer))
    except OSError as error:
        raise UnsupportedModelError(f"{file} cannot be prepared: {error}") from error


def _place() -> Path:
    return cache_folder(os.environ) or _lasting_folder()


@functools.cache
def _lasting_folder() -> Path:
    """Return a folder for as long as this process runs: there is no home to keep anything in."""
    return Path(tempfile.mkdtemp(prefix="outrider-"))
