"""Paths through the tree of settings, including sections that users name themselves."""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, get_args, get_origin

from pydantic import BaseModel

ANY_NAME: Final = "NAME"
"""Placeholder in a path for a name that users choose, as in tiers.NAME.url."""


def setting_paths(model: type[BaseModel]) -> Iterator[tuple[str, ...]]:
    """Yield the path of every setting below a section, e.g. ("engine", "device")."""
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from ((name, *path) for path in setting_paths(kind))
        elif (section := named_sections(kind)) is not None:
            yield from ((name, ANY_NAME, *path) for path in setting_paths(section))
        else:
            yield (name,)


def named_sections(kind: object) -> type[BaseModel] | None:
    """Return the section in `dict[str, Section]`; None for another type."""
    if get_origin(kind) is not dict:
        return None
    value = get_args(kind)[1]
    return value if isinstance(value, type) and issubclass(value, BaseModel) else None


def filled_in(
    paths: Sequence[tuple[str, ...]], wanted: Sequence[str], place: str = ANY_NAME
) -> list[tuple[str, ...]]:
    """Return the paths with the names in `wanted` in place of names that users choose."""
    return [
        tuple(
            wanted[i] if part == place and i < len(wanted) else part for i, part in enumerate(path)
        )
        for path in paths
    ]


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """Return the end of a message about an unknown name: the closest name, or all names."""
    close = known[:1] if len(known) == 1 else difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]}?" if close else f"; available: {', '.join(known)}"


def cache_folder(environ: Mapping[str, str]) -> Path | None:
    """Return the folder for files that can be made again, by the XDG rules; None without a home.

    It need not exist.
    """
    home = environ.get("XDG_CACHE_HOME", "")
    try:
        # The rules say that a relative one is ignored.
        base = Path(home) if Path(home).is_absolute() else Path("~/.cache").expanduser()
    except RuntimeError:
        return None
    return base / "outrider"
