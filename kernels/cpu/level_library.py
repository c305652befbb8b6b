"""Levels of draft trees in the compiled library (levels.cpp): its structures and its function."""

import ctypes
from enum import IntEnum
from typing import Final

from outrider.kernels.cpu.product_library import product_support
from outrider.kernels.tree_bounds import MAX_TREE_NODES

_Address, _Int32, _Int64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
_Double = ctypes.c_double


class LevelTreeStruct(ctypes.Structure):
    """A tree that may grow (struct LevelTree in levels.h)."""

    _fields_ = (
        ("tree", _Address),
        ("chance", _Double),
        ("urgency", _Double),
        ("first_block", _Int64),
        ("num_slots", _Int64),
        ("is_growing", _Int64),
        ("num_first", _Int64),
        ("num_rows", _Int64),
    )


class LevelBudgetStruct(ctypes.Structure):
    """A step's budget, and what it has spent (struct LevelBudget in levels.h)."""

    _fields_ = (
        ("target_s", _Address),
        ("draft_s", _Address),
        ("num_levels", _Int64),
        ("base_tokens", _Double),
        ("longest_s", _Double),
        ("step_host_s", _Double),
        ("part_host_s", _Double),
        ("passes_s", _Double),
    )


class LevelPassStruct(ctypes.Structure):
    """A pass that was made (struct LevelPass in levels.h)."""

    _fields_ = (
        ("num_rows", _Int64),
        ("num_logit_rows", _Int64),
        ("whole_s", _Double),
        ("work_s", _Double),
        ("mean_context", _Double),
    )


class LevelsCall(ctypes.Structure):
    """A call that grows trees (struct LevelsCall in levels.h)."""

    _fields_ = (
        ("num_growing", _Int64),
        ("num_trees", _Int64),
        ("growing", _Address),
        ("trees", _Address),
        ("weights", _Address),
        ("budget", _Address),
        ("blocks", _Address),
        ("first_token_ids", _Address),
        ("model", _Address),
        ("caches", _Address),
        ("num_layers", _Int64),
        ("block_size", _Int64),
        ("window", _Int64),
        ("has_full", _Int64),
        ("tile_rows", _Int64),
        ("max_rows", _Int64),
        ("max_frontier", _Int64),
        ("num_children", _Int64),
        ("min_path_prob", _Double),
        ("is_ranked", _Int64),
        ("is_chosen", _Int64),
        ("logits", _Address),
        ("passes", _Address),
        ("num_passes", _Int64),
    )


class LevelsEnd(IntEnum):
    """Why a call ends, as in levels.h."""

    OVER = 0
    NO_ROOM = 1
    TOO_MANY = 2
    UNRANKED = 3


MOST_LEVELS: Final = MAX_TREE_NODES


def grow_levels(call: LevelsCall, num_threads: int) -> LevelsEnd:
    """Run a call. Raises MemoryError, and IndexError for a place that does not exist."""
    support = product_support()
    assert support.library is not None, "its passes are compiled"
    function = support.library.functions.outrider_grow_levels
    end = function(ctypes.byref(call), _Int32(support.instruction_set), _Int32(num_threads))
    if end == -1:
        raise MemoryError("a level of drafts found no memory")
    if end < 0:
        raise IndexError("a row's token, its position or its slot in the cache does not exist")
    return LevelsEnd(end)
