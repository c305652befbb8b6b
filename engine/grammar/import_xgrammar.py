"""Imports xgrammar without transformers, which it names and which compiling does not need."""

import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


class Placeholder(types.ModuleType):
    """Stands for a package that another one imports and does not need: any name in it is a class.

    The classes are empty, so that they can be inherited from and compared with.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda self, *args, **kwargs: None})


def import_xgrammar() -> types.ModuleType:
    """Return xgrammar. Importing transformers would take a second of processor time or more.

    Where transformers is imported already, xgrammar gets the real one. Not to be called while
    another thread imports transformers.
    """
    with _left_out(["transformers"]):
        import xgrammar
    return xgrammar


@contextmanager
def _left_out(names: Sequence[str]) -> Iterator[None]:
    """Have placeholders for packages that are not imported yet."""
    missing = [name for name in names if name not in sys.modules]
    sys.modules.update({name: Placeholder(name) for name in missing})
    try:
        yield
    finally:
        for name in missing:
            del sys.modules[name]
