"""`outrider router drift`: is a router still right on newer prompts, and what if it is not."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.gateway.tools.commands.flags import takes_flags
from outrider.gateway.tools.commands.terminal import make_console, print_whole
from outrider.gateway.tools.learning.routers.inputs import (
    EncoderOption,
    HoldBackOption,
    JsonFlag,
    LabelledDataPath,
    Router,
    estimate_rows,
    read_for,
    router_errors,
    with_embeddings,
)
from outrider.gateway.tools.reports.grids import Grid
from outrider.router.assurance import assure, is_assured
from outrider.router.calibration import CalibrationTarget, calibrate
from outrider.router.drift import MAX_UNLIKE, Drift, find_drift
from outrider.router.guard import MAX_SHIFT
from outrider.router.scorer import RouterScorer

DRIFT_HELP = """
Compare newer labelled prompts with what a router promised; mend it with --out.

Four things may drift: the prompts (unlike the training's), their qualities, the large model's
share, and the accuracy that is kept of the large model's. The last one counts only where chance
does not explain it, in nine of ten cases. The status is 1 where something has drifted and nothing
is written. --out writes the router with the qualities that it is assured to keep on these prompts,
for the width of small model that they were labelled with; where something has drifted, it is also
set anew to the accuracy that it had.

[bold]Examples[/bold]

  outrider router drift --router my-router --data last-week.jsonl

  outrider router drift --router my-router --data last-week.jsonl --out my-router
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftFlags:
    """The router, newer prompts, and where a mended one goes."""

    router: Router
    data: LabelledDataPath
    out: Annotated[
        Path | None, typer.Option(help="Folder for the mended router; may be ROUTER.")
    ] = None
    hold_back_tokens: HoldBackOption = 16
    encoder: EncoderOption = None


@takes_flags
def drift(flags: DriftFlags, as_json: JsonFlag = False) -> None:
    """Compare, print, mend; the help is `DRIFT_HELP`."""
    with router_errors():
        scorer = RouterScorer.load(flags.router)
        data = with_embeddings(scorer, read_for(scorer, flags.data), flags.encoder)
        rows = estimate_rows(scorer, data, flags.hold_back_tokens)
        found = find_drift(scorer, data, rows)
        reasons = list(found.reasons())
        if flags.out is not None:
            # A quality that a request names is kept whatever the large model costs.
            plain = replace(rows, small_cost=None, begun_cost=None, large_cost=None)
            mended = scorer
            if is_assured(plain):
                mended = scorer.with_assurance(assure(plain, data.small_weights))
            if reasons and scorer.calibration is not None:
                wanted = min(scorer.calibration.chosen.relative_accuracy, 1.0)
                found_anew = calibrate(rows, CalibrationTarget(quality=wanted))
                mended = mended.with_calibration(found_anew, scorer.worth)
            mended.save(flags.out)
    if as_json:
        typer.echo(json.dumps(_json(found, reasons), indent=2))
    else:
        typer.echo(f"{found.num_prompts} prompts of {flags.data.name}\n")
        print_whole(make_console(), _grid(found).terminal())
        typer.echo(f"\nDrift: {'; '.join(reasons)}." if reasons else "\nNo drift.")
    if flags.out is not None:
        typer.echo(f"Wrote {flags.out}", err=True)
    elif reasons:
        raise typer.Exit(1)


def _json(found: Drift, reasons: list[str]) -> dict[str, Any]:
    return {
        "num_prompts": found.num_prompts,
        "is_drifting": bool(reasons),
        "reasons": reasons,
        "unlike_share": found.unlike_share,
        "quality_shift": found.numbers.quality_shift,
        "strong_share": found.found.strong_share,
        "expected_strong_share": found.numbers.expected_share,
        "kept_quality": found.found.relative_accuracy,
        "promised_quality": found.promised_quality,
        "is_broken": found.is_broken,
    }


def _grid(found: Drift) -> Grid:
    numbers = found.numbers
    rows = [
        ["prompts unlike the training", f"at most {MAX_UNLIKE:.0%}", _share(found.unlike_share)],
        ["shift of the qualities", f"at most {MAX_SHIFT:g}", f"{numbers.quality_shift or 0.0:.3f}"],
        ["large share", _share(numbers.expected_share), f"{found.found.strong_share:.1%}"],
        [
            "kept of the large model's accuracy",
            f"at least {found.promised_quality:.1%}",
            f"{found.found.relative_accuracy:.1%}",
        ],
    ]
    return Grid(head=["", "expected", "found"], rows=rows)


def _share(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1%}"
