"""Grown checkpoints, made once and kept under runs/."""

import argparse
import hashlib
import json
import shutil
import tempfile
from pathlib import Path

from benchmarks.shared.disagreeing import disagreeing
from benchmarks.shared.grown_head import grow_head
from benchmarks.shared.harness import CACHE, console
from outrider.draft.training.expand import expand
from outrider.draft.training.expand_shape import shape_for_parameters

_FOLDER = CACHE / "grown"


def grown(source: Path, target_parameters: str, *, seed: int = 0) -> Path:
    """The folder of `source` grown to about `target_parameters` ("400M") without a change of what
    it computes. Weights that were retrained or another seed give another folder.
    """
    prefix = f"{source.name}-{target_parameters.lower()}-"
    folder = _FOLDER / (prefix + fingerprint(source, seed))
    if folder.is_dir():
        return folder
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    shape = shape_for_parameters(config, target_parameters)
    _FOLDER.mkdir(parents=True, exist_ok=True)
    for outdated in _FOLDER.glob(prefix + "*"):  # of weights that have been retrained
        shutil.rmtree(outdated)
    console.print(f"growing {source.name} to {target_parameters} in {_FOLDER.name}/{folder.name}")
    # Into a folder of another name first: one that exists is complete.
    unfinished = Path(tempfile.mkdtemp(dir=_FOLDER, prefix="unfinished-"))
    try:
        expand(source, unfinished, shape, seed=seed)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def grown_large(arguments: argparse.Namespace) -> Path:
    """The target's folder, after `--expand-target`."""
    folder = Path(arguments.large)
    size = arguments.expand_target
    return grown(folder, size, seed=arguments.seed) if size else folder


def grown_head(arguments: argparse.Namespace, large: Path) -> Path | None:
    """The folder of `--drafter` for `large`, which has grown after `--expand-target` or not."""
    if arguments.drafter is None:
        return None
    head, source = Path(arguments.drafter), Path(arguments.large)
    if large == source:
        return head
    folder = _FOLDER / f"head-{large.name}-{fingerprint(head, arguments.seed)}"
    if not (folder / "config.json").is_file():
        shutil.rmtree(folder, ignore_errors=True)
        grow_head(head, source, large, folder)
    return folder


def small_folder(arguments: argparse.Namespace) -> Path:
    """The small model's folder, after `--pair`."""
    small = Path(arguments.small)
    if getattr(arguments, "pair", "demo") == "demo":
        return small
    return disagreeing(Path(arguments.large), small, seed=arguments.seed)


def grown_small(arguments: argparse.Namespace) -> Path:
    """The small model's folder, after `--pair` and `--expand-draft`."""
    folder = small_folder(arguments)
    size = arguments.expand_draft
    return grown(folder, size, seed=arguments.seed) if size else folder


def fingerprint(source: Path, seed: int) -> str:
    """Eight characters that tell these weights and this seed from others."""
    digest = hashlib.sha256(str(seed).encode())
    for file in sorted([source / "config.json", *source.glob("*.safetensors")]):
        with file.open("rb") as content:
            digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()[:8]
