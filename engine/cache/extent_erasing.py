"""Erasing of one owner's extents and named prompts from a folder."""

import contextlib
import time
from collections.abc import Collection
from typing import Final

from outrider.engine.cache.extent_folder import ExtentFolder, space_folders
from outrider.engine.cache.extent_space import read_about, read_extent, stored_extents
from outrider.engine.cache.extents import ExtentError
from outrider.engine.cache.pin_files import read_pins, remove_pin
from outrider.engine.cache.sealing import Seal

_UNKNOWN: Final = ""


def erase_owners(folder: ExtentFolder, seal: Seal, owners: Collection[str]) -> int:
    """Remove all files of these owners (`owner_tag`), and those that do not say whose they are.

    Every file is read; those that cannot be opened hold nothing that anyone could read. Engines
    that use the folder meanwhile compute again what is gone. Returns the number of files.
    """
    wanted, num_removed = {*owners, _UNKNOWN}, 0
    for path in space_folders(folder.folder):
        for stored in stored_extents(path):
            with contextlib.suppress(ExtentError, OSError):
                if read_extent(path, stored, seal).header.owner in wanted:
                    (path / stored.file_name).unlink()
                    num_removed += 1
    return num_removed


def erase_named_prompts(folder: ExtentFolder, tenant: str) -> int:
    """Remove what has a tenant's named prompts kept beyond a restart; return their number."""
    num_removed = 0
    for path in space_folders(folder.folder):
        space = folder.space(read_about(path))
        for request in read_pins(space, time.time()):
            if request.tenant == tenant:
                remove_pin(space, request)
                num_removed += 1
    return num_removed
