"""Structures that Python hands to the compiled library have the fields of its headers.

Nothing is compiled: the headers are read as text. A field too many, or one of another type, would
have the library read what lies beside it.
"""

import ctypes
import re
from collections.abc import Iterator
from typing import Any, Final

import pytest

from outrider.kernels.cpu import (
    expert_products,
    level_library,
    structs,
    text_library,
    tree_library,
)
from outrider.kernels.layers import compiled_pass
from tests.docs.markdown import ROOT

HEADERS: Final = "\n".join(
    re.sub(r"//.*", "", path.read_text(encoding="utf-8"))
    for path in sorted((ROOT / "kernels" / "cpu").glob("*.h"))
)
STRUCTURES: Final = [
    found
    for module in (
        *(structs, tree_library, level_library, text_library),
        *(expert_products, compiled_pass),
    )
    for found in vars(module).values()
    if isinstance(found, type(ctypes.Structure)) and found.__module__ == module.__name__
]
TYPES: Final[dict[Any, str]] = {
    ctypes.c_int32: "int32_t",
    ctypes.c_int64: "int64_t",
    ctypes.c_uint64: "uint64_t",
    ctypes.c_float: "float",
    ctypes.c_double: "double",
    ctypes.c_bool: "bool",
    ctypes.c_void_p: "*",
    ctypes.c_char_p: "*",
}
OTHER_NAMES: Final = {
    "memory": "candidates",
    "frontier_nodes": "frontier",
    "ancestor_nodes": "ancestors",
}
"""Names of TreeStruct's fields that are taken in Python by what its subclass says of them."""

Field = tuple[str, str, int]
"""Name, type ("*": any pointer), and how many: 1 for what is no array."""


def constant(name: str) -> int:
    """Return the value of a number, of a constant, or of a quotient of both."""
    if name.isdecimal():
        return int(name)
    value = re.search(rf"\b{name} = (\w+)(?: / (\w+))?\s*[;,}}]", HEADERS)
    assert value is not None, f"no header has {name}"
    return constant(value[1]) // constant(value[2] or "1")


def fields_in_header(name: str) -> Iterator[Field]:
    found = re.search(rf"\bstruct {name} {{\n(.*?)\n}};", HEADERS, re.DOTALL)
    assert found is not None, f"no header has struct {name}"
    for line in found[1].split(";"):
        declared = re.fullmatch(r"\s*(?:const )?(\w+)\b([^()]+)", line)
        if declared is None or declared[1] == "return":
            continue  # a function's, behind all fields
        first = declared[2].rpartition(" ")[0] if "," not in declared[2] else ""
        for one in declared[2].split(","):
            parts = re.search(r"(\w+)(?:\[(\w+)\])?\s*$", one)
            assert parts is not None, line
            is_pointer = "*" in one or "*" in first
            yield parts[1], "*" if is_pointer else declared[1], constant(parts[2] or "1")


def fields_in_python(structure: type[ctypes.Structure]) -> Iterator[Field]:
    for name, kind, *_ in structure._fields_:
        one: Any = kind
        count = 1
        if issubclass(one, ctypes.Array):
            one, count = one._type_, one._length_
        yield OTHER_NAMES.get(name, name), TYPES.get(one, "*"), count


@pytest.mark.parametrize("structure", STRUCTURES, ids=lambda structure: structure.__name__)
def test_a_structure_has_the_fields_of_its_header(structure: type[ctypes.Structure]) -> None:
    named = re.search(r"\(struct (\w+)", structure.__doc__ or "")
    assert named is not None, "its docstring names the header's structure"
    assert list(fields_in_python(structure)) == list(fields_in_header(named[1]))
