"""Load a model: the engine's own decoder where it has a description, else transformers' modules."""

import logging
from pathlib import Path

import torch

from outrider.engine.errors import UnsupportedModelError
from outrider.engine.model.decoder import DTYPES, DecoderModel, DtypeName
from outrider.engine.model.numerics import refuse_portable
from outrider.engine.model.protocol import CausalModel
from outrider.engine.model.quantised.formats import Rounding, StoredWay
from outrider.engine.model.read_config import read_model_config
from outrider.engine.model.shard import WHOLE, Shard
from outrider.engine.model.shared_config import check_shares
from outrider.engine.model.weights import ProgressCallback, resolve_checkpoint

logger = logging.getLogger(__name__)


def load_model(  # noqa: PLR0913 - all that a model may be loaded with
    path_or_id: str,
    *,
    dtype: DtypeName = "auto",
    device: str | torch.device = "cpu",
    deterministic: bool | None = False,
    max_context: int | None = None,
    rounding: Rounding | StoredWay | None = None,
    on_progress: ProgressCallback | None = None,
    shard: Shard = WHOLE,
) -> CausalModel:
    """Load a checkpoint from a local folder or, if there is none, from the hub.

    Arguments as for `DecoderModel.load`. Raises UnsupportedModelError for what cannot run.
    """
    folder = resolve_checkpoint(path_or_id)
    config = read_model_config(folder)
    check_shares(config, shard.count)
    if config.is_native:
        logger.info("%s: %s, the engine's own decoder", path_or_id, config.architecture)
        return DecoderModel.load(
            path_or_id,
            dtype=dtype,
            device=device,
            deterministic=deterministic,
            max_context=max_context,
            rounding=rounding,
            on_progress=on_progress,
            shard=shard,
        )
    if isinstance(rounding, Rounding):
        raise UnsupportedModelError(
            f"{path_or_id} is {config.architecture}, which runs through transformers: its weights "
            "cannot be quantised here. Leave models.quantize off for it."
        )
    refuse_portable(path_or_id)
    if deterministic:
        raise UnsupportedModelError(
            f"{path_or_id} is {config.architecture}, which runs through transformers: its modules "
            "round by the rows of a pass, so engine.deterministic cannot hold. Leave it off."
        )
    logger.info("%s: %s, through transformers", path_or_id, config.architecture)
    return _through_transformers(folder, path_or_id, dtype, torch.device(device), on_progress)


def _through_transformers(
    folder: Path,
    path_or_id: str,
    dtype: DtypeName,
    device: torch.device,
    on_progress: ProgressCallback | None,
) -> CausalModel:
    from outrider.engine.model.transformers_decoder import TransformersModel

    config = read_model_config(folder)
    name = config.dtype if dtype == "auto" else dtype
    if name not in DTYPES:
        raise UnsupportedModelError(
            f"{path_or_id}: dtype {name!r} is not one of {', '.join(DTYPES)}."
        )
    model = TransformersModel.load(folder, config=config, dtype=DTYPES[name], device=device)
    if on_progress is not None:
        on_progress(model.weight_bytes, model.weight_bytes)
    return model
