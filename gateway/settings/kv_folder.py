"""Whether keys and values can go to the folder that the settings name."""

import os
from collections.abc import Iterator
from pathlib import Path

from outrider.gateway.settings.paths import cache_folder
from outrider.gateway.settings.sections import EngineSettings
from outrider.gateway.settings.tiers import Complaint


def kv_key_file(engine: EngineSettings) -> Path | None:
    """Return the file with the folder's key; None without a home to keep it in."""
    if engine.kv_folder_key is not None:
        return engine.kv_folder_key.expanduser()
    folder = cache_folder(os.environ)
    return None if folder is None else folder / "kv.key"


def kv_folder_complaints(engine: EngineSettings) -> Iterator[Complaint]:
    """Yield what makes a folder useless, or its seal."""
    if engine.kv_folder is None:
        return
    folder, key = engine.kv_folder.expanduser(), kv_key_file(engine)
    if key is None:
        yield Complaint(("engine", "kv_folder_key"), None, "name a file: there is no home folder")
    elif key.absolute().is_relative_to(folder.absolute()):
        yield Complaint(
            ("engine", "kv_folder_key"),
            str(key),
            "lies in engine.kv_folder: who copies the folder would have its key. Keep it elsewhere",
        )
    if engine.tensor_parallel > 1:
        yield Complaint(
            ("engine", "kv_folder"), str(folder), "is not possible with engine.tensor_parallel yet"
        )
    if not engine.prefix_caching:
        yield Complaint(("engine", "kv_folder"), str(folder), "needs engine.prefix_caching")
