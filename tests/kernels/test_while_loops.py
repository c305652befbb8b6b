"""Kernels' while loops keep no value that they assign and never read.

Triton 3.6 takes such a value for one that does not change: after the loop it has its first value.
"""

import ast
from pathlib import Path

import pytest

KERNELS = Path(__file__).resolve().parents[2] / "kernels"
FILES = sorted(path for path in KERNELS.rglob("*.py") if "tl.constexpr" in path.read_text())


def names(nodes: list[ast.AST], kind: type[ast.expr_context]) -> set[str]:
    found = (name for node in nodes for name in ast.walk(node))
    return {name.id for name in found if isinstance(name, ast.Name) and isinstance(name.ctx, kind)}


def only_assigned(source: str) -> list[str]:
    """Return "line: name" of each name that a while loop of a kernel assigns, and does not read,
    although it had a value before."""
    found = []
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        if not any(
            isinstance(mark, ast.Name) and mark.id == "jit" for mark in function.decorator_list
        ):
            continue
        for loop in (node for node in ast.walk(function) if isinstance(node, ast.While)):
            before: list[ast.AST] = [
                node
                for node in ast.walk(function)
                if isinstance(node, ast.Assign | ast.AugAssign) and node.lineno < loop.lineno
            ]
            inside: list[ast.AST] = list(loop.body)
            kept = names(inside, ast.Store) & names(before, ast.Store)
            added = {
                node.target.id
                for part in inside
                for node in ast.walk(part)
                if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name)
            }
            read = names([*inside, loop.test], ast.Load) | added
            found += [f"{loop.lineno}: {name}" for name in sorted(kept - read)]
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_while_loop_reads_what_it_keeps(path: Path) -> None:
    assert only_assigned(path.read_text(encoding="utf-8")) == []


def test_a_value_that_is_only_assigned_is_found() -> None:
    lines = (
        "@jit",
        "def kernel(n):",
        "    here, last = 0, 0",
        "    while here < n:",
        "        last = here",
        "        here += 1",
    )
    assert only_assigned("\n".join(lines)) == ["4: last"]
