"""The compiled products (products.cpp), loaded with ctypes where they were built.

The ordinary build makes them if there is a C++ compiler (pyproject.toml); nothing needs them.
"""

import ctypes
import functools
import os
import platform
from dataclasses import dataclass
from enum import IntEnum
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Final

import torch

from outrider.kernels.cpu.huge_pages import HugePageMemory

_STEM: Final = "_products"
_VERSION: Final = 21  # as kVersion in products.cpp
_MACHINES: Final = ("x86_64", "amd64", "aarch64", "arm64")
_BUILD_ADVICE: Final = (
    "Install a C++ compiler (Debian, Ubuntu: apt install g++) and install Outrider again: bfloat16 "
    "models answer faster."
)
_Address = ctypes.c_void_p
_Int32, _Int64 = ctypes.c_int32, ctypes.c_int64


class Kind(IntEnum):
    """The numbers that a weight is made of."""

    BFLOAT16 = 0
    INT8 = 1
    GROUPED = 2
    STORED = 3


class InstructionSet(IntEnum):
    """Which kernels run, as in instruction_sets.h. Of one architecture, a larger one is faster."""

    NONE = 0
    AVX2 = 1
    AVX2_VNNI = 2  # with VNNI's dot products of bytes
    AVX512_FMA = 3  # with VNNI's dot products of bytes; bfloat16 is widened
    AVX512 = 4  # with bfloat16 and VNNI dot products
    NEON = 5
    NEON_DOT = 6  # with dot products of bytes
    NEON_BF16 = 7  # with bfloat16 dot products too


_WORDS: Final = {each.name.lower().replace("_", "-"): each for each in InstructionSet if each}


# They multiply pairs of bfloat16 with roundings of their own; what is below them widens both.
_OWN_ROUNDING: Final = (InstructionSet.AVX512, InstructionSet.NEON_BF16)
_NUMERICS: Final = "OUTRIDER_NUMERICS"
PORTABLE: Final = "portable, 1"
"""The name of the arithmetic that all processors have; another number is another arithmetic."""


def is_portable() -> bool:
    """True if OUTRIDER_NUMERICS has this process compute as every other processor can."""
    return os.environ.get(_NUMERICS) == "portable"


def compute_portably() -> None:
    """Have this process and its children do so; before a model is loaded."""
    os.environ[_NUMERICS] = "portable"
    product_support.cache_clear()


def _allowed() -> list[InstructionSet]:
    """Return what OUTRIDER_CPU allows: up to the one it names. Raises ValueError for a word."""
    name = os.environ.get("OUTRIDER_CPU", "auto")
    if name == "auto":
        return list(_WORDS.values())
    if name not in _WORDS:
        raise ValueError(f"OUTRIDER_CPU={name!r} must be one of auto, {', '.join(_WORDS)}")
    most = _WORDS[name]
    is_arm = most >= InstructionSet.NEON
    return [
        each for each in _WORDS.values() if each <= most and (each >= InstructionSet.NEON) is is_arm
    ]


class ProductLibrary:
    """The library's functions. Raises OSError for what is not it, or of another version."""

    def __init__(self, path: Path) -> None:
        allowed = _allowed()
        library = ctypes.CDLL(str(path))
        self.functions = library
        self.memory = HugePageMemory()
        try:
            library.outrider_products_version.restype = _Int32
            version = library.outrider_products_version()
            has_set = library.outrider_has_instruction_set
            self._packed_bytes = library.outrider_packed_bytes
            self._pack = library.outrider_pack
            self._multiply = library.outrider_multiply
            self._has_matrix_tiles = library.outrider_has_matrix_tiles
            self._attend = library.outrider_attend
            self._plan_rows = library.outrider_plan_rows
            self._normalise = library.outrider_normalise
            self._gate = library.outrider_gate
            self._place = library.outrider_place
            self._rank = library.outrider_rank
            self._draw_noise = library.outrider_draw_noise
            self._find_floors = library.outrider_find_floors
            self._choose = library.outrider_choose
            self._judge = library.outrider_judge
            self._move_slots = library.outrider_move_slots
            self._lora = library.outrider_lora
            self._pass = library.outrider_pass
        except AttributeError as error:
            raise OSError(f"{path} does not hold the products: {error}") from error
        if version != _VERSION:
            raise OSError(f"{path} is of version {version}, not {_VERSION}: install again")
        self._has_matrix_tiles.argtypes, self._has_matrix_tiles.restype = (), _Int32
        has_set.argtypes, has_set.restype = (_Int32,), _Int32
        self.instruction_sets: Final = frozenset(filter(has_set, allowed))
        """Those that this processor has and OUTRIDER_CPU allows."""
        self._packed_bytes.argtypes = (_Int32, _Int64, _Int64)
        self._packed_bytes.restype = _Int64
        self._pack.argtypes = (_Int32, _Address, _Int64, _Int64, _Address, _Int32)
        self._pack.restype = None
        self._multiply.argtypes = (_Address, _Address, _Int64, _Address, _Int32)
        self._multiply.restype = _Int32
        self._plan_rows.argtypes, self._plan_rows.restype = (_Address,), _Int64
        self._lora.argtypes = (
            *(_Address, _Int64, _Address, _Int64, _Address, _Int64),
            *(_Int32, _Int32),
        )
        self._lora.restype = _Int32
        self._move_slots.argtypes = (_Address, *(_Int64,) * 3, _Address, _Address, _Int64)
        self._move_slots.restype = _Int32
        self._judge.argtypes, self._judge.restype = (_Address,), None
        self._pass.argtypes, self._pass.restype = (_Address, _Address, _Int32, _Int32), _Int32
        for function in (
            *(self._attend, self._normalise, self._gate, self._place, self._rank),
            *(self._draw_noise, self._find_floors, self._choose),
        ):
            function.argtypes, function.restype = (_Address, _Int32, _Int32), _Int32

    @property
    def has_matrix_tiles(self) -> bool:
        """True if the processor has AMX for bfloat16, which only oneDNN's products use.

        Only beside AVX-512: a processor has both or neither of them.
        """
        has_avx512 = InstructionSet.AVX512 in self.instruction_sets
        return has_avx512 and bool(self._has_matrix_tiles())

    def pack(self, kind: Kind, weight: torch.Tensor) -> torch.Tensor:
        """Return the panels of a contiguous weight [out_features, in_features]: uint8 [bytes]."""
        out_features, in_features = weight.shape
        num_bytes = self._packed_bytes(kind, out_features, in_features)
        panels = self.memory.take(num_bytes)
        self._pack(
            kind,
            weight.data_ptr(),
            out_features,
            in_features,
            panels.data_ptr(),
            torch.get_num_threads(),
        )
        return panels

    def multiply(self, product: int, x: torch.Tensor, y: torch.Tensor, num_threads: int) -> None:
        """Write y = x @ weight.T + bias. `product`: address of its struct; others contiguous."""
        if self._multiply(product, x.data_ptr(), x.shape[0], y.data_ptr(), num_threads):
            raise MemoryError(f"a product of {x.shape[0]} rows found no memory for its rows")

    def attend(self, call: int, instruction_set: InstructionSet, num_threads: int) -> None:
        """Run a call of attention, given by the address of an `Attention`."""
        if self._attend(call, instruction_set, num_threads):
            raise MemoryError("attention found no memory for its tiles")

    def plan_rows(self, call: int) -> int:
        """List the keys of rows, given by the address of a `RowPlanCall`; return the tiles."""
        return int(self._plan_rows(call))

    def normalise(self, call: int, instruction_set: InstructionSet, num_threads: int) -> None:
        """Run a norm, given by the address of a `NormCall`."""
        self._normalise(call, instruction_set, num_threads)

    def gate(self, call: int, instruction_set: InstructionSet, num_threads: int) -> None:
        """Gate rows, given by the address of a `GateCall`."""
        self._gate(call, instruction_set, num_threads)

    def place(self, call: int, instruction_set: InstructionSet, num_threads: int) -> bool:
        """Place heads, given by the address of a `HeadsCall`. False: a place does not exist."""
        return not self._place(call, instruction_set, num_threads)

    def rank(self, call: int, instruction_set: InstructionSet, num_threads: int) -> None:
        """Rank rows, given by the address of a `LikeliestCall`."""
        self._rank(call, instruction_set, num_threads)

    def draw_noise(self, call: int, instruction_set: InstructionSet, num_threads: int) -> None:
        """Draw rows of noise, given by the address of a `NoiseCall`."""
        self._draw_noise(call, instruction_set, num_threads)

    def find_floors(self, call: int, instruction_set: InstructionSet, num_threads: int) -> None:
        """Find where rows are cut, given by the address of a `FloorsCall`."""
        self._find_floors(call, instruction_set, num_threads)

    def choose(self, call: int, instruction_set: InstructionSet, num_threads: int) -> None:
        """Choose rows' tokens, given by the address of a `ChoiceCall`."""
        self._choose(call, instruction_set, num_threads)

    def judge(self, call: int) -> None:
        """Judge trees, given by the address of a `JudgeCall`."""
        self._judge(call)

    def move_slots(
        self, slots: torch.Tensor, sources: torch.Tensor, destinations: torch.Tensor
    ) -> None:
        """Move slots [planes, slots, elements], contiguous, as if all were read first.

        `sources`, `destinations`: int64 [n]; a source of -1 moves nothing. Raises IndexError for a
        slot that does not exist.
        """
        num_planes, num_slots, num_elements = slots.shape
        failed = self._move_slots(
            *(slots.data_ptr(), num_planes, num_slots, num_elements * slots.element_size()),
            sources.contiguous().data_ptr(),
            destinations.contiguous().data_ptr(),
            len(sources),
        )
        if failed == -1:
            raise MemoryError(f"{len(sources)} moves found no memory")
        if failed:
            raise IndexError("a slot of the cache is out of range")

    def add_lora(
        self,
        rows: int,
        site: int,
        x: torch.Tensor,
        y: torch.Tensor,
        instruction_set: InstructionSet,
        num_threads: int,
    ) -> None:
        """Add low-rank products to y. `rows`: address of a `LoraRowsStruct`; x, y contiguous."""
        failed = self._lora(
            rows,
            site,
            x.data_ptr(),
            x.shape[1],
            y.data_ptr(),
            y.shape[1],
            instruction_set,
            num_threads,
        )
        if failed:
            raise MemoryError(f"adapters' products of {x.shape[0]} rows found no memory")

    def run_pass(
        self, model: int, call: int, instruction_set: InstructionSet, num_threads: int
    ) -> bool:
        """Run a pass by the addresses of its structures. False: a place does not exist."""
        failed = self._pass(model, call, instruction_set, num_threads)
        if failed == -1:
            raise MemoryError("a pass found no memory for its rows")
        return not failed


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductSupport:
    """The library, or None and why it is not used. `advice`: how to get it, "" if nothing helps."""

    library: ProductLibrary | None
    instruction_set: InstructionSet
    detail: str
    advice: str = ""


def library_path(folder: Path) -> Path | None:
    """Return the built library in a folder, if there is one."""
    places = (folder / f"{_STEM}{suffix}" for suffix in EXTENSION_SUFFIXES)
    return next((place for place in places if place.is_file()), None)


def library_for(
    instruction_set: InstructionSet | None = None,
) -> tuple[ProductLibrary, InstructionSet]:
    """Return the library and the instruction set to run: the best one, unless another is named.

    Raises RuntimeError where there is no library, ValueError for what the processor lacks.
    """
    support = product_support()
    if support.library is None:
        raise RuntimeError(f"the compiled products are not there; products: {support.detail}")
    if instruction_set is None:
        return support.library, support.instruction_set
    if instruction_set not in support.library.instruction_sets:
        best = support.instruction_set.name
        raise ValueError(f"this processor runs up to {best}, not {instruction_set.name}")
    return support.library, instruction_set


@functools.cache
def product_support(folder: Path = Path(__file__).parent) -> ProductSupport:
    """Load the library, once, and say whether this processor can run it."""
    path = library_path(folder)
    if path is None:
        if platform.machine().lower() not in _MACHINES:
            return _unsupported(
                f"torch's; the compiled ones are for x86-64 and ARM64, not {platform.machine()}"
            )
        return _unsupported("torch's; the compiled ones were not built", _BUILD_ADVICE)
    try:
        library = ProductLibrary(path)
    except OSError as error:
        return _unsupported(f"torch's; the compiled ones do not load: {error}", _BUILD_ADVICE)
    usable = library.instruction_sets.difference(_OWN_ROUNDING if is_portable() else ())
    best = max(usable, default=InstructionSet.NONE)
    if best is InstructionSet.NONE:
        return _unsupported("torch's; this processor has no instruction set that may be used")
    way = "portable, by" if is_portable() else "for"
    detail = f"compiled, {way} {best.name} in {path.name}"
    return ProductSupport(library=library, instruction_set=best, detail=detail)


def _unsupported(detail: str, advice: str = "") -> ProductSupport:
    return ProductSupport(
        library=None, instruction_set=InstructionSet.NONE, detail=detail, advice=advice
    )
