"""The bundled pair, grown: it answers the same, and its passes cost what larger models' cost."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Final

from draft.training.expand import expand
from draft.training.expand_shape import shape_for_parameters
from engine.model.fingerprint import checkpoint_fingerprint
from gateway.settings.sections import bundled_pair
from router.scorer import RouterScorer

GROWN: Final = {"large": "150M", "small": "15M"}
"""Parameters of each model: as many times apart as the bundled ones, about ten."""


def grow_pair(folder: Path) -> list[str]:
    """Write both models and their router to `folder`; returns the arguments of `outrider serve`.

    What is added to the models cannot reach their output, so the router judges their answers as it
    judges the bundled pair's: it is written anew with the grown models' fingerprints.
    """
    source = bundled_pair()
    for name, parameters in GROWN.items():
        config = json.loads((source / name / "config.json").read_text(encoding="utf-8"))
        expand(source / name, folder / name, shape_for_parameters(config, parameters))
    pair = "-".join(checkpoint_fingerprint(folder / name) for name in ("small", "large"))
    replace(RouterScorer.load(source / "router"), pair=pair).save(folder / "router")
    return [
        argument
        for name in ("large", "small", "router")
        for argument in (f"--{name}", str(folder / name))
    ]
