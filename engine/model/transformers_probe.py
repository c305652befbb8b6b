"""Describe a decoder of transformers by running it once on shapes alone, before weights are read.

The model is built on the meta device, where tensors have shapes and no numbers. A probe takes the
place of its attention and of its masks, and notes what each layer hands over.
"""

import inspect
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from outrider.engine.errors import UnsupportedModelError
from outrider.engine.model.config import HeadShape, LayerConfig, ModelConfig
from outrider.engine.model.families.text_parts import THROUGH_TRANSFORMERS
from outrider.engine.model.transformers_config import (
    CannotRunError,
    eos_token_ids,
    inner_size,
    max_positions,
    quiet_transformers,
    read_transformers_config,
    refuse_by_config,
)
from outrider.kernels.layers.rope import RopeConfig

_PROBE: Final = "outrider_probe"
_NUM_ROWS: Final = 5
# What layers may hand to an attention function beside their rows; None is always allowed.
_SINKS: Final = ("s_aux", "sinks")
_KNOWN_TENSORS: Final = (*_SINKS, "position_ids")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCall:
    """A layer's arguments to the attention function. `window`: None for full attention."""

    num_query_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None

    @property
    def heads(self) -> HeadShape:
        """Return the heads; the shorter of keys and values are padded to the other's size."""
        return HeadShape(
            num_query_heads=self.num_query_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=max(self.key_dim, self.value_dim),
        )


@dataclass(slots=True, kw_only=True)
class _Notes:
    """Findings of the probe in a pass; `masks`: with their functions, by identity."""

    calls: list[LayerCall] = field(default_factory=list)
    masks: dict[int, tuple[Tensor, Callable[..., Any] | None]] = field(default_factory=dict)


_notes: ContextVar[_Notes] = ContextVar("notes")


def describe_by_probe(model_id: str, raw: dict[str, Any]) -> ModelConfig:
    """Describe a model that transformers' own modules are to run.

    Raises UnsupportedModelError with the reason where they cannot.
    """
    config = read_transformers_config(model_id, raw)
    architecture = (raw.get("architectures") or ["unknown"])[0]
    is_text_part = architecture in THROUGH_TRANSFORMERS
    own = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type, "unknown")
    try:
        refuse_by_config(own if is_text_part else architecture, config)
        calls, num_parameters = _probe(config)
        description = _description(model_id, architecture, config, calls)
        return replace(description, num_parameters=num_parameters, is_text_part=is_text_part)
    except (CannotRunError, ValueError, TypeError, OverflowError) as error:
        raise UnsupportedModelError(
            f"{model_id} is {architecture}, which the engine cannot run: {error}"
        ) from error


def rows_of_heads(heads: Tensor) -> Tensor:
    """[1, heads, n, size], as transformers passes them on, to [n, heads, size]."""
    return heads[0].transpose(0, 1)


def is_tied(model: PreTrainedModel) -> bool:
    """Return whether the head's weight is the embedding table."""
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    return head is not None and getattr(head, "weight", None) is getattr(table, "weight", 0)


# ---- refusals -----------------------------------------------------------------------------------


def _refuse_by_modules(model: PreTrainedModel) -> None:
    if model._is_stateful:
        raise CannotRunError("it keeps a recurrent state, which a paged cache cannot hold.")
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv1d):
            raise CannotRunError(f"its module {name} convolves over tokens.")
    if model.get_output_embeddings() is None:
        raise CannotRunError("it has no output embeddings.")
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise CannotRunError("its forward pass takes no position_ids.")


# ---- the probe ----------------------------------------------------------------------------------


def build(config: PreTrainedConfig, attention: str, **options: Any) -> PreTrainedModel:
    """Build the model on the meta device. Raises what transformers raises."""
    with torch.device("meta"), no_init_weights(), quiet_transformers():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, attn_implementation=attention, **options
        )
        model.eval()
    return model


def _probe(config: PreTrainedConfig) -> tuple[list[LayerCall], int]:
    """Run a few rows through the model's shapes.

    Returns the calls of its attention in order, and its number of parameters.
    """
    try:
        model = build(config, _PROBE)
    except Exception as error:
        if _PROBE in str(error):  # it looks its attention up in a table of its own
            raise CannotRunError(_NO_INTERFACE) from error
        reason = _first_line(error)
        raise CannotRunError(
            f"transformers cannot build it with an attention function of the engine's ({reason})."
        ) from error
    _refuse_by_modules(model)
    if model._can_set_experts_implementation():
        model.set_experts_implementation("batched_mm")  # the one whose shapes are known
    notes = _Notes()
    token = _notes.set(notes)
    rows = torch.zeros((1, _NUM_ROWS), dtype=torch.int64, device="meta")
    try:
        with torch.inference_mode():
            model(
                input_ids=rows,
                position_ids=rows,
                attention_mask=torch.ones_like(rows),
                use_cache=False,
            )
    except CannotRunError:
        raise
    except Exception as error:
        if not model._supports_attention_backend:
            raise CannotRunError(_NO_INTERFACE) from error
        raise CannotRunError(
            f"its forward pass does not run on shapes alone ({_first_line(error)})."
        ) from error
    finally:
        _notes.reset(token)
    if not notes.calls:
        raise CannotRunError(_NO_INTERFACE)
    return notes.calls, model.num_parameters()


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__


_NO_INTERFACE: Final = "its attention does not go through transformers' attention interface."


def _note_mask(
    *, mask_function: Callable[..., Any] | None = None, q_length: int, **_: Any
) -> Tensor:
    """Stand in for a mask; note its function."""
    mask = torch.empty((1, 1, q_length, q_length), device="meta", dtype=torch.bool)
    _notes.get().masks[id(mask)] = mask, mask_function
    return mask


def _window(mask_function: Callable[..., Any] | None) -> int | None:
    """Return the window of a mask's function. Raises CannotRunError for other masks."""
    if mask_function is None:
        return None
    seen = []
    zero = torch.tensor(0)
    for last in (131_071, 200_002):
        keys = torch.arange(last + 8)
        visible = torch.as_tensor(mask_function(zero, zero, torch.tensor(last), keys))
        visible = visible.expand(len(keys))
        if visible[last + 1 :].any():
            raise CannotRunError("its attention is not causal.")
        first = int(visible.int().argmax())
        if not visible[first : last + 1].all():
            raise CannotRunError("its masks have holes.")
        seen.append(None if first == 0 else last - first + 1)
    if seen[0] != seen[1]:
        raise CannotRunError("its attention is chunked.")
    return seen[0]


def _note_call(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Stand in for a layer's attention; note its shapes."""
    if query.shape[0] != 1 or query.shape[2] != _NUM_ROWS or key.shape[2] != _NUM_ROWS:
        raise CannotRunError("its attention regroups the rows of a pass.")
    notes = _notes.get()
    known = notes.masks.get(id(attention_mask))
    is_causal = options.get("is_causal")
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if known is None and (attention_mask is not None or not is_causal):
        raise CannotRunError("its attention is not causal, or has masks of its own.")
    if options.get("position_bias") is not None:
        raise CannotRunError("its attention adds biases to its scores.")
    for name, option in options.items():
        if isinstance(option, Tensor) and name not in _KNOWN_TENSORS:
            raise CannotRunError(f"its attention depends on more than its rows ({name}).")
    for name in _SINKS:
        sinks = options.get(name)
        if sinks is not None and sinks.numel() != query.shape[1]:
            raise CannotRunError("its attention has sinks that are not one number a head.")
    window = sliding_window if known is None else _window(known[1])
    notes.calls.append(
        LayerCall(
            num_query_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            key_dim=key.shape[3],
            value_dim=value.shape[3],
            window=window,
        )
    )
    shape = (1, _NUM_ROWS, query.shape[1], value.shape[3])
    return torch.empty(shape, device="meta", dtype=query.dtype), None


AttentionInterface.register(_PROBE, _note_call)
AttentionMaskInterface.register(_PROBE, _note_mask)


# ---- the description ----------------------------------------------------------------------------


def _description(
    model_id: str, architecture: str, config: PreTrainedConfig, calls: list[LayerCall]
) -> ModelConfig:
    positions = max_positions(config)
    heads, full_heads = _heads(calls)
    if full_heads is None:
        calls = [replace(each, window=_useful(each.window, positions)) for each in calls]
    rope = RopeConfig(head_dim=heads.head_dim, rotary_dim=0)  # turned by the modules themselves
    return ModelConfig(
        model_id=model_id,
        architecture=architecture,
        is_native=False,
        hidden_size=config.hidden_size,
        num_query_heads=heads.num_query_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        full_heads=full_heads,
        intermediate_size=inner_size(config),
        vocab_size=config.vocab_size,
        max_position_embeddings=positions,
        layers=tuple(LayerConfig(rope=rope, window=each.window) for each in calls),
        norm_eps=0.0,  # the modules' own
        tie_word_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
        bos_token_id=getattr(config, "bos_token_id", None),
        eos_token_ids=eos_token_ids(model_id, config),
        dtype=str(getattr(config, "dtype", None) or "float32").removeprefix("torch."),
    )


def _heads(calls: list[LayerCall]) -> tuple[HeadShape, HeadShape | None]:
    """Return the heads of the layers, and of those without a window where theirs differ."""
    every = {each.heads for each in calls}
    if len(every) == 1:
        return every.pop(), None
    windowed = {each.heads for each in calls if each.window is not None}
    full = {each.heads for each in calls if each.window is None}
    if len(windowed) != 1 or len(full) != 1:
        raise CannotRunError(
            "its layers differ in their heads; the engine has one shape for layers with a window "
            "and one for those without."
        )
    return windowed.pop(), full.pop()


def _useful(window: int | None, positions: int) -> int | None:
    return None if window is None or window >= positions else window
