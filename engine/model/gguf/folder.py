"""A folder that stands for a GGUF file: its config.json, and a link to the file as model.gguf.

So all that reads checkpoints from folders reads this one, too. A tokenizer comes from beside the
file, or is made by who loads text (gateway/answering/text/gguf_tokenizer.py).
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from outrider.engine.errors import UnsupportedModelError
from outrider.engine.model.gguf.config import config_of
from outrider.engine.model.gguf.header import GgufHeader, read_header

LINK: Final = "model.gguf"
_SUFFIX: Final = ".gguf"
_VERSION: Final = "3"  # raised whenever a folder would get other contents
_GENERATION: Final = "generation_config.json"
_BESIDE: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    _GENERATION,
)
_SAMPLING: Final = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
"""Keys of a file's header, as llama.cpp writes them."""


def find_gguf(path_or_id: str) -> Path | None:
    """Return the GGUF file that a path means: itself, or the only one in a folder.

    None for what is no such file and holds none, or is a checkpoint with a config.json. Raises
    UnsupportedModelError for a folder with several.
    """
    path = Path(path_or_id).expanduser()
    if path.suffix == _SUFFIX and path.is_file():
        return path
    if not path.is_dir() or (path / "config.json").is_file():
        return None
    found = sorted(path.glob(f"*{_SUFFIX}"))
    if len(found) > 1:
        names = ", ".join(each.name for each in found[:6]) + (" …" if len(found) > 6 else "")
        raise UnsupportedModelError(
            f"{path} has {len(found)} GGUF files: name one of them ({names}), as in "
            f"{path / found[0].name}."
        )
    return found[0] if found else None


def gguf_folder(
    file: Path, keep_in: Path, *, add_tokenizer: Callable[[GgufHeader, Path], None]
) -> Path:
    """Return the folder that stands for a file; it is made once, below `keep_in`.

    `add_tokenizer`: writes the tokenizer that the file describes into a folder, where none lies
    beside the file. Raises UnsupportedModelError for a file that cannot be read.
    """
    file = file.resolve()
    folder = keep_in / "gguf" / _key(file) / file.stem
    if (folder / "config.json").is_file():
        return folder
    header = read_header(file)
    factors = None
    if "rope_freqs.weight" in header.tensors:
        from outrider.engine.model.gguf.tensors import rope_factors  # torch

        factors = rope_factors(file, header)
    config = config_of(header, factors)
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        draft = Path(name) / file.stem
        draft.mkdir()
        (draft / LINK).symlink_to(file)
        _add_texts(header, draft, add_tokenizer)
        (draft / "config.json").write_text(json.dumps(config, indent=1))
        try:
            os.rename(draft, folder)
        except OSError:  # another process was faster
            if not (folder / "config.json").is_file():
                raise
    return folder


def _add_texts(
    header: GgufHeader, draft: Path, add_tokenizer: Callable[[GgufHeader, Path], None]
) -> None:
    for name in _BESIDE:
        if (beside := header.path.with_name(name)).is_file():
            shutil.copy(beside, draft / name)
    if not (draft / _GENERATION).is_file() and (sampling := _sampling(header)):
        (draft / _GENERATION).write_text(json.dumps(sampling, indent=1))
    if not (draft / "tokenizer.json").is_file():
        add_tokenizer(header, draft)


def _sampling(header: GgufHeader) -> dict[str, object]:
    """Return the sampling parameters that a file recommends, by transformers' names."""
    return {
        name: header.fields[key]
        for key, name in _SAMPLING.items()
        if header.fields.get(key) is not None
    }


def _key(file: Path) -> str:
    """Return what changes with the file, and with a tokenizer beside it."""
    places = [file, *(file.with_name(name) for name in _BESIDE)]
    stats = [(each.name, each.stat()) for each in places if each.is_file()]
    facts = [_VERSION, str(file), *((name, s.st_size, s.st_mtime_ns) for name, s in stats)]
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=8).hexdigest()
