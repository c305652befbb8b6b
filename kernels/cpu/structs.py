"""Structures of the compiled library: the fields stand in the order of its headers."""

import ctypes

_Address = ctypes.c_void_p
_Int32, _Int64 = ctypes.c_int32, ctypes.c_int64


class ProductStruct(ctypes.Structure):
    """A packed weight as the library reads it (struct Product in products.h)."""

    _fields_ = (
        ("out_features", _Int64),
        ("in_features", _Int64),
        ("panels", _Address),
        ("bias", _Address),
        ("scales", _Address),
        ("totals", _Address),
        ("kind", _Int32),
        ("instruction_set", _Int32),
    )


class GroupedStruct(ctypes.Structure):
    """A packed weight in groups as the library reads it (struct GroupedWeight in grouped.h)."""

    _fields_ = (
        ("out_features", _Int64),
        ("in_features", _Int64),
        ("group_size", _Int64),
        ("panels", _Address),
        ("bias", _Address),
        ("number", _Int32),
        ("scale_type", _Int32),
        ("zero", _Int32),
        ("has_zeros", _Int32),
        ("has_minimums", _Int32),
        ("has_row_groups", _Int32),
        ("is_short", _Int32),
        ("instruction_set", _Int32),
    )


class Attention(ctypes.Structure):
    """A call of attention as the library reads it (struct Attention in products.h)."""

    _fields_ = (
        ("num_query_heads", _Int64),
        ("num_kv_heads", _Int64),
        ("head_dim", _Int64),
        ("num_tiles", _Int64),
        ("max_tile_rows", _Int64),
        ("query", _Address),
        ("keys", _Address),
        ("values", _Address),
        ("output", _Address),
        ("sinks", _Address),
        ("tiles", _Address),
        ("tile_slots", _Address),
        ("slots", _Address),
        ("begins", _Address),
        ("ends", _Address),
        ("own_begins", _Address),
        ("own_starts", _Address),
        ("own_slots", _Address),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    )


class RowPlanCall(ctypes.Structure):
    """Sequences whose keys are to be listed (struct RowPlanCall in row_plan.h)."""

    _fields_ = (
        ("num_sequences", _Int64),
        ("block_size", _Int64),
        ("window", _Int64),
        ("tile_rows", _Int64),
        ("mask_words", _Int64),
        ("sequences", ctypes.c_char_p),
        ("blocks", ctypes.c_char_p),
        ("masks", ctypes.c_char_p),
        ("tiles", _Address),
        ("tile_slots", _Address),
        ("slots", _Address),
        ("begins", _Address),
        ("ends", _Address),
        ("own_begins", _Address),
        ("own_starts", _Address),
        ("own_slots", _Address),
    )


class NormCall(ctypes.Structure):
    """A norm of rows as the library reads it (struct Norm in rows.h)."""

    _fields_ = (
        ("num_rows", _Int64),
        ("width", _Int64),
        ("x_stride", _Int64),
        ("residual_stride", _Int64),
        ("weight_rows", _Int64),
        ("x", _Address),
        ("residual", _Address),
        ("weight", _Address),
        ("y", _Address),
        ("offset", ctypes.c_float),
    )


class GateCall(ctypes.Structure):
    """Gated rows as the library reads them (struct Gate in rows.h)."""

    _fields_ = (
        ("num_rows", _Int64),
        ("width", _Int64),
        ("stride", _Int64),
        ("x", _Address),
        ("y", _Address),
        ("activation", _Int32),
    )


class HeadsCall(ctypes.Structure):
    """Heads to be placed as the library reads them (struct Heads in rows.h)."""

    _fields_ = (
        ("num_rows", _Int64),
        ("num_query_heads", _Int64),
        ("num_kv_heads", _Int64),
        ("head_dim", _Int64),
        ("stride", _Int64),
        ("x", _Address),
        ("positions", _Address),
        ("num_positions", _Int64),
        ("table", _Address),
        ("weight", _Address),
        ("slots", _Address),
        ("num_slots", _Int64),
        ("query", _Address),
        ("keys", _Address),
        ("values", _Address),
        ("offset", ctypes.c_float),
    )


class LikeliestCall(ctypes.Structure):
    """Rows of scores to be ranked as the library reads them (struct Likeliest in rows.h)."""

    _fields_ = (
        ("num_rows", _Int64),
        ("width", _Int64),
        ("stride", _Int64),
        ("count", _Int64),
        ("scores", _Address),
        ("tokens", _Address),
        ("shares", _Address),
    )


class JudgeCall(ctypes.Structure):
    """Trees to be judged as the library reads them (struct JudgeCall in judge.h)."""

    _fields_ = (
        ("num_trees", _Int64),
        ("width", _Int64),
        ("stride", _Int64),
        ("logits", _Address),
        ("counts", _Address),
        ("token_ids", _Address),
        ("parents", _Address),
        ("paths", _Address),
        ("lengths", _Address),
        ("next_tokens", _Address),
    )


class NoiseCall(ctypes.Structure):
    """Rows of Gumbel noise to be drawn (struct Noise in rows.h)."""

    _fields_ = (
        ("num_rows", _Int64),
        ("width", _Int64),
        ("keys", _Address),
        ("noise", _Address),
    )


class FloorsCall(ctypes.Structure):
    """Rows of scores that are cut (struct Floors in rows.h)."""

    _fields_ = (
        ("num_rows", _Int64),
        ("width", _Int64),
        ("stride", _Int64),
        ("scores", _Address),
        ("top_k", _Address),
        ("top_p", _Address),
        ("min_p", _Address),
        ("floors", _Address),
    )


class ChoiceCall(ctypes.Structure):
    """Rows whose tokens are chosen (struct Choice in rows.h)."""

    _fields_ = (
        ("num_rows", _Int64),
        ("width", _Int64),
        ("stride", _Int64),
        ("logits", _Address),
        ("temperature", _Address),
        ("top_k", _Address),
        ("top_p", _Address),
        ("min_p", _Address),
        ("keys", _Address),
        ("masks", _Address),
        ("tokens", _Address),
    )


_Four64, _Four32, _FourAddresses = _Int64 * 4, _Int32 * 4, _Address * 4


class LayerStruct(ctypes.Structure):
    """A decoder layer as the library reads it (struct Layer in layer.h)."""

    _fields_ = (
        ("hidden", _Int64),
        ("inner", _Int64),
        ("num_query_heads", _Int64),
        ("num_kv_heads", _Int64),
        ("head_dim", _Int64),
        ("products", _FourAddresses),
        ("max_threads", _Four64),
        ("kinds", _Four32),
        ("attention_norm", _Address),
        ("mlp_norm", _Address),
        ("head_norm", _Address),
        ("sinks", _Address),
        ("attention_offset", ctypes.c_float),
        ("mlp_offset", ctypes.c_float),
        ("head_offset", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("activation", _Int32),
    )


class LoraPartStruct(ctypes.Structure):
    """A low-rank product as the library reads it (struct LoraPart in lora.h)."""

    _fields_ = (
        ("a", _Address),
        ("b", _Address),
        ("start", _Int64),
        ("size", _Int64),
        ("rank", _Int64),
        ("scale", ctypes.c_float),
    )


class LoraSiteStruct(ctypes.Structure):
    """An adapter's products for one projection as the library reads them (struct LoraSite)."""

    _fields_ = (("parts", _Address), ("num_parts", _Int64))


class LoraRowsStruct(ctypes.Structure):
    """The rows of a pass by adapter as the library reads them (struct LoraRows in lora.h)."""

    _fields_ = (
        ("num_adapters", _Int64),
        ("adapters", _Address),
        ("starts", _Address),
        ("rows", _Address),
    )
