"""Weights of a transformers model, in its own modules, whose products are the engine's."""

import re
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from outrider.engine.errors import UnsupportedModelError
from outrider.engine.model.checkpoint_files import read_object
from outrider.engine.model.transformers_config import quiet_transformers, read_transformers_config
from outrider.engine.model.weights import required_text_prefix
from outrider.kernels.layers.row_invariant_linear import make_linear

# Under which the engine's attention is registered with transformers.
ATTENTION_NAME: Final = "outrider"


class _PackedLinear(nn.Module):
    """A product whose weight is held once, in the layout that is fastest."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = weight.new_empty(0)  # modules ask for its type and place
        self.bias = bias
        self._product = make_linear(weight, bias)

    def forward(self, x: Tensor) -> Tensor:
        """`x`: [..., in_features] -> [..., out_features]."""
        product: Tensor = self._product(x.reshape(-1, self.in_features))
        return product.view(*x.shape[:-1], self.out_features)


def read_model(
    folder: Path, *, dtype: torch.dtype, device: torch.device, is_text_part: bool
) -> PreTrainedModel:
    """Read the weights. Raises UnsupportedModelError unless they are what config.json describes.

    `is_text_part`: only those of the text model, of a checkpoint that takes images, too.
    """
    renamed = {}
    if is_text_part:
        prefix = re.escape(required_text_prefix(folder))
        renamed = {f"^{prefix}": "model.", r"^language_model\.lm_head\.": "lm_head."}
    with quiet_transformers():
        try:
            read: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                config=read_transformers_config(
                    str(folder), read_object(folder / "config.json") or {}
                ),
                dtype=dtype,
                attn_implementation=ATTENTION_NAME,
                use_safetensors=True,
                key_mapping=renamed or None,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
            model, found = read
        except Exception as error:  # of transformers, safetensors and torch
            reason = str(error).partition("\n")[0][:300] or type(error).__name__
            raise UnsupportedModelError(f"{folder} cannot be read: {reason}") from error
    for kind in ("missing", "mismatched", "unexpected"):
        names = sorted(str(_name(each)) for each in found.get(f"{kind}_keys", ()))
        if is_text_part and kind == "unexpected":
            modules = {name for name, _ in model.named_modules()}
            names = [name for name in names if ".".join(name.split(".")[:2]) in modules]
        if names:
            shown = ", ".join(names[:5]) + (" …" if len(names) > 5 else "")
            raise UnsupportedModelError(
                f"{folder}: {len(names)} {_KINDS[kind]} tensor(s), so config.json does not "
                f"describe these weights: {shown}"
            )
    model.eval().to(device)
    # It reads all token ids in every pass, which a GPU would have to wait for.
    model.warn_if_padding_and_no_attention_mask = lambda *_: None
    loaded: PreTrainedModel = model
    return loaded


_KINDS: Final = {"missing": "missing", "mismatched": "misshapen", "unexpected": "unexpected"}


def _name(found: object) -> object:
    return found[0] if isinstance(found, tuple) else found


def pack_linear_layers(model: PreTrainedModel, *, kept: nn.Module | None) -> None:
    """Replace linear layers by packed ones, one by one, so that no weight is held twice for long.

    `kept`: a head whose weight is the embedding table.
    """
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            if module is kept:
                continue
            if type(module) is nn.Linear:
                packed = _PackedLinear(module.weight.data, _data(module.bias))
            elif type(module) is Conv1D:
                packed = _PackedLinear(module.weight.data.t().contiguous(), _data(module.bias))
            else:
                continue
            setattr(parent, name, packed)


def _data(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.data
