"""Parts that the commands of `outrider router` share: options, reading, judging, errors."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.gateway.settings.routing import TierPriceSettings
from outrider.gateway.settings.tree import SettingsError, load_settings
from outrider.gateway.tools.commands.data_files import DATA_VARIABLE, found_data
from outrider.gateway.tools.commands.terminal import make_console
from outrider.gateway.tools.commands.user_errors import user_errors
from outrider.router.calibration import CalibrationError, CalibrationTarget, Prices, StageRows
from outrider.router.costs import TokenPrices
from outrider.router.dataset import LabelledPrompts, RouterDataError, read_labelled_prompts
from outrider.router.encoder.bert import EncoderError
from outrider.router.encoder.sentence import SentenceEncoder, encoder_for
from outrider.router.evaluation import NoGapError, RouterReport, evaluate
from outrider.router.label_checks import label_complaints
from outrider.router.scorer import RouterFileError, RouterScorer
from outrider.router.stages import stage_rows
from outrider.router.tier_labels import TierTerms, terms_of

DATA_HELP = (
    "CSV or JSONL with prompt, weak_correct and strong_correct (0 or 1), or what `outrider router "
    f"collect` wrote. A relative path is also looked up under ${DATA_VARIABLE}."
)

LabelledDataPath = Annotated[Path, typer.Option(help=DATA_HELP)]
Router = Annotated[Path, typer.Option(help="Folder that `outrider router train` wrote.")]
JsonFlag = Annotated[bool, typer.Option("--json", help="One JSON object.")]
Strict = Annotated[
    bool,
    typer.Option(
        "--strict",
        help="Refuse data with prompts that the router was trained on, or of another pair.",
    ),
]
TrustLabels = Annotated[
    bool,
    typer.Option(
        "--trust-labels",
        help="Use labels that look wrong: the small model beats the large one, or is right less "
        "often where it is surer.",
    ),
]
HoldBackOption = Annotated[
    int, typer.Option(min=1, help="Tokens of an answer that are judged, as with streaming.")
]

EncoderOption = Annotated[
    str | None,
    typer.Option(help="Where the router's sentence encoder is, if not where it was trained."),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceFlags:
    """What tokens of both models cost."""

    small_price: Annotated[
        str | None,
        typer.Option(help="USD per million tokens, prompt/answer, as in 0.05/0.2."),
    ] = None
    large_price: Annotated[str | None, typer.Option(help="The same for the large model.")] = None
    config: Annotated[
        Path | None, typer.Option("--config", help="Settings file with routing.prices.")
    ] = None

    def prices(self) -> Prices | None:
        """Return prices from the two flags, else from the settings; None where neither names any.

        Raises CalibrationError for what is no pair of prices, SettingsError for bad settings.
        """
        small, large = self.small_price, self.large_price
        if small is not None and large is not None:
            return {
                "small": _price(small, "--small-price"),
                "large": _price(large, "--large-price"),
            }
        if small is not None or large is not None:
            raise CalibrationError("give both --small-price and --large-price, or neither")
        known = load_settings(config_file=self.config).routing.prices
        if not known.is_known:
            return None
        return {"small": _known_price(known.small), "large": _known_price(known.large)}


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetFlags:
    """What a threshold shall reach."""

    strong_share: Annotated[
        float | None,
        typer.Option(help="Target: at most this share is answered by the large model."),
    ] = None
    quality: Annotated[
        float | None,
        typer.Option(help="Target: at least this share of the large model's accuracy, cheaply."),
    ] = None
    max_cost: Annotated[
        float | None, typer.Option(help="Target: largest mean cost of a request, in USD.")
    ] = None
    max_seconds: Annotated[
        float | None, typer.Option(help="Target: largest mean time of a request, in seconds.")
    ] = None

    def target(
        self, prices: Prices | None, recovered_gap: float | None = None
    ) -> CalibrationTarget:
        """Return the one target that was named. Raises CalibrationError for none or several."""
        named = {
            "--strong-share": self.strong_share,
            "--quality": self.quality,
            "--max-cost": self.max_cost,
            "--max-seconds": self.max_seconds,
        }
        given = [name for name, value in named.items() if value is not None]
        if len(given) > 1 or (not given and recovered_gap is None):
            raise CalibrationError(
                f"give one of {', '.join(named)}, not {' and '.join(given) or 'none'}"
            )
        if self.max_cost is not None and prices is None:
            raise CalibrationError(
                "--max-cost needs prices: give --small-price and --large-price, as in 0.05/0.2 "
                "(USD per million tokens of prompt/answer), or set routing.prices"
            )
        return CalibrationTarget(
            recovered_gap=None if given else recovered_gap,
            strong_share=self.strong_share,
            quality=self.quality,
            max_cost_usd=self.max_cost,
            max_seconds=self.max_seconds,
            prices=prices,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeFlags:
    """How a router is judged."""

    strict: Strict = False
    hold_back_tokens: HoldBackOption = 16
    whole_answers: Annotated[
        bool, typer.Option("--whole-answers", help="Judge whole answers, as without streaming.")
    ] = False
    encoder: EncoderOption = None
    resamples: Annotated[int, typer.Option(min=0, help="Bootstrap resamples.")] = 1000
    seed: Annotated[int, typer.Option(help="Seed of the bootstrap.")] = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RouterEvaluation:
    """A router on labelled prompts: what went in, what came out, what to be wary of.

    `num_known`: prompts that the router was trained on.
    """

    router: Path
    data_path: Path
    scorer: RouterScorer
    data: LabelledPrompts
    rows: StageRows
    report: RouterReport
    num_known: int
    notes: tuple[str, ...]


def router_errors() -> AbstractContextManager[None]:
    """Print errors that the user can fix, and exit with status 2."""
    return user_errors(
        usage=(
            RouterDataError,
            RouterFileError,
            EncoderError,
            NoGapError,
            CalibrationError,
            SettingsError,
            OSError,
        )
    )


def read_data(path: Path, tiers: Sequence[TierTerms] = ()) -> LabelledPrompts:
    """The labelled prompts, looked up under $OUTRIDER_DATA too; raises RouterDataError."""
    return read_labelled_prompts(found_data(path), tiers)


def read_for(scorer: RouterScorer, path: Path) -> LabelledPrompts:
    """The same, with labels of the router's tiers; raises RouterDataError."""
    data = read_data(path, () if scorer.tiers is None else terms_of(scorer.tiers))
    if data.strong is None and data.tiers is None:
        raise RouterDataError(
            f"{path} has no strong_correct: what the large model adds needs both tiers' labels"
        )
    return data


def check_labels(data: LabelledPrompts, path: Path, *, are_trusted: bool) -> None:
    """Say what looks wrong with labels; raises RouterDataError unless they are trusted."""
    complaints = label_complaints(data)
    if complaints and not are_trusted:
        raise RouterDataError(f"{path}: {'; '.join(complaints)} (--trust-labels uses them anyway)")
    for complaint in complaints:
        typer.echo(f"note: {complaint}", err=True)


def _known_price(prices: TierPriceSettings) -> TokenPrices:
    return TokenPrices(
        prompt=prices.prompt, cached_prompt=prices.cached, completion=prices.completion
    )


def _price(text: str, flag: str) -> TokenPrices:
    try:
        prompt, completion = (float(part) for part in text.split("/"))
        if not 0.0 <= min(prompt, completion) <= max(prompt, completion) < float("inf"):
            raise ValueError(text)
    except ValueError:
        raise CalibrationError(
            f"{flag} is {text!r}; it must be two prices, prompt/answer, as in 0.05/0.2"
        ) from None
    return TokenPrices(prompt=prompt, cached_prompt=prompt, completion=completion)


def wary_notes(
    scorer: RouterScorer, data: LabelledPrompts, *, strict: bool
) -> tuple[int, list[str]]:
    """Return the number of prompts that the router was trained on, and caveats of the figures.

    Raises RouterDataError for known prompts and another pair if `strict`.
    """
    notes = []
    known = scorer.was_trained_on(data.prompts)
    num_known = int(known.sum())
    if num_known:
        first = data.prompts[int(known.argmax())].strip().replace("\n", " ")
        notes.append(
            f"{num_known} of {len(data.prompts)} prompts were in the router's training data, which "
            f'flatters it; the first one is "{first[:60]}{"..." if len(first) > 60 else ""}"'
        )
    if scorer.pair and data.pair and scorer.pair != data.pair:
        notes.append(
            f"the router was trained for the pair {scorer.pair}, the data are of {data.pair}"
        )
    if notes and strict:
        raise RouterDataError(f"{'; '.join(notes)} (refused because of --strict)")
    missing = [
        column
        for column, stage, values in (
            ("hidden_state", scorer.probe, data.hidden),
            ("weak_logprobs", scorer.answer, data.logprobs),
        )
        if stage is not None and values is None
    ]
    if missing:
        notes.append(
            f"the data have no {' and no '.join(missing)}, so eval and calibrate cannot judge "
            "the stages that need them"
        )
    if data.num_duplicates:
        notes.append(f"{data.num_duplicates} rows repeat a prompt of another row")
    return num_known, notes


def judge(router: Path, data_path: Path, how: JudgeFlags) -> RouterEvaluation:
    """Read, estimate, evaluate; notes go to the terminal. Raises the errors of `router_errors`."""
    scorer = RouterScorer.load(router)
    data = read_for(scorer, data_path)
    data = with_embeddings(scorer, data, how.encoder)
    num_known, notes = wary_notes(scorer, data, strict=how.strict)
    rows = estimate_rows(scorer, data, None if how.whole_answers else how.hold_back_tokens)
    chosen = None if scorer.calibration is None else scorer.calibration.chosen
    report = evaluate(
        rows,
        threshold=scorer.threshold,
        band=None if chosen is None else chosen.band,
        num_resamples=how.resamples,
        seed=how.seed,
        track=_track,
    )
    for note in notes:
        typer.echo(f"note: {note}", err=True)
    return RouterEvaluation(
        router=router,
        data_path=data_path,
        scorer=scorer,
        data=data,
        rows=rows,
        report=report,
        num_known=num_known,
        notes=tuple(notes),
    )


def with_embeddings(
    scorer: RouterScorer, data: LabelledPrompts, source: str | None
) -> LabelledPrompts:
    """Return the data as the router's encoder sees them too; raises EncoderError."""
    if scorer.encoder is None:
        return data
    return embedded(data, encoder_for(scorer.encoder.config.id, source))


def embedded(data: LabelledPrompts, encoder: SentenceEncoder) -> LabelledPrompts:
    """Return the data with the prompts' embeddings."""
    console = make_console(stderr=True)
    with console.status(f"embedding {len(data.prompts):,} prompts"):
        return replace(data, embeddings=encoder.embed_all(data.prompts))


def estimate_rows(
    scorer: RouterScorer, data: LabelledPrompts, hold_back_tokens: int | None
) -> StageRows:
    """`stage_rows` with a word in the terminal that something is being done."""
    console = make_console(stderr=True)
    with console.status(f"judging {len(data.prompts):,} prompts"):
        return stage_rows(scorer, data, hold_back_tokens=hold_back_tokens)


def _track(resamples: range) -> Iterable[int]:
    from rich.progress import track

    console: Any = make_console(stderr=True)
    return track(
        resamples,
        description="resampling",
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
