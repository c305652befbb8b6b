"""What tests marked gpu run on: the GPU, or without one (`make gpu-check DRY=1`) the CPU.

So every line of theirs has run before a GPU is at hand. On the CPU kernels are torch's references
and a recording is run again where it would be replayed.
"""

from dataclasses import replace

import torch

from engine.model.protocol import CausalModel
from engine.passes.cuda_capture import CaptureFn
from tests.engine.passes.twins import record_eagerly
from tests.engines import Pair, engine_model

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# None: CUDA graphs.
CAPTURE: CaptureFn | None = None if DEVICE.type == "cuda" else record_eagerly


def on_the_device(pair: Pair) -> Pair:
    """The pair with its models on the device."""
    large, small = (_moved(each) for each in (pair.large_reference, pair.small_reference))
    return replace(pair, large=large, small=small)


def _moved(reference) -> CausalModel:  # type: ignore[no-untyped-def]
    return engine_model(reference, device=DEVICE)


def forbid_waiting(is_forbidden: bool) -> None:
    """Have torch raise, or not, where a call waits for the device."""
    if DEVICE.type == "cuda":
        torch.cuda.set_sync_debug_mode("error" if is_forbidden else "default")
