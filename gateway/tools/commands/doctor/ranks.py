"""Check that the large model can be shared out to the devices that are asked for."""

from outrider.engine.errors import EngineError
from outrider.gateway.settings.tree import Settings
from outrider.gateway.tools.commands.doctor.findings import Finding
from outrider.gateway.wiring.checkpoints import named_models
from outrider.gateway.wiring.tensor_parallel import check_ranks, has_ranks

_NAME = "tensor parallel"


def find_ranks(settings: Settings, *, is_on_gpu: bool) -> Finding | None:
    """Return whether engine.tensor_parallel fits to the model and the machine; None where off."""
    import torch

    try:
        if not has_ranks(settings):
            return None
        device = torch.device("cuda" if is_on_gpu else "cpu")
        check_ranks(settings, device, named_models(settings)["large"])
    except EngineError as error:
        return Finding(
            name=_NAME,
            status="failed",
            detail=str(error),
            advice="Change --tensor-parallel (engine.tensor_parallel), or leave it away.",
        )
    count, kind = settings.engine.tensor_parallel, "GPUs" if is_on_gpu else "CPU processes"
    return Finding(name=_NAME, status="ok", detail=f"{count} {kind} share the large model")
