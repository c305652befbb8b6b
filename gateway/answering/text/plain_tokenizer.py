"""A checkpoint's tokenizer without transformers, where transformers would add nothing to it.

Importing transformers takes 1 to 2 seconds of processor time, reading tokenizer.json none.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from outrider.engine.model.checkpoint_files import read_object, small_files
from outrider.gateway.answering.text.tokenizer_config import complete_config, named_tokens
from outrider.gateway.settings.extras import need_extra

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

_TEMPLATE_FILE: Final = "chat_template.jinja"
_TEMPLATES: Final = "additional_chat_templates"


class PlainTokenizer:
    """Provides the parts of a transformers tokenizer that `ChatTokenizer` uses. Thread-safe."""

    def __init__(self, folder: Path, backend: "Tokenizer", config: Mapping[str, Any]) -> None:
        """`config`: of `complete_config`."""
        self.backend_tokenizer = backend
        self.special_tokens_map = dict(named_tokens(config))
        self.bos_token_id = _token_id(backend, config.get("bos_token"))
        self.eos_token_id = _token_id(backend, config.get("eos_token"))
        self.chat_template = _chat_template(folder, config)
        self.chat_control_tokens = config.get("chat_control_tokens")

    @classmethod
    def find(cls, path_or_id: str | Path) -> Self | None:
        """Read a tokenizer; None where transformers has to read it. Raises OSError, ValueError."""
        folder = small_files(path_or_id)
        given = read_object(folder / "tokenizer_config.json")
        saved = read_object(folder / "tokenizer.json")
        config = given and saved and complete_config(folder, given, saved)
        if not config:
            return None
        from tokenizers import Tokenizer

        return cls(folder, Tokenizer.from_file(str(folder / "tokenizer.json")), config)


def load_tokenizer(path_or_id: str | Path) -> "PlainTokenizer | PreTrainedTokenizerBase":
    """Return the tokenizer of a folder or hub id, without transformers where that is possible.

    Raises OSError or ValueError as transformers does, MissingExtraError where it is not there.
    """
    if (plain := PlainTokenizer.find(path_or_id)) is not None:
        return plain
    need_extra("transformers", f"The tokenizer of {path_or_id}")
    from transformers import AutoTokenizer

    # Otherwise it would ask on a terminal for leave to run the checkpoint's code.
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        str(path_or_id), trust_remote_code=False
    )
    return tokenizer


def _token_id(backend: "Tokenizer", token: str | None) -> int | None:
    return None if token is None else backend.token_to_id(token)


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | dict[str, str] | None:
    """Read the template, or several by name; files go before tokenizer_config.json."""
    files = {file.stem: file for file in sorted((folder / _TEMPLATES).glob("*.jinja"))}
    if (folder / _TEMPLATE_FILE).is_file():
        files["default"] = folder / _TEMPLATE_FILE
    if found := {name: file.read_text(encoding="utf-8") for name, file in files.items()}:
        return found["default"] if set(found) == {"default"} else found
    template = config.get("chat_template")
    if isinstance(template, list):
        return {each["name"]: each["template"] for each in template}
    return template


def special_ids(backend: Any) -> dict[str, int]:
    """Map the special tokens' texts to their ids."""
    tokens = backend.get_added_tokens_decoder().items()
    return {token.content: i for i, token in tokens if token.special and token.content}
