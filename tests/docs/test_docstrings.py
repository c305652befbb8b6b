"""Docstrings of the product name only modules, objects and files that exist."""

import ast
import builtins
import re
from functools import cache
from pathlib import Path
from typing import Final

import pytest

from benchmarks.count_tree import PRODUCT
from tests.docs.markdown import ROOT

_STRING: Final = re.compile(r'"""(.*?)"""', re.DOTALL)
_NAME: Final = re.compile(rf"\boutrider\.(?:{'|'.join(PRODUCT)})(?:\.\w+)*")
_EXCEPTION: Final = re.compile(r"\b[A-Z]\w*(?:Error|Exception|Warning)\b")
_RAISES: Final = re.compile(r"\b[Rr]aises? (?:an? |the )?`?([A-Z]\w+)")
_PATH: Final = re.compile(r"(?<![\w./:$<>-])(?:[\w-]+/)+[\w.-]+\.(?:py|md|cpp|h|toml|json)\b")


@pytest.mark.parametrize("package", PRODUCT)
def test_names_and_paths_in_docstrings_exist(package: str) -> None:
    wrong = [
        f"{file.relative_to(ROOT)}: {name}"
        for file in sorted((ROOT / package).rglob("*.py"))
        for text in _STRING.findall(file.read_text(encoding="utf-8"))
        for name in (*_unknown_names(text), *_unknown_paths(text, file))
    ]
    assert not wrong, "\n".join(wrong)


def test_exceptions_in_docstrings_exist() -> None:
    texts = {file: file.read_text(encoding="utf-8") for file in _product_files()}
    named = {name for text in texts.values() for name in _names_in_code(text)} | set(dir(builtins))
    wrong = [
        f"{file.relative_to(ROOT)}: {name}"
        for file, text in texts.items()
        for docstring in _STRING.findall(text)
        for name in _EXCEPTION.findall(docstring) + _RAISES.findall(docstring)
        if name not in named and name.removesuffix("s") not in named
    ]
    assert not wrong, "\n".join(wrong)


def _product_files() -> list[Path]:
    return [file for package in PRODUCT for file in sorted((ROOT / package).rglob("*.py"))]


def _names_in_code(text: str) -> list[str]:
    """Return the names of classes as they stand outside docstrings and comments."""
    return re.findall(r"\b[A-Z]\w+", re.sub(r"#.*", "", _STRING.sub("", text)))


def _unknown_names(text: str) -> list[str]:
    return [name for name in _NAME.findall(text) if not _exists(name)]


def _exists(name: str) -> bool:
    """Tell whether a dotted name is a module, or something that one defines."""
    path, parts = ROOT, name.split(".")[1:]
    while parts and (path / parts[0]).is_dir():
        path /= parts.pop(0)
    if parts and (module := path / f"{parts[0]}.py").is_file():
        return set(parts[1:]) <= _defined(module)
    return set(parts) <= _defined(path / "__init__.py")


@cache
def _defined(file: Path) -> frozenset[str]:
    """Return the names that a module and its classes define."""
    if not file.exists():
        return frozenset()
    nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    stored = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return frozenset(stored | {node.name for node in nodes if isinstance(node, kinds)})


def _unknown_paths(text: str, file: Path) -> list[str]:
    """Return missing paths whose first folder is ours: another project's are not checked."""
    above = [folder for folder in file.parents if folder.is_relative_to(ROOT)]
    return [
        path
        for path in _PATH.findall(text)
        if any((folder / path.partition("/")[0]).is_dir() for folder in above)
        and not any((folder / path).exists() for folder in above)
    ]
