"""The folder on a disk for keys and values, as the settings describe it.

torch is imported by the caller: the gateway's process imports the wiring without it.
"""

from typing import TYPE_CHECKING

from outrider.engine.cache.extent_folder import ExtentFolder
from outrider.engine.cache.extent_store import ExtentStore
from outrider.engine.cache.sealing import Seal, read_key
from outrider.engine.errors import EngineError
from outrider.gateway.settings.kv_folder import kv_key_file
from outrider.gateway.settings.tree import Settings

if TYPE_CHECKING:
    from outrider.gateway.wiring.drafter import Runners

_GIB = 2**30


def open_seal(settings: Settings) -> Seal:
    """Return what opens the folder's files. Raises EngineError for a key that cannot be used."""
    key = kv_key_file(settings.engine)
    assert key is not None, "the settings were checked"
    return Seal(read_key(key))


def open_folder(settings: Settings) -> ExtentFolder | None:
    """Return the folder; None where the settings name none.

    Raises EngineError for a folder or a key that cannot be used.
    """
    options = settings.engine
    if options.kv_folder is None:
        return None
    return ExtentFolder(
        options.kv_folder.expanduser(),
        seal=open_seal(settings),
        budget_bytes=int(options.kv_folder_gib * _GIB),
        ttl_s=options.kv_folder_ttl_s,
    )


def open_store(folder: ExtentFolder | None, runners: "Runners") -> ExtentStore | None:
    """Return what keeps these runners' blocks in a folder; None without one.

    Raises EngineError where a model is not on a CPU.
    """
    if folder is None:
        return None
    if any(runner.device.type != "cpu" for runner in runners.values()):
        raise EngineError(
            "engine.kv_folder is for models on a CPU so far: on a GPU each block would wait for a "
            "copy. Leave it unset, or use --device cpu."
        )
    return ExtentStore(folder)
