"""Tells which tokenizers tokenizer.json and tokenizer_config.json describe in full.

transformers builds some from the vocabulary alone, by rules of their class. Those count only where
tokenizer.json says the same; all others are left to transformers.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

_PLAIN: Final = frozenset({"TokenizersBackend", "PreTrainedTokenizer"})
_LISTS: Final = ("extra_special_tokens", "additional_special_tokens")
# Fields by which transformers changes the meaning of tokenizer.json.
_CHANGES: Final = ("auto_map", "split_special_tokens", "fix_mistral_regex")
# Read where tokenizer_config.json does not list the added tokens itself.
_OLDER_FILES: Final = ("added_tokens.json", "special_tokens_map.json")
_FLAGS: Final = ("single_word", "lstrip", "rstrip", "normalized", "special")
_MODEL: Final = (
    *("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"),
    *("fuse_unk", "byte_fallback", "ignore_merges"),
)
_QWEN_WORDS: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_END: Final = "<|endoftext|>"
# By class: the names of tokens that it gives where tokenizer_config.json gives none, and its parts
# of tokenizer.json.
_NAMES: Final[Mapping[str, Mapping[str, str]]] = {
    "Qwen2Tokenizer": {"unk_token": _END, "eos_token": _END, "pad_token": _END},
    "GPT2Tokenizer": {"unk_token": _END, "bos_token": _END, "eos_token": _END},
    "GemmaTokenizer": {
        f"{name}_token": f"<{name}>" for name in ("unk", "bos", "eos", "pad", "mask")
    },
}
_PARTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "Qwen2Tokenizer": {
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split",
                    "pattern": {"Regex": _QWEN_WORDS},
                    "behavior": "Isolated",
                    "invert": False,
                },
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        },
        "decoder": "ByteLevel",
        "model": {},
    },
    "GPT2Tokenizer": {
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
        "decoder": "ByteLevel",
        "model": {},
    },
    "GemmaTokenizer": {
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"String": " "},
            "behavior": "MergedWithPrevious",
            "invert": False,
        },
        "decoder": "Sequence",
        "model": {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True},
    },
}


def complete_config(
    folder: Path, config: Mapping[str, Any], saved: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return tokenizer_config.json with all that its class adds, tokens as their texts.

    None where transformers has to read the tokenizer. `saved`: tokenizer.json.
    """
    kind = str(config.get("tokenizer_class")).removesuffix("Fast")
    is_built = kind in _PARTS
    padding = saved.get("padding") or {}
    given = {**_NAMES.get(kind, {}), **config}
    if padding:
        given.setdefault("pad_token", padding["pad_token"])
    complete = {name: _text(value) for name, value in given.items()}
    added = {token["content"]: token for token in saved.get("added_tokens") or []}
    named = _named(complete)
    is_read = (
        (is_built and _is_as_built(kind, config, saved))
        or kind in _PLAIN
        or (kind == "LlamaTokenizer" and _is_of_bytes(saved))
    )
    if not is_read or named is None or any(map(config.get, _CHANGES)):
        return None
    if not all(_is_special(added.get(text), is_built) for text in named):
        return None
    return complete if _adds_nothing(folder, config, added) else None


def _text(token: Any) -> Any:
    """Return the text of a token that is written with its flags; others as they are."""
    is_token = isinstance(token, dict) and token.get("__type") == "AddedToken"
    return token["content"] if is_token else token


def named_tokens(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the tokens that have names, such as `bos_token` or a model's own `image_token`."""
    for name, token in config.items():
        if name.endswith("_token") and token is not None and not isinstance(token, bool):
            yield name, token


def _named(config: Mapping[str, Any]) -> list[str] | None:
    """Return the texts of all special tokens that the config names; None for another form."""
    tokens = [token for _, token in named_tokens(config)]
    for name in _LISTS:
        more = config.get(name) or []
        if not isinstance(more, list):
            return None
        tokens += map(_text, more)
    return tokens if all(isinstance(token, str) for token in tokens) else None


def _is_special(token: Mapping[str, Any] | None, is_built: bool) -> bool:
    """Return whether a named token is special; a built class takes all other flags off."""
    if token is None or not token["special"]:
        return False
    return not (is_built and any(token[flag] for flag in _FLAGS[:-1]))


def _adds_nothing(
    folder: Path, config: Mapping[str, Any], added: Mapping[str, Mapping[str, Any]]
) -> bool:
    """Return whether neither the config nor other files change the added tokens."""
    if (folder / "tekken.json").exists():
        return False
    if "added_tokens_decoder" not in config:
        return not any((folder / name).exists() for name in _OLDER_FILES)
    for token_id, token in config["added_tokens_decoder"].items():
        known = added.get(token.get("content"))
        if known is None or str(known["id"]) != token_id:
            return False
        if any(token.get(flag, False) != known[flag] for flag in _FLAGS):
            return False
    return True


def _is_of_bytes(saved: Mapping[str, Any]) -> bool:
    """Return whether a tokenizer splits text into bytes; then transformers reads it as it is."""
    return "'ByteLevel'" in repr([saved.get("pre_tokenizer"), saved.get("decoder")])


def _is_as_built(kind: str, config: Mapping[str, Any], saved: Mapping[str, Any]) -> bool:
    """Return whether tokenizer.json has the parts that its class would build."""
    parts, model = _PARTS[kind], saved.get("model") or {}
    return (
        not config.get("add_prefix_space")
        and model.get("type") == "BPE"
        and all((model.get(name) or None) == parts["model"].get(name) for name in _MODEL)
        and (saved.get("decoder") or {}).get("type") == parts["decoder"]
        and saved.get("normalizer") == parts["normalizer"]
        and _of_ids(saved.get("pre_tokenizer")) == parts["pre_tokenizer"]
    )


def _of_ids(part: Any) -> Any:
    """Leave out what changes offsets, but no ids."""
    if isinstance(part, dict):
        return {name: _of_ids(value) for name, value in part.items() if name != "trim_offsets"}
    return [_of_ids(each) for each in part] if isinstance(part, list) else part
