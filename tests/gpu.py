"""What tests marked gpu run on: the GPU, or without one (`make gpu-check DRY=1`) the CPU.

So every line of theirs has run before a GPU is at hand. On the CPU kernels are torch's references
and a recording is run again where it would be replayed.
"""

import tempfile
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from outrider.engine.model.load import load_model
from outrider.engine.model.protocol import CausalModel
from outrider.engine.passes.cuda_capture import CaptureFn
from tests.engine.passes.twins import record_eagerly
from tests.engines import Pair, engine_model

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# None: CUDA graphs.
CAPTURE: CaptureFn | None = None if DEVICE.type == "cuda" else record_eagerly


def on_the_device(pair: Pair) -> Pair:
    """The pair with its models on the device."""
    large, small = (_moved(each) for each in (pair.large_reference, pair.small_reference))
    return replace(pair, large=large, small=small)


def _moved(reference: PreTrainedModel) -> CausalModel:
    """On a GPU deterministic: elsewhere a row of few keeps its bits in any company anyway."""
    if DEVICE.type == "cpu":
        return engine_model(reference)
    with tempfile.TemporaryDirectory() as folder:
        reference.save_pretrained(folder)
        return load_model(folder, dtype="float32", device=DEVICE, deterministic=True)


def forbid_waiting(is_forbidden: bool) -> None:
    """Have torch raise, or not, where a call waits for the device."""
    if DEVICE.type == "cuda":
        torch.cuda.set_sync_debug_mode("error" if is_forbidden else "default")
