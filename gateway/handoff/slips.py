"""Requests that mean to be private and do not say so where it counts: refused, not sent elsewhere.

The local models' strict schema refuses what it does not know. A tier elsewhere may know more fields
than ours, so that a misspelt or misplaced option would be sent to it, with the prompt.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, Final, NoReturn

from gateway.errors import BadRequestError

_OPTIONS: Final = "outrider"
_PRIVATE: Final = frozenset({"privacy", "private", "isprivate"})
_OTHER_SIGNS: Final = re.compile(r"[^a-z]")
_NO: Final = frozenset({"", "false", "no", "none", "off", "public", "0"})


def refuse_slips(body: bytes, document: Mapping[str, Any]) -> None:
    """Raise BadRequestError for our options in another place or twice.

    `document` is what was read of `body`. Of a name that is there twice, JSON readers take the last
    one, so that a request could be private for its author only.
    """
    for name, value in document.items():
        if name == _OPTIONS:
            continue
        if _is_ours(name) or _is_private(name, value):
            _refuse(name)
        if type(value) is dict:
            for inner, told in value.items():
                if type(inner) is str and (_is_ours(inner) or _is_private(inner, told)):
                    _refuse(f"{name}.{inner}")
    if body.count(b'"outrider"') > 1 or body.count(b'"privacy"') > 1:
        _refuse_twins(body)


def _is_ours(name: str) -> bool:
    return _OPTIONS in name.lower()


def _is_private(name: str, value: object) -> bool:
    """Whether a field of another schema can only mean ours: `"privacy": "private"`."""
    if _OTHER_SIGNS.sub("", name.lower()) not in _PRIVATE:
        return False
    return str(value).lower() not in _NO


def _refuse(param: str) -> NoReturn:
    raise BadRequestError(
        f'{param[:80]}: write it as "outrider": {{"privacy": "private"}}, at the top of the '
        "request; here it would not keep it on this machine.",
        param=param[:80],
    )


def _refuse_twins(body: bytes) -> None:
    """Look at names that are there twice, which no usual reader shows."""
    outermost = json.loads(body, object_pairs_hook=_Pairs)
    options = [value for name, value in outermost if name == _OPTIONS]
    if len(options) > 1:
        _refuse_twin(_OPTIONS)
    names = [name for name, _ in options[0]] if options and type(options[0]) is _Pairs else []
    for name in names:
        if names.count(name) > 1:
            _refuse_twin(f"{_OPTIONS}.{name}")


def _refuse_twin(param: str) -> NoReturn:
    raise BadRequestError(f"{param}: it stands there twice; say it once.", param=param)


class _Pairs(list[tuple[str, Any]]):
    """An object with all its names."""
