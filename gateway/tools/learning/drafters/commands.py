"""`outrider draft`: make a drafter for a large model, find its best settings, compare several."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.gateway.settings.tree import NONE, Settings, SettingsError
from outrider.gateway.tools.commands.data_files import found_data
from outrider.gateway.tools.commands.flags import takes_flags
from outrider.gateway.tools.learning.drafters.compare_command import COMPARE_HELP, compare
from outrider.gateway.tools.learning.drafters.drafter_tables import (
    print_head,
    print_training,
    print_tuning,
)
from outrider.gateway.tools.learning.drafters.shared import (
    DraftEngineFlags,
    LargeModel,
    PromptDataPath,
    TrafficFlags,
    TrainingSeed,
    draft_errors,
    found_models,
    need,
    quiet_transformers,
    say_stage,
    speculating,
)

if TYPE_CHECKING:
    from outrider.draft.training.tune import Limit, Traffic, TuneReport
    from outrider.engine.core import Engine
    from outrider.engine.passes.runner import ModelRunner

    LoadEngine = Callable[[], tuple[Engine, ModelRunner]]

app = typer.Typer(
    name="draft",
    help="Train a drafter for a large model, tune how it drafts, compare several.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    add_completion=False,
)

app.command(name="compare", help=COMPARE_HELP)(compare)

DEFAULT_OUT = "outrider-draft.toml"
_DEFAULT_STEPS = 1000
_DEFAULT_UNROLL = 7


class DrafterKind(StrEnum):
    """What `outrider draft train` makes."""

    small = "small"
    eagle3 = "eagle3"
    mtp = "mtp"


_TRAIN_HELP = """
Train a drafter for a large model: a small model, or a head that reads its hidden states.

The large model answers the prompts (or the data's answers are taken: --from-data), its next-token
distributions are stored, and the drafter learns them. --kind small (the default) is a Llama of its
own, which `outrider serve --small OUT` and transformers load. --kind eagle3 is one layer that reads
hidden states of three of the large model's layers, --kind mtp one of the large model's own kind
that reads the last (`--drafter OUT`); these are stored, too. All steps can be interrupted and go on
with --resume.

[bold]Examples[/bold]

  outrider draft train --large Qwen/Qwen3-8B --data prompts.jsonl --out my-drafter

  outrider draft train --large ./large --data chats.jsonl --out my-drafter --layers 2 --width 256
  --minutes 60

  outrider draft train --large ./large --small ./small --data prompts.txt --out better-small

  outrider draft train --kind eagle3 --large smollm2-135m --data prompts.jsonl --out my-head
  --draft-vocab 6000
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainFlags:
    """What is trained, on what, and for how long."""

    large: LargeModel
    data: PromptDataPath
    out: Annotated[Path, typer.Option(help="Folder for the drafter; made if it is missing.")]
    kind: Annotated[
        DrafterKind, typer.Option(help="A model of its own, or a head of the large model.")
    ] = DrafterKind.small
    draft_vocab: Annotated[
        int | None,
        typer.Option(min=1, help="eagle3: how many of the most frequent tokens it guesses."),
    ] = None
    unroll: Annotated[
        int | None, typer.Option(min=1, max=16, help="eagle3, mtp: levels that are trained; 7.")
    ] = None
    small: Annotated[
        str | None, typer.Option(help="Start from this checkpoint (same tokenizer).")
    ] = None
    layers: Annotated[
        int | None, typer.Option(min=1, help="Layers of a new drafter; a quarter of the large's.")
    ] = None
    width: Annotated[
        int | None, typer.Option(min=16, help="Hidden size of a new drafter; a quarter, too.")
    ] = None
    on_policy: Annotated[
        bool,
        typer.Option(
            "--on-policy/--from-data", help="Learn from the large model's answers or the data's."
        ),
    ] = True
    temperature: Annotated[
        float, typer.Option(min=0.0, help="Of the large model's answers; 0 is greedy.")
    ] = 0.0
    max_tokens: Annotated[int, typer.Option(min=1, help="Of an answer.")] = 256
    max_length: Annotated[int, typer.Option(min=2, help="Of prompt and answer together.")] = 1024
    steps: Annotated[
        int | None,
        typer.Option(min=1, help=f"Training steps; {_DEFAULT_STEPS} unless a time is given."),
    ] = None
    minutes: Annotated[
        float | None, typer.Option(min=0.01, help="Training time, without the answers.")
    ] = None
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences a step.")] = 16
    learning_rate: Annotated[
        float | None, typer.Option(min=1e-7, help="Peak; by default by size and start.")
    ] = None
    seed: TrainingSeed = 0
    resume: Annotated[bool, typer.Option("--resume", help="Resume the run in OUT.")] = False

    def check(self) -> None:
        """Raise BadParameter for options that another kind has."""
        is_small = self.kind is DrafterKind.small
        of_small = {"--small": self.small, "--layers": self.layers, "--width": self.width}
        of_heads = {"--draft-vocab": self.draft_vocab, "--unroll": self.unroll}
        given = [name for name, value in (of_heads if is_small else of_small).items() if value]
        if given:
            others = "--kind eagle3 and --kind mtp" if is_small else "--kind small"
            raise typer.BadParameter(
                f"{', '.join(given)}: for {others}; this is --kind {self.kind.value}. Leave it out."
            )

    def job(self, large: str) -> dict[str, Any]:
        """Return the job's fields that all kinds have; `large`: the folder or hub id."""
        from outrider.draft.training.distill import DistillPlan
        from outrider.draft.training.own_answers import AnswerPlan
        from outrider.engine.model.read_config import read_model_config

        is_open_ended = self.steps is None and self.minutes is None
        return {
            "large": large,
            "data": found_data(self.data),
            "out": self.out,
            "on_policy": self.on_policy,
            "answers": AnswerPlan(
                temperature=self.temperature,
                max_tokens=self.max_tokens,
                max_length=self.max_length,
                seed=self.seed,
                stop_token_ids=read_model_config(large).eos_token_ids,
            ),
            "distill": DistillPlan(
                steps=_DEFAULT_STEPS if is_open_ended else self.steps,
                minutes=self.minutes,
                batch_size=self.batch_size,
                learning_rate=self.learning_rate,
                seed=self.seed,
            ),
        }


@app.command(help=_TRAIN_HELP)
@takes_flags
def train(flags: TrainFlags, engine: DraftEngineFlags) -> None:
    """Train a drafter; the help is `_TRAIN_HELP`."""
    need("train", "Training a drafter")
    flags.check()
    large, *given = found_models(filter(None, (flags.large, flags.small)), flags.data)
    small = given[0] if given else None
    with draft_errors("go on with --resume"):
        from outrider.gateway.wiring import engine as engine_wiring
        from outrider.gateway.wiring import start as wiring

        settings = engine.settings({"models.large": large, "models.small": NONE})
        wiring.check_models(settings)
        if small is not None:
            wiring.check_models(engine.settings({"models.large": large, "models.small": small}))
        common = flags.job(large)

        def load() -> "tuple[Engine, ModelRunner]":
            runners = engine_wiring.load_runners(settings, say_stage())
            return engine_wiring.join(settings, runners, None), runners["large"]

        quiet_transformers()
        _train(flags, common, small, load, num_threads=engine.num_threads)


def _train(
    flags: TrainFlags,
    common: dict[str, Any],
    small: str | None,
    load: "LoadEngine",
    *,
    num_threads: int | None,
) -> None:
    """Train, and print what came of it."""
    if flags.kind is DrafterKind.small:
        from outrider.draft.training.drafter_job import DrafterJob, train_drafter

        job = DrafterJob(**common, small=small, num_layers=flags.layers, hidden_size=flags.width)
        report = train_drafter(job, load, resume=flags.resume, num_threads=num_threads)
        print_training(report, flags.out, flags.large)
        return
    from outrider.draft.training.head_job import HeadJob, train_head

    head_job = HeadJob(
        **common,
        kind="eagle3" if flags.kind is DrafterKind.eagle3 else "mtp",
        draft_vocab_size=flags.draft_vocab,
        unroll=flags.unroll or _DEFAULT_UNROLL,
    )
    head = train_head(head_job, load, resume=flags.resume, num_threads=num_threads)
    print_head(head, flags.out, flags.large)


_TUNE_HELP = """
Find the limits of the trees that give the most tokens per second here, on sample traffic.

[bold]Examples[/bold]

  outrider draft tune --large ./large --small my-drafter --data prompts.jsonl --plots plots

  outrider serve --large ./large --small my-drafter --config outrider-draft.toml
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneFlags:
    """The models, the data, and what is written."""

    large: LargeModel
    small: Annotated[str, typer.Option(help="Folder or Hugging Face id of the drafter.")]
    data: PromptDataPath
    out: Annotated[Path, typer.Option(help="Settings file to write.")] = Path(DEFAULT_OUT)
    plots: Annotated[Path | None, typer.Option(help="Folder for two PNG files.")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchFlags:
    """The limits to try."""

    rounds: Annotated[int, typer.Option(min=1, help="Rounds in which all values run.")] = 5
    depths: Annotated[str | None, typer.Option(help="Depths to try, as in 4,8,16.")] = None
    nodes: Annotated[str | None, typer.Option(help="Tree sizes to try.")] = None
    branching: Annotated[str | None, typer.Option(help="Alternatives to try.")] = None
    frontier: Annotated[str | None, typer.Option(help="Frontiers to try.")] = None
    allow_vocab_mismatch: Annotated[
        bool, typer.Option("--allow-vocab-mismatch", help="Draft across different tokenizers.")
    ] = False
    force: Annotated[bool, typer.Option("--force", help="Replace the settings file.")] = False

    def grid(self) -> "dict[Limit, tuple[int, ...]]":
        """Return the values of each limit. Raises SettingsError."""
        from outrider.draft.training.tune import DEFAULT_GRID

        given = {
            "max_draft_depth": self.depths,
            "max_draft_nodes": self.nodes,
            "max_branching": self.branching,
            "max_frontier": self.frontier,
        }
        return {limit: _values(given[limit], limit, DEFAULT_GRID[limit]) for limit in DEFAULT_GRID}


@app.command(help=_TUNE_HELP)
@takes_flags
def tune(
    flags: TuneFlags, traffic: TrafficFlags, search: SearchFlags, engine: DraftEngineFlags
) -> None:
    """Measure and choose; the help is `_TUNE_HELP`."""
    out = flags.out
    if flags.plots is not None:
        need("bench", "--plots")
    if out.exists() and not search.force:
        raise typer.BadParameter(f"{out} exists already; name another with --out, or --force")
    large, small = found_models((flags.large, flags.small), flags.data)
    with draft_errors("nothing was written"):
        from outrider.draft.training.tune import speculation_toml
        from outrider.gateway.wiring import start as wiring

        grid = search.grid()
        settings = engine.settings(
            {
                "models.large": large,
                "models.small": small,
                "speculation.enabled": True,
                "speculation.adaptive": True,
                "speculation.allow_vocab_mismatch": search.allow_vocab_mismatch or None,
            }
        )
        wiring.check_models(settings)
        quiet_transformers()
        asked = traffic.of(flags.data, large)
        report = _tune(settings, asked, grid, search.rounds)
        conditions = (
            f"large {Path(large).name}, small {Path(small).name}, {len(asked.prompts)} prompts "
            f"of {flags.data.name}, concurrency {traffic.concurrency}, "
            f"temperature {traffic.temperature:g}, {search.rounds} rounds"
        )
        out.write_text(speculation_toml(report, conditions=conditions), encoding="utf-8")
    print_tuning(report)
    typer.echo(f"Wrote {out}: outrider serve --large ... --small ... --config {out}")
    if flags.plots is not None:
        from outrider.gateway.tools.learning.drafters.charts import draw_plots

        for path in draw_plots(report, flags.plots):
            typer.echo(f"Drew {path}")


def _tune(
    settings: Settings, traffic: "Traffic", grid: "dict[Limit, tuple[int, ...]]", rounds: int
) -> "TuneReport":
    from rich.progress import Progress

    from outrider.draft.training.tune import DraftLimits, Tuner
    from outrider.gateway.tools.commands.terminal import make_console
    from outrider.gateway.wiring import engine as engine_wiring
    from outrider.gateway.wiring.drafter import measure_budget

    runners = engine_wiring.load_runners(settings, say_stage())
    budget = measure_budget(settings, runners, say_stage())

    def build(choice: DraftLimits) -> "Engine":
        chosen = speculating(settings, asdict(choice))
        return engine_wiring.join(chosen, runners, budget if choice.adaptive else None)

    console, said = make_console(stderr=True), set[str]()
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task("measuring", total=None)

        def on_run(done: int, total: int, label: str) -> None:
            bars.update(task, completed=done, total=total, description=label)
            if not console.is_terminal and label not in said:  # a log gets a line a round
                said.add(label)
                typer.echo(f"{label} ...", err=True)

        tuner = Tuner(build=build, runners=runners, traffic=traffic, rounds=rounds, on_run=on_run)
        in_use = {one.name: getattr(settings.speculation, one.name) for one in fields(DraftLimits)}
        return tuner.tune(grid, start=DraftLimits(**in_use))


def _values(text: str | None, limit: "Limit", default: tuple[int, ...]) -> tuple[int, ...]:
    """`4,8,16` as numbers. Raises SettingsError for anything else and what no tree can have."""
    from outrider.draft.config import DraftConfig

    if text is None:
        return default
    try:
        values = tuple(dict.fromkeys(int(part) for part in text.split(",")))
        for value in values:
            fields: dict[str, Any] = {limit: value}
            DraftConfig(**fields)
    except ValueError as error:
        raise SettingsError(f"{text!r} is not a list of values for {limit}: {error}") from None
    if min(values) < 1:
        raise SettingsError(f"{text!r}: 0 means no drafting, which is measured anyway")
    return values
