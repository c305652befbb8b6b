"""Installed packages: our own version, which extra brings what, and what is said without it."""

from collections.abc import Mapping
from functools import cache
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType
from typing import Final

from outrider.gateway.settings.errors import SettingsError

_MODULES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "tokenize": ("tokenizers", "jinja2", "huggingface_hub"),
        "transformers": ("tokenizers", "transformers"),
        "engine": ("torch", "transformers", "tokenizers", "llguidance"),
        "encoder": ("tokenizers", "threadpoolctl"),
        "router": ("sklearn", "scipy", "threadpoolctl"),
        "experiments": ("scipy",),
        "train": ("torch", "transformers", "tqdm"),
        "bench": ("matplotlib",),
        "postgres": ("psycopg",),
        "sign-in": ("jwt", "cryptography"),
        "presidio": ("presidio_analyzer",),
    }
)
"""The modules of each extra that are imported."""


@cache
def own_version() -> str:
    """Return the installed release of this package; "unknown" where it runs from its folder."""
    try:
        return version("outrider")
    except PackageNotFoundError:
        return "unknown"


class MissingExtraError(SettingsError):
    """Packages are missing that a wish needs."""


def need_extra(extra: str, purpose: str) -> None:
    """Raise MissingExtraError where a package of an extra is missing; nothing is imported."""
    missing = [module for module in _MODULES[extra] if not _is_installed(module)]
    if missing:
        raise MissingExtraError(
            f"{purpose} needs what is not installed here ({', '.join(missing)}): "
            f'pip install "outrider[{extra}]"'
        )


def _is_installed(module: str) -> bool:
    """Look on the path alone: a gateway's process marks torch as not to be imported.

    A folder without a module in it is what an interrupted installation leaves.
    """
    spec = PathFinder.find_spec(module)
    return spec is not None and spec.origin is not None
