"""Variables that a client gives to a chat template, and what none of them may be or cost.

Every path that renders a template or sends variables to one checks them here.
"""

from collections.abc import Collection, Mapping
from typing import Annotated, Any, Final

from pydantic import JsonValue, WithJsonSchema

from outrider.gateway.contract.errors.tree import BadRequestError

FIELD: Final = "chat_template_kwargs"
MAX_VARIABLES: Final = 32
MAX_NAME_CHARS: Final = 64
MAX_VALUE_CHARS: Final = 1024
MAX_ITEMS: Final = 64
MAX_NUMBER: Final = 2**53

RESERVED: Final = frozenset(
    {
        # The template, and the conversation that it renders.
        "chat_template",
        "conversation",
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        # Options of the function that renders.
        "tokenize",
        "sanitize_control_tokens",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
        # Control tokens, which only the tokenizer names.
        "bos_token",
        "eos_token",
        "unk_token",
        "sep_token",
        "pad_token",
        "cls_token",
        "mask_token",
        # Names of the template language.
        "raise_exception",
        "strftime_now",
        "range",
        "dict",
        "lipsum",
        "cycler",
        "joiner",
        "namespace",
        "loop",
        "self",
    }
)
"""Names that are not a client's to set, whichever tokenizer renders."""

_SCALARS: Final[list[dict[str, Any]]] = [
    {"type": "boolean"},
    {"type": "null"},
    {"type": "number", "minimum": -MAX_NUMBER, "maximum": MAX_NUMBER},
    {"type": "string", "maxLength": MAX_VALUE_CHARS},
]
_JSON_SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "maxProperties": MAX_VARIABLES,
    "propertyNames": {"maxLength": MAX_NAME_CHARS},
    "additionalProperties": {
        "anyOf": [
            *_SCALARS,
            {"type": "array", "maxItems": MAX_ITEMS, "items": {"anyOf": _SCALARS}},
        ]
    },
}

TemplateVariables = Annotated[dict[str, JsonValue], WithJsonSchema(_JSON_SCHEMA)]
"""The field of a request's body; its values are checked by `read_variables`."""


def read_variables(given: object, reserved: Collection[str] = ()) -> dict[str, Any]:
    """Return the variables of a request, checked. `reserved`: names beside those of all templates.

    A value is a boolean, a number, a short string, or a short list of those: a template may loop
    over a value, so nothing is nested. Raises BadRequestError that names the variable.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise _refusal("", "must be an object of variables")
    if len(given) > MAX_VARIABLES:
        raise _refusal("", f"at most {MAX_VARIABLES} variables, not {len(given)}")
    for name, value in given.items():
        _check_name(name, reserved)
        _check_value(name, value)
    return dict(given)


def _check_name(name: str, reserved: Collection[str]) -> None:
    if len(name) > MAX_NAME_CHARS:
        reason = f"a name has at most {MAX_NAME_CHARS} characters, not {len(name)}"
        raise _refusal(f"{name[:MAX_NAME_CHARS]}...", reason)
    if name in RESERVED or name in reserved:
        raise _refusal(name, "this name is reserved")


def _check_value(name: str, value: object) -> None:
    items = value if isinstance(value, list) else [value]
    if len(items) > MAX_ITEMS:
        raise _refusal(name, f"a list has at most {MAX_ITEMS} values, not {len(items)}")
    if any(isinstance(item, list | Mapping) for item in items):
        allowed = "a boolean, a number, a string, or a list of those; nothing may be nested"
        raise _refusal(name, f"must be {allowed}")
    num_chars = sum(len(item) for item in items if isinstance(item, str))
    if num_chars > MAX_VALUE_CHARS:
        raise _refusal(name, f"at most {MAX_VALUE_CHARS} characters of text, not {num_chars}")
    if any(isinstance(item, int | float) and abs(item) > MAX_NUMBER for item in items):
        raise _refusal(name, "numbers lie between -2**53 and 2**53")


def _refusal(name: str, reason: str) -> BadRequestError:
    param = f"{FIELD}.{name}" if name else FIELD
    return BadRequestError(f"{param}: {reason}.", param=param)
