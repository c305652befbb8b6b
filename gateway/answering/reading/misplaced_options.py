"""Refuses requests that mean to be private but say so in the wrong place.

The local models' strict schema refuses unknown fields. An upstream tier may know more fields than
ours, and labels are accepted and left out, so a misspelt or misplaced option would be lost and the
prompt sent.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, NoReturn

from outrider.gateway.contract.errors.tree import BadRequestError

_OPTIONS: Final = "outrider"
_PRIVATE: Final = frozenset({"privacy", "private", "isprivate"})
_SHORTEST: Final = min(map(len, _PRIVATE))
_OTHER_SIGNS: Final = re.compile(r"[^a-z]")
_NO: Final = frozenset({"", "false", "no", "none", "off", "public", "0"})
_CONVERSATIONS: Final = ("messages", "input")
_HEADER: Final = "x-outrider-privacy"
_MAX_SHOWN_CHARS: Final = 80
_Object = Mapping[str, Any]


def refuse_misplaced_options(document: _Object) -> None:
    """Raise BadRequestError for our options in another place than `outrider`.

    A request that is private already may hold anything. The places are the request's fields,
    objects in them, and messages with the objects in those. Schemas, and arguments of calls, are
    skipped: their names are the client's own.
    """
    options = document.get(_OPTIONS)
    if isinstance(options, dict) and options.get("privacy") is not None:
        return
    for path, place in _places(document):
        for name, value in place.items():
            if name == _OPTIONS and not path:
                continue
            if _is_ours(name) or _is_private(name, value):
                _refuse(path + name)


def refuse_privacy_header(headers: Mapping[str, str]) -> None:
    """Raise BadRequestError for a header that means our option. `headers` by lower-case names."""
    if headers.get(_HEADER, "").strip().lower() not in _NO:
        _refuse(_HEADER)


def _places(document: _Object) -> Iterator[tuple[str, _Object]]:
    """Yield the objects in which options could be meant, each with the path to it."""
    yield "", document
    for name, value in document.items():
        if name == _OPTIONS:
            continue  # its own schema is strict
        if isinstance(value, dict):
            yield f"{name}.", value
        elif name in _CONVERSATIONS and isinstance(value, list):
            for index, item in enumerate(value):
                yield from _message_places(item, f"{name}.{index}.")


def _message_places(message: object, path: str) -> Iterator[tuple[str, _Object]]:
    """Yield a message, and the objects in its fields and in lists there."""
    if not isinstance(message, dict):
        return
    yield path, message
    for name, value in message.items():
        inner = value if isinstance(value, list) else [value]
        for item in inner:
            if isinstance(item, dict):
                yield f"{path}{name}.", item


def _is_ours(name: str) -> bool:
    return _OPTIONS in name.lower()


def _is_private(name: str, value: object) -> bool:
    """Return whether a field of another schema can only mean ours: `"privacy": "private"`."""
    if len(name) < _SHORTEST or _OTHER_SIGNS.sub("", name.lower()) not in _PRIVATE:
        return False
    return str(value).lower() not in _NO


def _refuse(path: str) -> NoReturn:
    param = path[:_MAX_SHOWN_CHARS]
    raise BadRequestError(
        f'{param}: write it as "outrider": {{"privacy": "private"}}, at the top of the '
        "request; here it would not keep the request on this machine.",
        param=param,
    )
