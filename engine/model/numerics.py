"""A fingerprint of the arithmetic: equal fingerprints mean the same function, bit by bit.

The law behind it: in deterministic mode, two engines with one fingerprint give the same bytes for
the same request, whatever else they serve and on however many threads.
"""

import hashlib
import json
import os
from collections.abc import Sequence

import torch

from outrider.engine.errors import UnsupportedModelError
from outrider.kernels.cpu.product_library import PORTABLE, is_portable, product_support
from outrider.kernels.cpu.row_attention import can_attend_rows
from outrider.kernels.layers.compiled_rows import can_place_heads
from outrider.kernels.layers.rope import RotaryTable
from outrider.kernels.layers.row_invariant_linear import computes_in_panels


def is_deterministic_anyway(dtype: torch.dtype, device: torch.device, *, head_dim: int) -> bool:
    """True if the ordinary products, norms, gates and attention keep every row's bits.

    So it is with the compiled ones in bfloat16: there the deterministic mode costs nothing.
    """
    return (
        computes_in_panels(dtype, device)
        and can_place_heads(dtype, device, head_dim)
        and can_attend_rows(dtype, head_dim, device)
    )


def numerics_fingerprint(  # noqa: PLR0913 - all that bits depend on
    *,
    checkpoint: str,
    scheme: str,
    dtype: torch.dtype,
    device: torch.device,
    deterministic: bool,
    num_ranks: int = 1,
    has_long_rope: bool = False,
    rotation: Sequence[RotaryTable] = (),
) -> str:
    """Return 16 hexadecimal digits of all that a token's logits depend on, the tokens apart.

    `checkpoint`: its fingerprint. The KV cache's type is not in it: caches add their own. Torch's
    version is: norms, rotations and what is not compiled here are its own. Portable numerics have
    neither an instruction set nor torch's arithmetic; `rotation`: what torch has made of it.
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
    if is_cpu and is_portable():
        facts |= {"device": PORTABLE, "products": _digest(rotation), "torch": ""}
    if num_ranks > 1:  # sums are cut in as many parts
        facts["ranks"] = num_ranks
    if has_long_rope:  # by the context that is served
        facts["rope"] = "long"
    return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=8).hexdigest()


def refuse_portable(model_id: str) -> None:
    """Raise UnsupportedModelError where numerics are to be portable: a model has torch's bits."""
    if is_portable():
        raise UnsupportedModelError(
            f"{model_id}: some of its passes would be torch's, whose bits are those of a processor "
            "(or its numbers are not bfloat16), so --numerics portable cannot hold. Leave it out."
        )


def _digest(rotation: Sequence[RotaryTable]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for each in rotation:
        digest.update(each.table.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _gpu_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
