"""An adapter to compile the kernels of adapters with, before the first request that names one."""

import torch

from outrider.engine.model.lora_modules import lora_modules, num_sites
from outrider.engine.model.protocol import CausalModel
from outrider.kernels.layers.lora import LoraPart, LoraWeights


def adapter_of_nothing(model: CausalModel) -> LoraWeights | None:
    """Return zeros of rank 1 for every projection; None for a model that takes no adapters.

    All adapters run the same kernels, whatever their rank and the other rows' adapters.
    """
    sites: list[list[LoraPart]] = [[] for _ in range(num_sites(model.config))]
    for module in lora_modules(model.config).values():
        a, b = (
            torch.zeros(1, size, dtype=model.dtype, device=model.device)
            for size in (module.width, module.size)
        )
        sites[module.site].append(LoraPart(a=a, b=b, start=module.start, scale=0.0))
    return LoraWeights(sites, digest="nothing") if any(sites) else None
