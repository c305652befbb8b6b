"""Where a tier's checkpoint lies: a folder, a hub id, or what stands for a GGUF file."""

import logging
import os
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

from outrider.engine.errors import UnsupportedModelError
from outrider.engine.model.gguf.folder import find_gguf, gguf_folder
from outrider.engine.request import TIERS, Tier
from outrider.gateway.settings.paths import cache_folder
from outrider.gateway.settings.tree import Settings
from outrider.gateway.text.gguf_tokenizer import write_tokenizer

log = logging.getLogger(__name__)


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
        return str(_in_cache(partial(gguf_folder, file, add_tokenizer=write_tokenizer)))
    except OSError as error:
        raise UnsupportedModelError(f"{file} cannot be prepared: {error}") from error


def _in_cache(make: Callable[[Path], Path]) -> Path:
    """Make files in the user's cache folder; in a temporary one where it cannot be written."""
    reason = "no home is known"
    if (folder := cache_folder(os.environ)) is not None:
        try:
            return make(folder)
        except OSError as error:
            reason = str(error)
    return make(_lasting_folder(reason))


@cache
def _lasting_folder(reason: str) -> Path:
    """Return a folder for as long as this process runs, and warn."""
    folder = Path(tempfile.mkdtemp(prefix="outrider-"))
    log.warning(
        "the cache folder cannot be used, so every start makes its files anew folder=%s reason=%s "
        "advice=let XDG_CACHE_HOME name a folder that this user may write",
        folder,
        reason,
    )
    return folder
