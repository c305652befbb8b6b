"""Folders that engines in tests offload keys and values to."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from outrider.engine.cache.extent_folder import ExtentFolder
from outrider.engine.cache.extent_store import ExtentStore
from outrider.engine.cache.sealing import Seal
from outrider.engine.core import Engine

KEY = bytes(range(32))


@contextmanager
def opened_store(
    folder: Path, *, budget_bytes: int = 2**28, ttl_s: float = 1e6, key: bytes = KEY, **options: Any
) -> Iterator[ExtentStore]:
    """A store in a folder, whose threads end with the block."""
    store = ExtentStore(
        ExtentFolder(folder, seal=Seal(key), budget_bytes=budget_bytes, ttl_s=ttl_s), **options
    )
    try:
        yield store
    finally:
        store.close()


def settle(engine: Engine, store: ExtentStore) -> None:
    """Step until all blocks that left were given to the store, and have it write them."""
    while engine.has_work:
        engine.step()
    store.flush()


def stored_files(folder: Path) -> list[Path]:
    """The extents' files, those of all models."""
    return sorted(folder.glob("*/*.kv"))


def slow_down(engine: Engine) -> None:
    """Have an engine believe that its models are slow, so that all that is stored is read."""
    for tier in engine.scheduler.running:
        engine.scheduler.note_pass(tier, num_rows=100, elapsed_s=1000.0)
