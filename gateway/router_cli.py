"""`outrider router train | eval`: learn a router from labelled prompts, and judge one."""

import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from router.dataset import LabelledPrompts, RouterDataError, read_labelled_prompts
from router.evaluation import Interval, NoGapError, RouterReport, evaluate
from router.scorer import RouterFileError, RouterScorer

app = typer.Typer(name="router", help="Train and judge the router.", no_args_is_help=True)

DATA_VARIABLE = "OUTRIDER_DATA"
_DATA_HELP = (
    "CSV or JSONL with prompt, weak_correct and strong_correct (0 or 1). A relative path is also "
    f"looked up under ${DATA_VARIABLE}."
)


@app.command()
def train(
    data: Annotated[Path, typer.Option(help=_DATA_HELP)],
    out: Annotated[Path, typer.Option(help="Folder for the router; made if it is missing.")],
    recovered_gap: Annotated[
        float,
        typer.Option(help="Share of the large model's advantage that the threshold keeps."),
    ] = 0.95,
    weak_only: Annotated[
        bool,
        typer.Option(
            "--weak-only",
            help="Leave strong_correct out: judge by the small model's answers alone.",
        ),
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the held-out folds.")] = 0,
) -> None:
    """Learn which prompts the small model answers well enough."""
    # scikit-learn takes seconds to import, and serving must not need it.
    from router.estimator import TrainConfig, train_router

    rows = _read(data)
    if weak_only:
        rows = replace(rows, strong=None)
    typer.echo(f"Training on {len(rows.prompts)} prompts ...", err=True)
    try:
        config = TrainConfig(recovered_gap=recovered_gap, seed=seed)
        scorer = train_router(rows, config).scorer
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    scorer.save(out)
    record = scorer.training
    typer.echo(f"Wrote {out}")
    typer.echo(f"  always small           accuracy {record['weak_accuracy']:.3f}")
    if rows.strong is None:
        typer.echo("  always large           no labels: taken as never wrong")
    else:
        typer.echo(f"  always large           accuracy {record['strong_accuracy']:.3f}")
    typer.echo(
        f"  threshold {scorer.threshold:.3f}        accuracy {record['held_out_accuracy']:.3f} "
        f"with {record['held_out_strong_share']:.1%} sent to large (held-out folds)"
    )
    if scorer.threshold == 0.0:
        typer.echo("  note: the large model adds nothing here, so none is ever asked", err=True)
    if rows.num_duplicates:
        typer.echo(f"  note: {rows.num_duplicates} rows repeat a prompt of another row", err=True)


@app.command("eval")
def evaluate_command(
    router: Annotated[Path, typer.Option(help="Folder that `outrider router train` wrote.")],
    data: Annotated[Path, typer.Option(help=_DATA_HELP)],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    resamples: Annotated[int, typer.Option(min=0, help="Bootstrap resamples.")] = 1000,
    seed: Annotated[int, typer.Option(help="Seed of the bootstrap.")] = 0,
) -> None:
    """Judge a router on labelled prompts, beside random, best-single and oracle."""
    import numpy as np

    rows = _read(data)
    if rows.strong is None:
        raise typer.BadParameter(f"{data} has no strong_correct: a gap needs both tiers' labels")
    try:
        scorer = RouterScorer.load(router)
        gain = np.array([scorer.estimate(prompt).gain for prompt in rows.prompts])
        report = evaluate(
            gain,
            rows.weak,
            rows.strong,
            threshold=scorer.threshold,
            num_resamples=resamples,
            seed=seed,
        )
    except (RouterFileError, NoGapError) as error:
        raise typer.BadParameter(str(error)) from error
    typer.echo(_as_json(report) if as_json else _as_table(report, scorer.threshold))


def _read(path: Path) -> LabelledPrompts:
    root = os.environ.get(DATA_VARIABLE)
    if root and not path.is_absolute() and not path.exists():
        path = Path(root) / path
    try:
        return read_labelled_prompts(path)
    except RouterDataError as error:
        raise typer.BadParameter(str(error)) from error


def _as_json(report: RouterReport) -> str:
    """Figures at the top level; `<figure>_interval` is [low, high]."""
    flat: dict[str, object] = {}
    for name, value in asdict(report).items():
        if isinstance(value, dict):
            flat[name] = value["value"]
            flat[f"{name}_interval"] = [value["low"], value["high"]]
        else:
            flat[name] = value
    flat["best_single_accuracy"] = report.best_single_accuracy
    return json.dumps(flat, indent=2)


def _as_table(report: RouterReport, threshold: float) -> str:
    def figure(interval: Interval) -> str:
        return f"{interval.value:.3f} [{interval.low:.3f}, {interval.high:.3f}]"

    lines = [
        f"{report.num_prompts} prompts; intervals: bootstrap, 95 %",
        f"{'':12}{'this router':>24}{'random':>9}{'oracle':>9}",
        f"{'APGR':12}{figure(report.apgr):>24}{report.random_apgr:9.3f}{report.oracle_apgr:9.3f}",
        f"{'CPT(50%)':12}{figure(report.cpt50):>24}{report.random_cpt50:9.3f}{'':9}",
        f"{'CPT(80%)':12}{figure(report.cpt80):>24}{report.random_cpt80:9.3f}{'':9}",
        "",
        f"{'':28}{'accuracy':>10}{'large share':>13}",
        f"{'always small':28}{report.weak_accuracy:10.3f}{0:13.1%}",
        f"{'always large':28}{report.strong_accuracy:10.3f}{1:13.1%}",
        f"{'best single':28}{report.best_single_accuracy:10.3f}",
        f"{f'this router (at {threshold:.3f})':28}{report.threshold_accuracy:10.3f}"
        f"{report.threshold_strong_share:13.1%}",
        f"{'oracle':28}{report.oracle_accuracy:10.3f}{report.oracle_share:13.1%}",
    ]
    return "\n".join(lines)
