"""Finds a tier's checkpoint: a folder, a hub id, or what stands for a GGUF file."""

import logging
import os
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

from outrider.engine.errors import UnsupportedModelError
from outrider.engine.model.checkpoint_check import ask_hub, first_line
from outrider.engine.model.checkpoint_files import hub_commit, pinned_folder
from outrider.engine.model.gguf.folder import find_gguf, gguf_folder
from outrider.gateway.answering.text.gguf_tokenizer import write_tokenizer
from outrider.gateway.settings.paths import cache_folder
from outrider.gateway.settings.sections import ModelSettings
from outrider.gateway.settings.tree import Settings
from outrider.verifier.params import TIERS, Tier

logger = logging.getLogger(__name__)


def named_models(settings: Settings) -> dict[Tier, str]:
    """Return folder or hub id of each tier to load.

    A GGUF file gets a folder of its own in the cache, made when it is first asked for. A revision
    is its folder in the hub's cache, without the weights until `fetched_model` is called. Raises
    UnsupportedModelError for a file that cannot be read, and a revision that cannot be fetched.
    """
    models, resolved = settings.models, settings.models.resolved()
    return {
        tier: checkpoint(path, models.revision(tier))
        for tier in TIERS
        if (path := resolved[tier]) is not None
    }


def fetched_model(settings: Settings, tier: Tier) -> str:
    """Return the folder or hub id of a tier, with the weights of a revision. Raises EngineError."""
    path = named_models(settings)[tier]
    if settings.models.revision(tier) is None:
        return path
    from outrider.engine.model.weights import resolve_checkpoint

    return str(resolve_checkpoint(settings.models.resolved()[tier] or "", hub_commit(path)))


def at_commits(settings: Settings) -> ModelSettings:
    """Return the models with commits for revisions: a branch that moves has one commit for all."""
    models, named = settings.models, named_models(settings)
    pinned = [tier for tier in named if models.revision(tier) is not None]
    return models.model_copy(
        update={f"{tier}_revision": hub_commit(named[tier]) for tier in pinned}
    )


def checkpoint(path_or_id: str, revision: str | None = None) -> str:
    """Return the folder or hub id that a setting means. Raises as `named_models` does."""
    if revision is not None:
        return str(_pinned(path_or_id, revision))
    file = find_gguf(path_or_id)
    if file is None:
        return path_or_id
    try:
        return str(_in_cache(partial(gguf_folder, file, add_tokenizer=write_tokenizer)))
    except OSError as error:
        raise UnsupportedModelError(f"{file} cannot be prepared: {error}") from error


@cache
def _pinned(model_id: str, revision: str) -> Path:
    """Return the folder of a revision's small files, fetched once."""
    ask_hub(model_id, revision)
    try:
        return pinned_folder(model_id, revision)
    except (OSError, ValueError) as error:
        raise UnsupportedModelError(
            f"{model_id}: its revision {revision} cannot be fetched from the Hugging Face hub: "
            f"{first_line(error)}"
        ) from error


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
    logger.warning(
        "the cache folder cannot be used, so every start makes its files anew folder=%s reason=%s "
        "advice=let XDG_CACHE_HOME name a folder that this user may write",
        folder,
        reason,
    )
    return folder
