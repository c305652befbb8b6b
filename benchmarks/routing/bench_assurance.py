"""Is a quality that a router assures kept on prompts that it did not learn from, and at what price?

Method: a router is trained on the gold file of each set (`routing/NAME_gold.csv` under
$OUTRIDER_DATA), and what its held-out folds assure is compared with the dev file: the share of the
large model's accuracy that is kept, and the share of prompts that it answers, at each quality that
may be asked for. `calibrated`: the setting that kept the quality on the same folds in the mean.
`broken`: the dev file is the world, from which 1,500 prompts are drawn with replacement, many
times; each draw assures anew, and is broken where its setting keeps less of the whole world.

Reading it: `assured` keeps at least the quality that was asked for; broken at most 10 % of draws.

    OUTRIDER_DATA=... python -m benchmarks.routing.bench_assurance
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.routing.real_questions import data_folder
from benchmarks.shared.harness import (
    argument_parser,
    prepare,
    show_table,
    start,
    verdict,
    write_results,
)
from outrider.router.assurance import CONFIDENCE, assure
from outrider.router.calibration import CalibrationError, StageRows, measure
from outrider.router.dataset import LabelledPrompts, RouterDataError, read_labelled_prompts
from outrider.router.dial import Dial, Setting
from outrider.router.estimator import train_router
from outrider.router.stages import stage_rows

SETS: Final = ("mmlu", "gsm8k")
_QUALITIES: Final = (0.85, 0.9, 0.95, 0.97, 0.99)
_NUM_DRAWN: Final = 1500


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What a setting keeps of the large model's accuracy, and how often it asks that model."""

    quality: float
    strong_share: float

    @classmethod
    def of(cls, rows: StageRows, setting: Setting) -> "Kept":
        """Measure a setting of the text stage."""
        point = measure(rows, setting.threshold)
        return cls(quality=point.relative_accuracy, strong_share=point.strong_share)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What comes of asking for one quality."""

    quality: float
    assured: Kept
    calibrated: Kept
    broken: float
    """The share of draws from the dev file whose assured setting keeps less of it."""


def drawn(rows: StageRows, rng: np.random.Generator, count: int) -> StageRows:
    """Draw prompts with replacement; only what the text stage needs is kept."""
    places = rng.integers(0, len(rows.text), count)
    text = rows.text[places]
    return StageRows(
        text=text, prompt=text, answer=None, weak=rows.weak[places], strong=rows.strong[places]
    )


def broken_shares(
    rows: StageRows, qualities: Sequence[float], *, draws: int, count: int, seed: int
) -> dict[float, float]:
    """Return how often draws from these rows assure more than the rows keep, by quality."""
    rng = np.random.default_rng(seed)
    broken = dict.fromkeys(qualities, 0)
    for _ in range(draws):
        stage = assure(drawn(rows, rng, count)).stages[0]
        for quality in qualities:
            broken[quality] += Kept.of(rows, stage.setting(quality)).quality < quality
    return {quality: number / draws for quality, number in broken.items()}


def measure_set(
    gold: LabelledPrompts, dev: LabelledPrompts, *, draws: int, seed: int
) -> list[Asked]:
    """Train on gold, and see on dev what each quality brings."""
    trained = train_router(gold)
    calibration = trained.scorer.calibration
    if calibration is None:
        raise CalibrationError("the router has no calibration")
    rows, dial = stage_rows(trained.scorer, dev), Dial(calibration)
    stage = trained.scorer.assurances[0].stages[0]
    broken = broken_shares(rows, _QUALITIES, draws=draws, count=_NUM_DRAWN, seed=seed)
    return [
        Asked(
            quality=quality,
            assured=Kept.of(rows, stage.setting(quality)),
            calibrated=Kept.of(rows, dial.at_quality(quality)),
            broken=broken[quality],
        )
        for quality in _QUALITIES
    ]


def show(results: Mapping[str, Sequence[Asked]]) -> None:
    """Print a table for each set."""
    columns = ["asked", "assured: kept", "large", "calibrated: kept", "large", "broken", "met"]
    for name, asked in results.items():
        rows = [
            [
                f"{one.quality:.0%}",
                *(f"{share:.1%}" for share in (one.assured.quality, one.assured.strong_share)),
                *(f"{s:.1%}" for s in (one.calibrated.quality, one.calibrated.strong_share)),
                f"{one.broken:.1%}",
                verdict(is_met(one)),
            ]
            for one in asked
        ]
        show_table(name, columns, rows)


def is_met(one: Asked) -> bool:
    """Return whether the quality is kept, and as often as it says."""
    return one.assured.quality >= one.quality and one.broken + CONFIDENCE <= 1.0 + 1e-9


def read(folder: Path, name: str) -> LabelledPrompts:
    """Read one of the files. Raises SystemExit where it is absent."""
    try:
        return read_labelled_prompts(folder / "routing" / f"{name}.csv")
    except RouterDataError as error:
        raise SystemExit(str(error)) from None


def main(argv: Sequence[str] | None = None) -> None:
    """Measure all of it and write the results."""
    parser = argument_parser(__doc__)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--draws", type=int, default=300, help="from the dev file")
    arguments = parser.parse_args(argv)
    prepare(arguments)
    folder = data_folder()
    asked: dict[str, list[Asked]] = {
        name: measure_set(
            read(folder, f"{name}_gold"),
            read(folder, f"{name}_dev"),
            draws=arguments.draws,
            seed=arguments.seed,
        )
        for name in arguments.sets
    }
    show(asked)
    results: dict[str, Any] = {
        "confidence": CONFIDENCE,
        "num_drawn": _NUM_DRAWN,
        "sets": asked,
        "met": all(is_met(one) for each in asked.values() for one in each),
    }
    write_results("bench_assurance", arguments.variant or "routellm", results, arguments)


if __name__ == "__main__":
    start(main)
