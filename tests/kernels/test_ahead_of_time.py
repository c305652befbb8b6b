"""Every kernel compiles for the GPUs that it is meant for, within their limits, without spills."""

import ast
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.kernels.ahead_of_time import ARCHITECTURES, ROOT, Usage, run_apart, table

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="there is no triton for this system"
)

# A kernel that spills, one that wants more shared memory than there is, one that no type fits, and
# one that is fine; the last is launched twice with what is the same to the compiler.
BAD_SPECIMENS = """
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from outrider.kernels.triton_support import dot, jit, launch, tl


@dataclass
class Specimen:
    stem: str
    name: str
    run: Any
    is_long: bool = False


@jit
def _copy_kernel(source, target, size, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    tl.store(target + place, tl.load(source + place, mask=place < size), mask=place < size)


@jit
def _product_kernel(left, right, target, N: tl.constexpr):
    row, column = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    sums = tl.zeros([N, N], tl.float32)
    for start in range(0, 4096, N):
        sums = dot(
            tl.load(left + row * 4096 + start + column),
            tl.load(right + (start + row) * N + column),
            sums,
        )
    tl.store(target + row * N + column, sums)


@jit
def _mistyped_kernel(source, BLOCK: tl.constexpr):
    tl.store(source + tl.arange(0, BLOCK), tl.dot(tl.zeros([4], tl.float32), 3))


words = torch.empty(1 << 20)
halves = torch.empty(1 << 20, dtype=torch.bfloat16)


def copy(size):
    launch(_copy_kernel, (1,), words, words, size, BLOCK=256)


def multiply(**shape):  # sums alone are 512 registers a thread of one warp
    launch(_product_kernel, (1,), halves, halves, words, N=128, **shape)


SPECIMENS = (
    Specimen("copy", "fine", partial(copy, 64)),
    Specimen("copy", "as fine", partial(copy, 128)),
    Specimen("copy", "odd", partial(copy, 63)),
    Specimen("copy", "rare", partial(copy, 1), is_long=True),
    Specimen("copy", "nothing", lambda: None),
    Specimen("bad", "spills", partial(multiply, num_warps=1, num_stages=1)),
    Specimen("bad", "large", partial(multiply, num_warps=8, num_stages=5)),
    Specimen("bad", "mistyped", lambda: launch(_mistyped_kernel, (1,), words, BLOCK=4)),
)
"""


def a_usage(**changes: Any) -> Usage:
    fields: dict[str, object] = {
        "stem": "rope",
        "kernel": "_rope_kernel",
        "specimens": ("heads",),
        "architecture": 90,
        "constants": "BLOCK=64",
        "num_warps": 4,
        "registers": 64,
        "shared_bytes": 1024,
    }
    return Usage(**{**fields, **changes})


def usages_of(*arguments: str) -> list[Usage]:
    found = run_apart(*arguments, timeout_s=1100.0)["usages"]
    return [Usage(**{**one, "specimens": tuple(one["specimens"])}) for one in found]


@needs_triton
@pytest.mark.slow
@pytest.mark.timeout(1200)  # compiling takes a minute of a whole core, and the first time only
def test_every_kernel_compiles_within_limits(capsys: pytest.CaptureFixture[str]) -> None:
    """Each for one of the generations in turn, so that neighbouring shapes have different ones."""
    usages = usages_of("--in-turn")
    assert {usage.architecture for usage in usages} == set(ARCHITECTURES)
    with capsys.disabled():
        print(f"\n{table(usages)}")  # noqa: T201 - the table is what the test is for
    wrong = {usage.kernel: found for usage in usages if (found := usage.complaints())}
    assert not wrong, "\n".join(f"{kernel}: {found}" for kernel, found in wrong.items())


@needs_triton
@pytest.mark.long
@pytest.mark.timeout(1200)  # compiling takes a minute of a whole core, and the first time only
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_all_variants_compile_within_limits(architecture: int) -> None:
    wrong = [usage for usage in usages_of("--long", "-a", str(architecture)) if usage.complaints()]
    assert not wrong, table(wrong)


@needs_triton
def test_every_kernel_has_a_specimen() -> None:
    recorded = set(run_apart("--list", timeout_s=120.0)["kernels"])
    in_files = {name for file in (ROOT / "kernels").rglob("*.py") for name in kernels_in(file)}
    assert in_files
    assert in_files - recorded == set()


def kernels_in(file: Path) -> set[str]:
    """Jitted functions of a file that are launched there, or are named as if they were."""
    jitted, launched = set(), set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef):
            is_jitted = any(ast.unparse(one).split("(")[0] == "jit" for one in node.decorator_list)
            jitted |= {node.name} if is_jitted else set()
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "launch" and node.args:
            launched.add(ast.unparse(node.args[0]))
    return {
        f"{file.stem}.{name}" for name in jitted if name.endswith("_kernel") or name in launched
    }


@pytest.mark.slow
@needs_triton
def test_faulty_kernels_are_found(tmp_path: Path) -> None:
    file = tmp_path / "bad.py"
    file.write_text(BAD_SPECIMENS, encoding="utf-8")
    usages = usages_of("--specimens", str(file), "-a", "90")
    by_name = {usage.specimens[0]: usage for usage in usages}
    assert by_name["fine"].specimens == ("fine", "as fine")  # one kernel for both
    assert by_name["fine"].complaints() == by_name["odd"].complaints() == []
    assert "rare" not in by_name
    assert "launched nothing" in by_name["nothing"].complaints()[0]
    assert "spilled" in by_name["spills"].complaints()[0]
    assert "shared memory" in by_name["large"].complaints()[0]
    assert by_name["mistyped"].error is not None
    assert by_name["mistyped"].kernel == "_mistyped_kernel"
    assert "does not compile" in table(usages)


@pytest.mark.slow
@needs_triton
def test_only_requested_kernels_are_compiled() -> None:
    assert {usage.stem for usage in usages_of("gated_mul", "-a", "80")} == {"gated_mul"}


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({}, None),
        ({"registers": 256}, "256 registers"),
        ({"local_bytes": 8}, "8 bytes of local memory"),
        ({"shared_bytes": 228 << 10}, "shared memory"),
        ({"shared_bytes": 164 << 10}, None),
        ({"shared_bytes": 164 << 10, "architecture": 80}, "shared memory"),
        ({"tensor_memory": 513, "architecture": 100}, "tensor memory"),
        ({"registers": 255, "num_warps": 16}, "do not fit"),
        ({"error": "SyntaxError"}, "SyntaxError"),
    ],
)
def test_limits(changes: dict[str, object], complaint: str | None) -> None:
    found = a_usage(**changes).complaints()
    assert (complaint is None) == (not found)
    assert complaint is None or complaint in found[0]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"registers": 32, "shared_bytes": 0, "num_warps": 4}, 16),  # warps
        ({"registers": 128, "shared_bytes": 0, "num_warps": 4}, 4),  # registers
        ({"registers": 32, "shared_bytes": 75 << 10, "num_warps": 4}, 3),  # shared memory
        ({"registers": 16, "shared_bytes": 0, "num_warps": 1}, 32),  # programs
    ],
)
def test_programs_per_multiprocessor(changes: dict[str, object], expected: int) -> None:
    assert a_usage(**changes).programs_per_multiprocessor == expected


def test_kernels_are_found_in_files(tmp_path: Path) -> None:
    def found(text: str) -> set[str]:
        file = tmp_path / "some.py"
        file.write_text(text, encoding="utf-8")
        return kernels_in(file)

    checks: dict[str, set[str]] = {
        "@jit\ndef _a_kernel(x): ...": {"some._a_kernel"},
        "@jit\ndef helper(x): ...": set(),
        "@jit\ndef odd_name(x): ...\ndef run(): launch(odd_name, (1,), x)": {"some.odd_name"},
        "from kernels.other import _a_kernel\nlaunch(_a_kernel, (1,), x)": set(),  # other's
        "def launch(kernel): launch(kernel, (1,))": set(),
    }
    assert {text: found(text) for text in checks} == checks


def test_the_table_has_a_line_for_each() -> None:
    lines = table([a_usage(), a_usage(error="no", kernel="_other_kernel")]).splitlines()
    assert len(lines) == 3
    assert "_rope_kernel" in lines[2]
    assert "does not compile" in lines[1]
