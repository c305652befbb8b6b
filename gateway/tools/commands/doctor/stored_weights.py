"""Says in a few words what becomes of a checkpoint's quantised weights."""

from pathlib import Path

import torch

from outrider.engine.model.config import ModelConfig
from outrider.engine.model.gguf.folder import LINK
from outrider.gateway.settings.tree import Settings
from outrider.gateway.tools.measuring.plan.stored import stored_bits
from outrider.kernels.layers.row_invariant_linear import keeps_stored_weights
from outrider.verifier.params import Tier


def stored_format(config: ModelConfig) -> str | None:
    """Name the format of quantised weights; None for plain ones."""
    if config.weight_format is not None:
        return config.weight_format.method
    return "GGUF" if (Path(config.model_id) / LINK).is_file() else None


def way_to_run(config: ModelConfig, settings: Settings, tier: Tier) -> str:
    """Tell in a few words what becomes of a tier's quantised weights."""
    if (scheme := settings.models.scheme(tier)) is not None:
        return f"rounded again to {scheme}"
    wants_gpu = torch.cuda.is_available() and settings.engine.device != "cpu"
    device = torch.device("cuda" if wants_gpu else "cpu")
    computes = settings.engine.dtype in ("auto", "bfloat16") and config.dtype != "float32"
    stays = computes and not settings.models.decodes(tier) and stored_bits(config) is not None
    if stays and keeps_stored_weights(torch.bfloat16, device):
        return "held as they are stored where a kernel multiplies with them"
    return "decoded when they are loaded"
