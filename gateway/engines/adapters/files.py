"""An adapter's folder: what requests are told to read there, and when it has changed."""

from contextlib import suppress
from pathlib import Path
from typing import Final

from outrider.engine.request import AdapterRef
from outrider.gateway.settings.adapters import ADAPTER_TIERS, AdapterTier, NamedAdapter

FILES: Final = ("adapter_config.json", "adapter_model.safetensors")


def adapter_ref(named: NamedAdapter) -> AdapterRef:
    """Return what the engine is asked for: the folder as it is now."""
    folder = Path(named.folder)
    with suppress(RuntimeError, ValueError):  # no such user: reported when its files are read
        folder = folder.expanduser()
    folder = folder.absolute()
    return AdapterRef(
        name=named.name,
        tier="large" if named.tier == "auto" else named.tier,
        folder=str(folder),
        version=version_of(folder),
    )


def version_of(folder: Path) -> str:
    """Return what changes whenever the files of an adapter are written anew; "" without them."""
    found = []
    for name in FILES:
        try:
            status = (folder / name).stat()
        except (OSError, ValueError):  # a NUL in the path is a ValueError
            return ""
        found.append(f"{status.st_mtime_ns:x}-{status.st_size:x}-{status.st_ino:x}")
    return ".".join(found)


def tier_of(name: str) -> tuple[str, AdapterTier]:
    """Return a watched folder's adapter: "name" for the large model, "name@tier" for another."""
    stem, at, end = name.rpartition("@")
    tier = next((each for each in ADAPTER_TIERS if at and each == end), None)
    return (name, "large") if tier is None else (stem, tier)
