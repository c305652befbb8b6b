"""Read a head for a large model: from a folder, the hub, or the model's own checkpoint."""

import logging
from typing import Final

import torch

from outrider.draft.heads.dflash import read_dflash
from outrider.draft.heads.eagle3 import read_eagle3
from outrider.draft.heads.head_config import is_saved_mtp, read_head_config
from outrider.draft.heads.mtp import read_mtp
from outrider.draft.heads.protocol import HeadError, HeadModel, TargetModel
from outrider.engine.errors import UnsupportedModelError
from outrider.engine.model.weights import ProgressCallback, resolve_checkpoint

OWN: Final = "mtp"
"""In the place of a path: the head inside the large model's checkpoint."""

logger = logging.getLogger(__name__)


def read_head(
    path: str,
    target: TargetModel,
    *,
    max_context: int | None = None,
    on_progress: ProgressCallback | None = None,
) -> HeadModel:
    """Read the head in a folder (or of a hub id), or, with "mtp", the large model's own.

    `target`: the large model that it is to read, whose embedding and head it shares where it has
    none; `max_context`: the positions to be served, where they are fewer than the large model's.
    Raises HeadError for a head that cannot be used, or not with this model.
    """
    try:
        with torch.inference_mode():
            return _read(path, target, max_context, on_progress)
    except HeadError:
        raise
    except (UnsupportedModelError, ValueError) as error:
        named = str(error) if path in str(error) else f"{path}: {error}"
        raise HeadError(named) from error


def _read(
    path: str,
    target: TargetModel,
    max_context: int | None,
    on_progress: ProgressCallback | None,
) -> HeadModel:
    head: HeadModel
    if path == OWN:
        folder = resolve_checkpoint(target.config.model_id)
        head = read_mtp(folder, target, max_context=max_context, on_progress=on_progress)
    else:
        head = _read_folder(path, target, max_context=max_context, on_progress=on_progress)
    logger.info(
        "drafter kind=%s taps=%s tokens=%d of %d parameters=%d",
        head.kind,
        head.tap_layers,
        head.config.vocab_size,
        target.config.vocab_size,
        head.num_parameters,
    )
    return head


def _read_folder(
    path: str,
    target: TargetModel,
    *,
    max_context: int | None,
    on_progress: ProgressCallback | None,
) -> HeadModel:
    folder = resolve_checkpoint(path)
    if is_saved_mtp(folder, target):
        return read_mtp(
            folder, target, is_alone=True, max_context=max_context, on_progress=on_progress
        )
    config = read_head_config(folder, target)
    read_one = read_dflash if config.kind == "dflash" else read_eagle3
    return read_one(folder, config, target, max_context=max_context, on_progress=on_progress)
