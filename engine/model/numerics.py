"""A fingerprint of the arithmetic: equal fingerprints mean the same function, bit by bit.

The law behind it: in deterministic mode, two engines with one fingerprint give the same bytes for
the same request, whatever else they serve and on however many threads.
"""

import hashlib
import json
import os

import torch

from kernels.cpu.product_library import product_support


def numerics_fingerprint(
    *, checkpoint: str, scheme: str, dtype: torch.dtype, device: torch.device, deterministic: bool
) -> str:
    """Return 16 hexadecimal digits of all that a token's logits depend on, the tokens apart.

    checkpoint: its fingerprint. The KV cache's type is not in it: caches add their own. Torch's
    version is: norms, rotations and what is not compiled here are its own.
    """
    is_cpu = device.type == "cpu"
    facts = {
        "checkpoint": checkpoint,
        "scheme": scheme,
        "dtype": str(dtype),
        "deterministic": deterministic,
        "device": torch.backends.cpu.get_cpu_capability() if is_cpu else _gpu_name(device),
        "products": product_support().detail if is_cpu else "",
        "kernels": os.environ.get("OUTRIDER_KERNELS", ""),
        "torch": torch.__version__,
    }
    return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=8).hexdigest()


def _gpu_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
