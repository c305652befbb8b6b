"""A public model and a drafter for it: the same weights with noise, since none is published.

The file's weights are decoded to bfloat16. The drafter's matrices get Gaussian noise in proportion
to their own spread, as in benchmarks/shared/disagreeing.py. Both folders are made once, below
runs/. The drafter is as large as its target: it says how often drafts are accepted, not how fast
they are made.
"""

import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from benchmarks.shared.disagreeing import noisy_weights
from benchmarks.shared.harness import CACHE
from outrider.engine.model.gguf.folder import LINK
from outrider.engine.model.gguf.header import read_header
from outrider.engine.model.gguf.tensors import GgufFile, tensor_names
from outrider.gateway.settings.public_models import public_path
from outrider.gateway.wiring.checkpoints import checkpoint

_FOLDER = CACHE / "public"
_WEIGHTS = "model.safetensors"


def noisy_pair(name: str, level: float, *, seed: int = 0) -> tuple[Path, Path]:
    """Return the folders of a public model and of its drafter; `level` in standard deviations."""
    target = _FOLDER / name
    if not target.is_dir():
        source = Path(checkpoint(public_path(name)))
        file = GgufFile(source / LINK)
        names = tensor_names(read_header(source / LINK))
        weights = {each: file.get_tensor(each).to(torch.bfloat16).contiguous() for each in names}
        _write(target, source, weights)
    drafter = _FOLDER / f"{name}-noise-{level:g}-{seed}"
    if not drafter.is_dir():
        _write(drafter, target, noisy_weights(load_file(target / _WEIGHTS), level, seed))
    return target, drafter


def _write(folder: Path, source: Path, weights: dict[str, torch.Tensor]) -> None:
    """Write a folder with the other's texts and these weights; one that exists is complete."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=folder.parent, prefix="unfinished-"))
    try:
        for file in source.iterdir():
            if file.suffix in (".json", ".jinja"):
                shutil.copy(file, unfinished)
        save_file(weights, unfinished / _WEIGHTS, metadata={"format": "pt"})
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
