"""Draft trees in the compiled library (tree.cpp): their structures and functions."""

import ctypes
import functools
from collections.abc import Callable
from typing import Any, Final

from outrider.kernels.cpu.product_library import product_support
from outrider.kernels.tree_bounds import MASK_WORDS, MAX_TREE_NODES

_Address, _Int32, _Int64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
_Double = ctypes.c_double


class CandidateStruct(ctypes.Structure):
    """A guess as the library keeps it (struct Candidate in tree.h)."""

    _fields_ = (
        *((name, _Int64) for name in ("token_id", "parent", "depth", "sources", "evidence")),
        *((name, _Int64) for name in ("is_expanded", "is_forced", "is_recalled", "has_logits")),
        *((name, _Int64) for name in ("offset", "first_child", "last_child", "next_sibling")),
        *((name, _Double) for name in ("model_confidence", "text_confidence", "confidence")),
        *((name, _Double) for name in ("edge_prob", "path_prob", "covered")),
        ("mask", ctypes.c_uint64 * MASK_WORDS),
    )


class CalibrationTable(ctypes.Structure):
    """What is learnt of guesses, for the library (struct CalibrationTable in tree.h)."""

    _fields_ = (
        *((name, _Address) for name in ("shifts", "edges", "depth_class")),
        *((name, _Address) for name in ("num_right", "num_judged", "sum_confidence")),
        ("num_unfitted", _Address),
        *((name, _Int64) for name in ("num_edges", "num_depths", "num_classes", "num_kinds")),
        ("refit_every", _Int64),
        *((name, _Double) for name in ("least", "most", "kept")),
    )


class TreeStruct(ctypes.Structure):
    """A tree as the library reads and writes it (struct Tree in tree.h)."""

    _fields_ = (
        *((name, _Int64) for name in ("max_nodes", "max_depth", "root_token_id", "root_slot")),
        ("model_bit", _Int64),
        *((name, ctypes.c_bool) for name in ("keeps_logits", "is_stepwise", "is_greedy")),
        *((name, _Int64) for name in ("num_candidates", "num_slots", "num_passes")),
        *((name, _Int64) for name in ("num_frontier", "num_ancestors")),
        *((name, _Int64) for name in ("silent_bit", "grammar_bit", "recalled_bit")),
        ("calibration", _Address),
        ("most_believed", _Double),
        ("memory", ctypes.POINTER(CandidateStruct)),
        ("capacity", _Int64),
        ("num_ranked", _Int64),
        ("frontier_nodes", _Int64 * MAX_TREE_NODES),
        ("ancestor_nodes", _Int64 * MAX_TREE_NODES),
        ("ranking", _Int64 * MAX_TREE_NODES),
    )


def _checked(result: int) -> int:
    if result == -1:
        raise MemoryError("a tree found no memory for its guesses")
    return result


_TREES: Final = (_Address, _Int64)
"""Many trees: their addresses, and how many they are."""
_SIGNATURES: Final[dict[str, tuple[tuple[Any, ...], Any]]] = {
    "bytes": ((), _Int64),
    "begin": ((_Address,), _checked),
    "end": ((_Address,), None),
    "add_chain": ((_Address, *(_Int64,) * 3, _Address, _Address, _Double, _Int32), _checked),
    "add_answer": ((_Address, _Int64, _Int64, *(_Address,) * 4, _Double), _checked),
    "grow": ((_Address, *(_Address,) * 3), _checked),
    "grow_rows": ((*_TREES, _Address, _Int64, _Address, _Address, _Double), _checked),
    "choose": ((*_TREES, _Int64, _Double, _Address, _Address), _checked),
    "choose_open": ((_Address, _Int64, _Double), _checked),
    "rank": ((_Address,), _checked),
    "rows": ((*_TREES, *(_Address,) * 5), _Int32),
    "weigh": ((*_TREES, *(_Address,) * 3), _checked),
    "select": ((*_TREES, _Address, _Double, *(_Address,) * 6), _checked),
    "learn": ((*_TREES, *(_Address,) * 4), _Int64),
    "judged": ((*_TREES, *(_Address,) * 4), None),
}


class TreeLibrary:
    """The functions by their names; tree.cpp says what each takes and gives.

    They raise MemoryError where memory is short. Raises AttributeError for a library that does not
    have them, or has them for other structures.
    """

    def __init__(self, functions: ctypes.CDLL) -> None:
        for name, (arguments, result) in _SIGNATURES.items():
            function = getattr(functions, f"outrider_tree_{name}")
            function.argtypes, function.restype = arguments, result
            setattr(self, name, function)
        num_bytes = ctypes.sizeof(TreeStruct) + ctypes.sizeof(CandidateStruct)
        if self.bytes() != num_bytes:
            raise AttributeError(f"its trees have {self.bytes()} bytes, not {num_bytes}")

    def __getattr__(self, name: str) -> Callable[..., int]:
        raise AttributeError(f"the library has no outrider_tree_{name}")


@functools.cache
def tree_library() -> TreeLibrary | None:
    """Return the library's trees, or None where they were not built."""
    library = product_support().library
    try:
        return None if library is None else TreeLibrary(library.functions)
    except AttributeError:  # it is older than its trees
        return None
