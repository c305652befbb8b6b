"""The bundled pair, grown: it answers the same, and its passes cost what larger models' cost.

Passes of a model of 7 million parameters cost so little that speculation has nothing to save. What
is heavy is imported by the process that grows the pair: `outrider serve` loads no torch.
"""

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from shutil import disk_usage
from typing import Final

from outrider.engine.model.fingerprint import checkpoint_fingerprint
from outrider.gateway.settings.paths import cache_folder
from outrider.gateway.settings.sections import bundled_pair
from outrider.gateway.settings.tree import Settings
from outrider.gateway.wiring.hardware import available_memory_bytes

logger = logging.getLogger(__name__)

GROWN: Final = {"large": "150M", "small": "15M"}
"""Parameters of each model: as many times apart as the bundled ones, about ten."""

_VERSION: Final = 1  # raised whenever a pair would be grown into other files
_DIGEST_DIGITS: Final = 16
_DISK_BYTES: Final = 2**29  # the files take 320 MB
# The weights, what passes take, and a quarter of the rest for keys and values.
_MEMORY_BYTES: Final = 2 * 2**30
_AS_IT_IS: Final = "models are the bundled pair as it is: its passes are short, drafts save little"


def with_grown_pair(settings: Settings, report: Callable[[str], None]) -> tuple[Settings, str]:
    """Return settings that name the grown pair where no model is named, and a line that says so.

    The line is empty where a model is named. `report`: told before the pair is grown, which takes a
    while; it is done once.
    """
    if not _shows_bundled_pair(settings):
        return settings, ""
    if available_memory_bytes() < _MEMORY_BYTES:
        return settings, f"{_AS_IT_IS} (less than {_MEMORY_BYTES >> 30} GiB of memory is free)"
    try:
        folder = kept_pair(report)
    except (OSError, BrokenProcessPool) as error:
        logger.warning("the bundled pair cannot be grown reason=%s", error)
        return settings, f"{_AS_IT_IS} (it cannot be grown: {error})"
    models = settings.models.model_copy(
        update={
            "large": str(folder / "large"),
            "small": str(folder / "small"),
            "router": folder / "router",
        }
    )
    line = (
        f"models are the bundled pair, grown to {GROWN['large']} and {GROWN['small']} parameters: "
        "the same answers at larger models' cost (--large demo --small demo: as it is)"
    )
    return settings.model_copy(update={"models": models}), line


def _shows_bundled_pair(settings: Settings) -> bool:
    """Return whether nothing is named that belongs to the bundled pair's own shape."""
    models = settings.models
    named = (models.large, models.small, models.router, models.drafter)
    elsewhere = settings.engine.replicas or settings.adapters.lora or settings.adapters.folder
    return not any(named) and not elsewhere


def kept_pair(report: Callable[[str], None]) -> Path:
    """Return the folder with large, small and router, grown now if they are not there.

    Raises OSError where there is no room for it.
    """
    cache = cache_folder(os.environ)
    if cache is None:
        raise OSError("there is no home folder; let XDG_CACHE_HOME name a folder")
    place = cache / "grown"
    folder = place / _key()
    if folder.is_dir():
        return folder
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    if disk_usage(place).free < _DISK_BYTES:
        raise OSError(f"less than {_DISK_BYTES >> 20} MiB are free for it in {place}")
    report(f"growing the bundled pair, once: 320 MB in {place}")
    with tempfile.TemporaryDirectory(dir=place) as name:
        draft = Path(name) / "pair"
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as processes:
            processes.submit(grow_pair, draft).result()
        try:
            os.rename(draft, folder)
        except OSError:  # another process was faster
            if not folder.is_dir():
                raise
    return folder


def grow_pair(folder: Path) -> None:
    """Write both models and their router to `folder`.

    What is added to the models cannot reach their output, so the router judges their answers as it
    judges the bundled pair's: it is written anew with the grown models' fingerprints.
    """
    from outrider.draft.training.expand import expand
    from outrider.draft.training.expand_shape import shape_for_parameters
    from outrider.router.scorer import RouterScorer

    source = bundled_pair()
    for name, parameters in GROWN.items():
        config = json.loads((source / name / "config.json").read_text(encoding="utf-8"))
        expand(source / name, folder / name, shape_for_parameters(config, parameters))
    replace(RouterScorer.load(source / "router"), pair=_pair(folder)).save(folder / "router")


def _key() -> str:
    """Return what changes with the files that are grown, and with their sizes."""
    router = (bundled_pair() / "router" / "router.json").read_bytes()
    digest = hashlib.sha256(router).hexdigest()[:_DIGEST_DIGITS]
    return "-".join([_pair(bundled_pair()), *GROWN.values(), digest, str(_VERSION)])


def _pair(folder: Path) -> str:
    return "-".join(checkpoint_fingerprint(folder / name) for name in ("small", "large"))
