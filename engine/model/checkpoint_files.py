"""Small files of a checkpoint, read without torch and without transformers."""

import contextlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from outrider.verifier.params import SamplingParams

logger = logging.getLogger(__name__)

_SMALL_FILES: Final = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "added_tokens.json", "tekken.json"),
    *("chat_template.jinja", "additional_chat_templates/*.jinja"),
)
_TEXT_FILES: Final = ("*.json", "*.jinja", "*.txt", "*.model")
ALL_FILES: Final = (*_TEXT_FILES, "*.safetensors")
"""Patterns of what is read of a checkpoint on the hub, without weights and with them."""
FIM_NAMES: Final = ("pre", "suf", "mid", "pad", "rep", "sep")
"""llama.cpp's names of the tokens for text in the middle: `tokenizer.ggml.fim_pre_token_id` …"""
_SAMPLING_FIELDS: Final = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def read_object(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file; None where there is no file, or no object in it."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def merged_ids(*found: object) -> tuple[int, ...]:
    """Return each id once, of fields that hold one id or several; what is no id is left out."""
    lists = (ids if isinstance(ids, (list, tuple)) else [ids] for ids in found)
    ids = (each for several in lists for each in several if type(each) is int)
    return tuple(dict.fromkeys(ids))


def small_files(path_or_id: str | Path) -> Path:
    """Return a checkpoint's folder; of a hub id, the one with its configs and its tokenizer.

    They are fetched if they are not in the cache. Raises OSError or ValueError.
    """
    folder = Path(path_or_id).expanduser()
    if folder.is_dir():
        return folder
    import huggingface_hub

    return Path(
        huggingface_hub.snapshot_download(str(path_or_id), allow_patterns=list(_SMALL_FILES))
    )


def pinned_folder(model_id: str, revision: str) -> Path:
    """Return the folder of the hub's cache that has a revision's configs and its tokenizer.

    It is named by the commit, and has the weights once they are fetched. Raises OSError or
    ValueError.
    """
    import huggingface_hub

    return Path(
        huggingface_hub.snapshot_download(
            model_id, revision=revision, allow_patterns=list(_TEXT_FILES)
        )
    )


def model_name(path_or_id: str) -> str:
    """Return a folder's name; of a hub id, or a folder of the hub's cache, the model's."""
    if hub_commit(path_or_id):
        return Path(path_or_id).parts[-3].rpartition("--")[2]
    return path_or_id.rstrip("/").rpartition("/")[2]


def hub_commit(path: str) -> str | None:
    """Return the commit that a folder of the hub's cache holds; None for other folders."""
    match Path(path).parts:
        case [*_, repository, "snapshots", commit] if repository.startswith("models--"):
            return commit
    return None


def written_at(folder: str) -> int:
    """Return when a checkpoint's newest weights were written, seconds since 1970; 0: not known."""
    files = (path for pattern in ("*.safetensors", "*.gguf") for path in Path(folder).glob(pattern))
    try:
        return int(max((path.stat().st_mtime for path in files), default=0.0))
    except OSError:
        return 0


def end_token_ids(path_or_id: str | Path) -> tuple[int, ...]:
    """Return the ids that config.json and generation_config.json end an answer at, merged.

    Either file may be absent, or name none. Of a model with several parts, the text's count.
    """
    folder = Path(path_or_id).expanduser()
    with contextlib.suppress(OSError):
        folder = small_files(path_or_id)
    config = read_object(folder / "config.json") or {}
    generation = read_object(folder / "generation_config.json") or {}
    return merged_ids(_own_ids(config), _own_ids(generation))


def fim_token_ids(path_or_id: str | Path) -> dict[str, int]:
    """Return the tokens for text in the middle that config.json names; only GGUF files do."""
    with contextlib.suppress(OSError):
        path_or_id = small_files(path_or_id)
    config = read_object(Path(path_or_id).expanduser() / "config.json") or {}
    found = config.get("fim_token_ids")
    given = found if isinstance(found, dict) else {}
    return {name: given[name] for name in FIM_NAMES if type(given.get(name)) is int}


def sampling_defaults(path_or_id: str | Path) -> dict[str, float]:
    """Return the sampling parameters that generation_config.json sets, by our names.

    Those that are no numbers, or out of bounds, are left out with a warning.
    """
    with contextlib.suppress(OSError):
        path_or_id = small_files(path_or_id)
    given = read_object(Path(path_or_id).expanduser() / "generation_config.json") or {}
    found = {}
    for name in _SAMPLING_FIELDS:
        value = given.get(name)
        if value is None:
            continue
        try:
            SamplingParams(max_tokens=1, **{name: value})
        except (TypeError, ValueError) as error:
            logger.warning("generation_config.json is ignored field=%s reason=%s", name, error)
        else:
            found[name] = value
    return found


def _own_ids(options: Mapping[str, Any]) -> tuple[int, ...]:
    text = options.get("text_config")
    inner = text.get("eos_token_id") if isinstance(text, dict) else None
    return merged_ids(options.get("eos_token_id"), inner)
