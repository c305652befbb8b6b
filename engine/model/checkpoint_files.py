"""Small files of a checkpoint, read without torch and, in a local folder, without transformers."""

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


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


def end_token_ids(path_or_id: str | Path) -> tuple[int, ...]:
    """Return the ids that config.json and generation_config.json end an answer at, merged.

    Either file may be absent, or name none. Of a model with several parts, the text's count.
    """
    folder = Path(path_or_id).expanduser()
    if folder.is_dir():
        config = read_object(folder / "config.json") or {}
        generation = read_object(folder / "generation_config.json") or {}
        return merged_ids(_own_ids(config), _own_ids(generation))
    from transformers import GenerationConfig, PretrainedConfig

    config, ends = {}, None
    with contextlib.suppress(OSError):
        config = PretrainedConfig.get_config_dict(str(path_or_id))[0]
    with contextlib.suppress(OSError):
        ends = GenerationConfig.from_pretrained(str(path_or_id)).eos_token_id
    return merged_ids(_own_ids(config), ends)


def _own_ids(options: Mapping[str, Any]) -> tuple[int, ...]:
    text = options.get("text_config")
    inner = text.get("eos_token_id") if isinstance(text, dict) else None
    return merged_ids(options.get("eos_token_id"), inner)
