"""Finds the texts in JSON of a request or an answer, and puts others in their places."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from outrider.gateway.contract.errors.tree import BadRequestError

_WORDS: Final = frozenset({"role", "type", "object", "finish_reason", "service_tier"})
"""Fields whose strings are names, in the form of `_WORD`. Tools may use them for texts."""
_WORD: Final = re.compile(r"[a-z][a-z0-9_.]{0,63}")
_UNREAD: Final = re.compile(r"models?|choices\.\d+\.logprobs")
"""Where there are no texts: names of models, and tokens of an answer's text."""
_PLAIN_FIELD: Final = re.compile(r"[A-Za-z0-9_$.-]{1,64}")
_MAX_PATH_CHARS: Final = 256
_MEDIA_FIELDS: Final = frozenset({"data", "url", "image_url", "file_data"})
_BASE64: Final = re.compile(r"(?:data:[\w/.+;=-]{1,128},)?[A-Za-z0-9+/_-]{256,}={0,2}")
_PROMPTS: Final = ("prompt", "input", "input_prefix", "input_suffix")

Holder = dict[str, Any] | list[Any]


class Text(NamedTuple):
    """One string of a document, and where it stands."""

    path: str
    """Such as `messages.0.content`, cut after 256 characters: many texts may stand below one long
    name. An element with an `index` is named by it."""
    holder: Any
    key: Any
    is_field: bool = False
    """It is the name of a field, which follows the field's own text."""

    @property
    def value(self) -> str:
        """The string."""
        text: str = self.key if self.is_field else self.holder[self.key]
        return text

    def replace(self, text: str) -> None:
        """Put another string in its place."""
        if self.is_field:
            self.holder[text] = self.holder.pop(self.key)
        else:
            self.holder[self.key] = text


def texts_of(document: Holder, path: str = "") -> list[Text]:
    """Return the texts of a document; not its names, nor its images and sounds.

    The name of a field is a text where it is more than a word: tools' schemas have any names.
    """
    found: list[Text] = []
    waiting: list[tuple[str, Holder]] = [(path, document)]
    while waiting:
        path, holder = waiting.pop()
        inner = []
        for name, key, value in _items(holder):
            inside = (f"{path}.{name}" if path else name)[:_MAX_PATH_CHARS]
            if _UNREAD.fullmatch(inside):
                continue
            if isinstance(value, str):
                if value and not _is_no_text(key, inside, value):
                    found.append(Text(inside, holder, key))
            elif isinstance(value, dict | list):
                inner.append((inside, value))
            if isinstance(key, str) and _PLAIN_FIELD.fullmatch(key) is None:
                found.append(Text(f"{inside} (name)", holder, key, is_field=True))
        waiting += reversed(inner)
    return found


def _items(holder: Holder) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, key and value of what an object or an array holds."""
    if isinstance(holder, dict):
        for key, value in holder.items():
            yield key, key, value
        return
    for place, value in enumerate(holder):
        index = value.get("index") if isinstance(value, dict) else None
        yield str(index if type(index) is int else place), place, value


def _is_no_text(key: object, inside: str, value: str) -> bool:
    """Return whether a string is a name, an image or a sound."""
    is_media_field = key in _MEDIA_FIELDS or ".images." in inside
    is_word = key in _WORDS and _WORD.fullmatch(value) is not None
    return is_word or (is_media_field and _BASE64.fullmatch(value) is not None)


def refuse_token_ids(document: Mapping[str, Any]) -> None:
    """Raise BadRequestError for a prompt in token ids, whose text is not known."""
    for name in _PROMPTS:
        prompt = document.get(name)
        if isinstance(prompt, list) and any(isinstance(part, int | list) for part in prompt):
            raise BadRequestError(
                f"{name}: token ids cannot be checked as this server's operator wants; send text.",
                param=name,
            )
