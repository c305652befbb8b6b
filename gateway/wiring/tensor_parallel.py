"""One model on several devices: the checks before anything is loaded, and the ranks' start.

Everything heavy is imported inside functions, as in `outrider.gateway.wiring.engine`.
"""

from typing import TYPE_CHECKING

from outrider.engine.errors import EngineError
from outrider.gateway.settings.tree import Settings
from outrider.gateway.wiring.checkpoints import named_models
from outrider.gateway.wiring.hardware import usable_physical_cores

if TYPE_CHECKING:
    import torch

    from outrider.engine.parallel.messages import ModelSource
    from outrider.engine.parallel.ranks import Ranks


def start_ranks(settings: Settings, device: "torch.device", source: "ModelSource") -> "Ranks":
    """Start the processes of the large model's other ranks.

    Raises EngineError where there are too few devices, and UnsupportedModelError for a model that
    cannot be shared out.
    """
    from outrider.engine.parallel.ranks import Ranks

    check_ranks(settings, device, source.path)
    count = settings.engine.tensor_parallel
    return Ranks(count, source, device=device, num_threads=threads_of_rank(settings))


def check_ranks(settings: Settings, device: "torch.device", path: str) -> None:
    """Raise as `start_ranks` does for the large model at `path`; nothing is started."""
    from outrider.engine.model.read_config import read_model_config
    from outrider.engine.model.shared_config import check_shares
    from outrider.engine.model.weights import resolve_checkpoint

    count = settings.engine.tensor_parallel
    _check_devices(count, device)
    check_shares(read_model_config(resolve_checkpoint(path)), count)


def threads_of_rank(settings: Settings) -> int:
    """Return the CPU threads of each rank: they share the engine's."""
    num_threads = settings.engine.num_threads or usable_physical_cores()
    return max(num_threads // settings.engine.tensor_parallel, 1)


def has_ranks(settings: Settings) -> bool:
    """Return whether the large model is shared out. Raises EngineError where there is none."""
    if settings.engine.tensor_parallel == 1:
        return False
    if "large" not in named_models(settings):
        raise EngineError(
            f"engine.tensor_parallel = {settings.engine.tensor_parallel} shares out the large "
            "model, and none is configured: name it with --large, or leave it at 1."
        )
    return True


def _check_devices(count: int, device: "torch.device") -> None:
    import torch

    if device.type == "cuda":
        num_devices, kind = torch.cuda.device_count(), "GPUs"
    else:
        num_devices, kind = usable_physical_cores(), "CPU cores"
    if count > num_devices:
        raise EngineError(
            f"engine.tensor_parallel = {count} needs as many devices, and this machine has "
            f"{num_devices} {kind} that can be used. Lower it."
        )
