"""Curves of pass times on disk: measuring them takes a second or more of every start.

A wrong file costs nothing but a measurement: what is no curve is ignored and written anew. Times
that were right once and are not now are corrected by the passes that follow (`RunningStepTimes`).
A curve says whether the processor was quiet, so that later starts know what to believe.
"""

import hashlib
import json
import logging
import math
import os
import platform
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import torch

from outrider.engine.passes.processor import processor_name
from outrider.engine.passes.runner import ModelRunner
from outrider.engine.passes.step_times import StepTimeCurve
from outrider.kernels.cpu.product_library import product_support

logger = logging.getLogger(__name__)

_FORMAT: Final = 3  # of the file, and of what is measured


class SavedTimes:
    """The curves of one machine and one set of the engine's settings."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        """`folder` need not exist; `settings`: what passes depend on, beside model and machine."""
        self._folder = folder
        self._conditions = {"format": _FORMAT, "settings": dict(settings), **_machine()}

    def load(self, runner: ModelRunner) -> StepTimeCurve | None:
        """Return the curve of this runner's model; None where there is none that makes sense."""
        try:
            return _read_curve(json.loads(self._path(runner).read_bytes()))
        except (OSError, ValueError, TypeError, KeyError) as error:
            logger.debug("no saved pass times reason=%r", error)
            return None

    def save(self, runner: ModelRunner, curve: StepTimeCurve) -> None:
        """Keep a curve, where the folder can be written."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_file(self._path(runner), json.dumps(asdict(curve)).encode())
        except OSError as error:
            logger.info("pass times are not kept reason=%s", error)

    @property
    def folder(self) -> Path:
        """The folder of the files, which may be missing yet."""
        return self._folder

    def _path(self, runner: ModelRunner) -> Path:
        """The file's name says what it holds for: another condition is another file."""
        return self._folder / f"pass-times-{self.digest(runner)}.json"

    def digest(self, runner: ModelRunner) -> str:
        """Return a name for all that passes of this runner depend on."""
        conditions = {
            **self._conditions,
            "numerics": runner.model.numerics,
            "kv_dtype": str(runner.kv_dtype),
            "max_context": runner.max_context,
            "device": _device_name(runner.device),
            "threads": torch.get_num_threads(),
        }
        return digest_of(conditions)


def digest_of(conditions: Mapping[str, Any]) -> str:
    """Return a name for these conditions."""
    text = json.dumps(conditions, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _machine() -> dict[str, str | int | None]:
    """Describe the machine and libraries, by all that changes how fast they compute."""
    return {
        "node": platform.node(),
        "processor": processor_name(),
        "num_cpus": os.cpu_count(),
        "torch": torch.__version__,
        "kernels": os.environ.get("OUTRIDER_KERNELS"),
        "products": product_support().detail,
    }


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _read_curve(fields: Mapping[str, Any]) -> StepTimeCurve:
    """Raise ValueError, TypeError or KeyError for what no measurement could have given."""
    num_rows, seconds = tuple(fields["num_rows"]), tuple(fields["seconds"])
    context, row_context_s = fields["context"], fields["row_context_s"]
    if not all(type(rows) is int and rows > 0 for rows in num_rows):
        raise ValueError("num_rows")
    if not all(type(value) in (int, float) for value in (*seconds, context, row_context_s)):
        raise TypeError("seconds")
    if not all(map(math.isfinite, (*seconds, context, row_context_s))):
        raise ValueError("not finite")
    if len(num_rows) != len(seconds) or len(num_rows) < 2 or seconds[0] <= 0:
        raise ValueError("length")
    if any(a >= b for a, b in pairwise(num_rows)) or any(a > b for a, b in pairwise(seconds)):
        raise ValueError("order")
    if context < 0 or row_context_s < 0:
        raise ValueError("context")
    if type(fields["is_quiet"]) is not bool:
        raise TypeError("is_quiet")
    return StepTimeCurve(
        num_rows=num_rows,
        seconds=seconds,
        context=context,
        row_context_s=row_context_s,
        is_quiet=fields["is_quiet"],
    )


def replace_file(path: Path, data: bytes) -> None:
    """Write a file that readers see whole or not at all."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(data)
    os.replace(file.name, path)
