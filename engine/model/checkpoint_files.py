"""Small files of a checkpoint, read without torch and, in a local folder, without transformers."""

import contextlib
import json
from pathlib import Path
from typing import Any


def read_object(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file; None where there is no file, or no object in it."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def generation_eos(path_or_id: str | Path) -> int | list[int] | None:
    """Return what generation_config.json, which is optional, ends an answer at."""
    folder = Path(path_or_id).expanduser()
    if folder.is_dir():
        options = read_object(folder / "generation_config.json") or {}
        return options.get("eos_token_id")
    from transformers import GenerationConfig

    with contextlib.suppress(OSError):
        ids: int | list[int] | None = GenerationConfig.from_pretrained(str(path_or_id)).eos_token_id
        return ids
    return None
