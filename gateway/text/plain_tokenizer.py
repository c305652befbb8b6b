"""A checkpoint's tokenizer without transformers, where transformers would add nothing to it.

Importing transformers takes 1 to 2 seconds of processor time, reading tokenizer.json none.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from outrider.engine.model.checkpoint_files import read_object

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

_PLAIN_CLASSES: Final = frozenset({"TokenizersBackend", "PreTrainedTokenizerFast"})
_LISTS: Final = ("extra_special_tokens", "additional_special_tokens")
# The fields by which transformers changes the meaning of tokenizer.json.
_CHANGES: Final = frozenset(
    {"add_bos_token", "add_eos_token", "add_prefix_space", "added_tokens_decoder", "auto_map"}
)
_OTHER_FILES: Final = (
    "added_tokens.json",
    "special_tokens_map.json",
    "additional_chat_templates",
    "tekken.json",
)


class PlainTokenizer:
    """Provides the parts of a transformers tokenizer that `ChatTokenizer` uses. Thread-safe."""

    def __init__(self, folder: Path, backend: "Tokenizer", config: Mapping[str, Any]) -> None:
        """`config`: the contents of tokenizer_config.json."""
        self.backend_tokenizer = backend
        self.special_tokens_map = dict(_named_tokens(config))
        self.bos_token_id = _token_id(backend, config.get("bos_token"))
        self.eos_token_id = _token_id(backend, config.get("eos_token"))
        self.chat_template = _chat_template(folder, config)
        self.chat_control_tokens = config.get("chat_control_tokens")

    @classmethod
    def find(cls, path_or_id: str | Path) -> Self | None:
        """Read the tokenizer of a local folder; None where transformers has to read it."""
        folder = Path(path_or_id).expanduser()
        config = read_object(folder / "tokenizer_config.json")
        saved = read_object(folder / "tokenizer.json")
        if config is None or saved is None or not _is_plain(folder, config, saved):
            return None
        from tokenizers import Tokenizer

        return cls(folder, Tokenizer.from_file(str(folder / "tokenizer.json")), config)


def load_tokenizer(path_or_id: str | Path) -> "PlainTokenizer | PreTrainedTokenizerBase":
    """Return the tokenizer of a folder or hub id, without transformers where that is possible.

    Raises OSError or ValueError as transformers does.
    """
    if (plain := PlainTokenizer.find(path_or_id)) is not None:
        return plain
    from transformers import AutoTokenizer

    # Otherwise it would ask on a terminal for leave to run the checkpoint's code.
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        str(path_or_id), trust_remote_code=False
    )
    return tokenizer


def _is_plain(folder: Path, config: Mapping[str, Any], saved: Mapping[str, Any]) -> bool:
    """Return whether tokenizer.json has all that transformers would add to it."""
    named = [token for _, token in _named_tokens(config)]
    for name in _LISTS:
        tokens = config.get(name) or []
        if not isinstance(tokens, list):
            return False
        named += tokens
    added = saved.get("added_tokens") or []
    special = {token["content"] for token in added if token["special"]}
    template = config.get("chat_template")
    return (
        config.get("tokenizer_class") in _PLAIN_CLASSES
        and not _CHANGES & config.keys()
        and not any((folder / name).exists() for name in _OTHER_FILES)
        and all(isinstance(token, str) and token in special for token in named)
        and (template is None or isinstance(template, str))
    )


def _named_tokens(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the tokens that have names, such as `bos_token` or a model's own `image_token`."""
    for name, token in config.items():
        if name.endswith("_token") and token is not None and not isinstance(token, bool):
            yield name, token


def _token_id(backend: "Tokenizer", token: str | None) -> int | None:
    return None if token is None else backend.token_to_id(token)


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Read the template; its own file goes before the one in tokenizer_config.json."""
    path = folder / "chat_template.jinja"
    return path.read_text(encoding="utf-8") if path.is_file() else config.get("chat_template")


def special_ids(backend: Any) -> dict[str, int]:
    """Map the special tokens' texts to their ids."""
    tokens = backend.get_added_tokens_decoder().items()
    return {token.content: i for i, token in tokens if token.special and token.content}
