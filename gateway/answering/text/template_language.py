"""The language of chat templates: Jinja in a sandbox, with what transformers adds to it.

Templates come with checkpoints and are untrusted: they may not change what they are given, nor
reach Python's internals by a dictionary's or a namespace's attributes.
"""

import datetime as dt
import functools
import json
from typing import Any, Final, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Const, Node, TemplateData
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_DICT_ATTRIBUTES: Final = frozenset(dir(dict))


class _Generation(Extension):
    """The tag `generation`: it marks what the model wrote and renders what is in it."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares a plain set

    def parse(self, parser: Parser) -> Node:
        """Read the tag up to its end."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_rendered"), [], [], body).set_lineno(line)

    @staticmethod
    def _rendered(caller: Macro) -> str:
        return caller()


class _Dictionaries:
    """The global `dict`, without the attributes of Python's own type."""

    def __call__(self, *items: Any, **fields: Any) -> dict[Any, Any]:
        return dict(*items, **fields)

    def fromkeys(self, keys: Any, value: Any = None) -> dict[Any, Any]:
        """Give each key the same value."""
        return dict.fromkeys(keys, value)


class _Namespace(Namespace):
    """The global `namespace`, which keeps no name with an underscore in front."""

    def __init__(*items: Any, **fields: Any) -> None:  # `self` may be a field, too
        self, *values = items
        attributes = dict(*values, **fields)
        for name in attributes:
            _check_attribute(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(
            f"a chat template may not keep {name!r} in a namespace: rename it, without an "
            "underscore in front"
        )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return dt.datetime.now().strftime(layout)  # the local time, as transformers gives it


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON for a prompt; Jinja's own filter would escape HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's, which finds the fields of messages without asking for an attribute first."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return what `obj.attribute` is in a template.

        Jinja asks a dictionary for an attribute before it looks for a field: the error that says
        that there is none takes 7,000 instructions, for each field of each message.
        """
        if type(obj) is dict and attribute not in _DICT_ATTRIBUTES:
            if attribute in obj:
                return obj[attribute]
            return self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(
        {
            "dict": _Dictionaries(),
            "namespace": _Namespace,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }
    )
    return environment


_ENVIRONMENT: Final = _environment()


@functools.lru_cache(maxsize=32)
def compile_template(source: str) -> jinja2.Template:
    """Compile a chat template. Raises jinja2.TemplateSyntaxError."""
    compiled = _ENVIRONMENT.from_string(source)
    compiled.globals = dict(compiled.globals)  # a chain of dicts is slow, and all are read
    return compiled


def check_syntax(source: str) -> None:
    """Raise jinja2.TemplateSyntaxError for what is no template."""
    _ENVIRONMENT.parse(source)


def written_texts(source: str) -> str:
    """Return the texts that a template writes itself, apart from each other by a NUL.

    Raises jinja2.TemplateSyntaxError.
    """
    tree = _ENVIRONMENT.parse(source)
    texts = {node.data for node in tree.find_all(TemplateData)}
    texts |= {node.value for node in tree.find_all(Const) if isinstance(node.value, str)}
    return "\0".join(texts)
