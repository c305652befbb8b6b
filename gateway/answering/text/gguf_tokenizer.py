"""The tokenizer and the chat template that a GGUF file describes, written as transformers' files.

`python -m outrider.gateway.answering.text.gguf_tokenizer FILE FOLDER` does the work in a process of
its own: transformers needs torch to read such files, and the gateway's process has none.
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from outrider.engine.errors import UnsupportedModelError
from outrider.engine.model.gguf.header import GgufHeader

# How text is split before merges, where transformers reads it from the file.
_READ: Final = frozenset(
    {"llama-bpe", "llama3", "llama-v3", "qwen2", "deepseek-r1-qwen", "tekken", "smaug-bpe"}
    | {"dbrx", "pixtral", "gpt-4o", "llama4", "falcon3", "gpt-2"}
)
# Every digit by itself, then as GPT-2.
_DIGITS_FIRST: Final = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell"})
_PATIENCE_S: Final = 180.0
_MODEL, _SPLIT = "tokenizer.ggml.model", "tokenizer.ggml.pre"


def write_tokenizer(header: GgufHeader, folder: Path) -> None:
    """Write tokenizer.json and what belongs to it into a folder.

    Raises UnsupportedModelError for a vocabulary that cannot be read.
    """
    kind, split = header.fields.get(_MODEL), header.fields.get(_SPLIT)
    if kind == "gpt2" and split not in _READ | _DIGITS_FIRST:
        raise _error(header, f"its text is split as {str(split)[:50]!r}, which is not read")
    command = [sys.executable, "-m", __name__, str(header.path), str(folder)]
    try:
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=_PATIENCE_S)
    except (OSError, subprocess.SubprocessError) as error:
        lines = str(getattr(error, "stderr", None) or error).strip().splitlines()
        raise _error(header, f"its tokenizer cannot be read ({lines[-1][:300]})") from error
    if kind == "gpt2" and split in _DIGITS_FIRST:
        _split_digits(folder / "tokenizer.json")


def _split_digits(path: Path) -> None:
    document = json.loads(path.read_text())
    levels: list[Mapping[str, Any]] = [
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    ]
    document["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": levels}
    path.write_text(json.dumps(document, ensure_ascii=False))


def _error(header: GgufHeader, sentence: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{header.path}: {sentence}. Put the model's tokenizer.json (and tokenizer_config.json) "
        "beside the file."
    )


def _convert(file: Path, folder: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(file.parent), gguf_file=file.name)
    tokenizer.save_pretrained(str(folder))


if __name__ == "__main__":
    _convert(Path(sys.argv[1]), Path(sys.argv[2]))
