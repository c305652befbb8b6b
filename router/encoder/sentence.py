"""A sentence encoder by folder or by the name of a package that carries one.

Its files are `config.json`, `model.safetensors` and `tokenizer.json`. A package is looked up, not
imported: none of its code runs.
"""

import hashlib
import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

import numpy as np

from outrider.router.encoder.bert import (
    MAX_CHARS,
    MAX_TOKENS,
    BertEncoder,
    EncoderError,
    Floats32,
    read_bert,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_FILES: Final = ("config.json", "model.safetensors", "tokenizer.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderId:
    """The encoder that a router was trained with."""

    source: str
    """Folder, or name of a package."""
    fingerprint: str
    """Of its weights and its tokenizer."""
    dimension: int
    """The length of its embeddings."""
    depth: int
    """The layer whose outputs are averaged."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EmbeddedTexts:
    """The embeddings of texts, and whose they are."""

    id: EncoderId
    rows: Floats32
    """[num_texts, dimension]."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SentenceEncoder:
    """Texts in, embeddings out."""

    id: EncoderId
    bert: BertEncoder
    tokenizer: "Tokenizer"

    def embed(self, text: str) -> Floats32:
        """Return the embedding [dimension] of a text's first MAX_TOKENS tokens.

        Raises EncoderError where the tokenizer does not fit the weights.
        """
        # A lone surrogate is a legal part of a JSON string, and none of UTF-8.
        clean = text[:MAX_CHARS].encode("utf-8", "replace").decode("utf-8")
        return self.bert.embed(self.tokenizer.encode(clean).ids)

    def embed_all(self, texts: Iterable[str]) -> EmbeddedTexts:
        """Embed one text after the other."""
        return EmbeddedTexts(id=self.id, rows=np.stack([self.embed(text) for text in texts]))

    @classmethod
    def load(cls, source: str, depth: int | None = None) -> Self:
        """Read an encoder and its first `depth` layers, as `read_bert`. Raises EncoderError."""
        try:
            from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]
            from tokenizers import Tokenizer
        except ImportError as error:
            raise EncoderError(
                f"the sentence encoder {source} needs what is not installed here ({error.name}): "
                'pip install "outrider[encoder]"'
            ) from None
        # The other cores are the engine's: it reads the same prompt meanwhile.
        threadpool_limits(limits=1, user_api="blas")
        folder = _folder(source)
        bert = read_bert(folder, depth)
        path = folder / "tokenizer.json"
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises no narrower one
            raise EncoderError(f"{path}: {error}") from error
        tokenizer.no_padding()
        tokenizer.enable_truncation(min(MAX_TOKENS, len(bert.places)))
        found = EncoderId(
            source=source if not Path(source).is_dir() else str(folder),
            fingerprint=_fingerprint(folder),
            dimension=bert.dimension,
            depth=bert.depth,
        )
        return cls(id=found, bert=bert, tokenizer=tokenizer)


def encoder_for(wanted: EncoderId, source: str | None = None) -> SentenceEncoder:
    """Load a router's encoder, from elsewhere if `source` says so.

    Raises EncoderError for one of another dimension, depth or weights than the router's.
    """
    encoder = SentenceEncoder.load(source or wanted.source, wanted.depth)
    found = encoder.id
    if found.dimension != wanted.dimension:
        raise EncoderError(
            f"the encoder {found.source} has embeddings of {found.dimension} numbers, the router "
            f"was trained with {wanted.dimension} ({wanted.source})"
        )
    if found.fingerprint != wanted.fingerprint:
        raise EncoderError(
            f"the encoder {found.source} is not the one that the router was trained with "
            f"({wanted.source}): fingerprint {found.fingerprint}, not {wanted.fingerprint}"
        )
    return encoder


def _folder(source: str) -> Path:
    """Return the folder of the encoder's files. Raises EncoderError."""
    folder = Path(source).expanduser()
    if folder.is_dir():
        return _with_files(folder.resolve(), source)
    name = source.replace("-", "_")
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise EncoderError(
            f"no sentence encoder {source!r}: neither a folder nor an installed package"
        )
    root = Path(next(iter(spec.submodule_search_locations)))
    inside = sorted(path.parent for path in (*root.glob(_FILES[0]), *root.glob(f"*/{_FILES[0]}")))
    return _with_files(inside[0] if inside else root, source)


def _with_files(folder: Path, source: str) -> Path:
    missing = [name for name in _FILES if not (folder / name).is_file()]
    if missing:
        raise EncoderError(f"the sentence encoder {source} has no {' and no '.join(missing)}")
    return folder


def _fingerprint(folder: Path) -> str:
    digest = hashlib.sha256()
    for name in _FILES[1:]:
        with (folder / name).open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]
