"""`outrider router collect`: run prompts through both tiers, check the answers, write labels."""

import asyncio
import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bars

from outrider.engine.errors import EngineError
from outrider.gateway.answering.text.chat import ChatTokenizer
from outrider.gateway.contract.errors.tree import GatewayError
from outrider.gateway.settings.tree import Settings, SettingsError, load_settings
from outrider.gateway.tools.commands.command_parts import (
    DeviceOption,
    DtypeOption,
    LargeRevision,
    QuantizeOption,
    SmallRevision,
)
from outrider.gateway.tools.commands.data_files import DATA_VARIABLE, found_data
from outrider.gateway.tools.commands.flags import Sets, setting_flags, takes_flags
from outrider.gateway.tools.commands.terminal import LoadingProgress, make_console
from outrider.gateway.tools.commands.user_errors import user_errors
from outrider.gateway.tools.learning.collect.checkers import CHECK_KINDS, AnswerCheckKind
from outrider.gateway.tools.learning.collect.collecting import (
    Collector,
    CollectPlan,
    CollectProgress,
)
from outrider.gateway.tools.learning.collect.data import (
    CollectError,
    CollectQuestion,
    LabelFile,
    read_questions,
)
from outrider.gateway.tools.learning.collect.judge import Judge, JudgeError
from outrider.gateway.wiring.chat_tokenizers import load_chat_tokenizer
from outrider.gateway.wiring.checkpoints import named_models
from outrider.verifier.params import Tier

_FIXABLE = (CollectError, JudgeError, EngineError, GatewayError, SettingsError, OSError)

COLLECT_HELP = """
Label prompts for a router: both models answer, a checker compares, rows are written.

A row of DATA has `prompt` or `messages`, `expected`, and `check` (or --check for all): exact (the
whole answer), regex (searched for in the last line), json (the last line's value), tool_call,
json_schema, or judge (a model behind an OpenAI-compatible URL). OUT is what `outrider router train`
reads; an interrupted run goes on where it was. Its seconds are from submission to the last token
with --batch questions under way at one model, so --batch 1 gives those that a lone client sees.
The small model's width counts too: label with --quantize as you serve, each width in a file of its
own.

[bold]Examples[/bold]

  outrider router collect --data questions.jsonl --out labels.jsonl --large ./large --small ./small

  outrider router collect --data questions.jsonl --out labels.jsonl --check judge
  --judge-url https://api.example.com/v1 --judge-model big --judge-key-env JUDGE_KEY
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectFlags:
    """Questions, the pair that answers them, and what judges the answers."""

    data: Annotated[
        Path,
        typer.Option(
            help="JSONL with prompt or messages, expected and check. A relative path is also "
            f"looked up under ${DATA_VARIABLE}."
        ),
    ]
    out: Annotated[
        Path, typer.Option(help="JSONL file for the labelled rows; an existing one is continued.")
    ]
    small: Annotated[
        str | None,
        typer.Option(help="Folder or Hugging Face id of the small model."),
        Sets("models.small"),
    ] = None
    large: Annotated[
        str | None,
        typer.Option(help="Folder or Hugging Face id of the large model."),
        Sets("models.large"),
    ] = None
    large_revision: LargeRevision = None
    small_revision: SmallRevision = None
    config: Annotated[Path | None, typer.Option("--config", help="Settings file.")] = None
    check: Annotated[
        str | None, typer.Option(help=f"Check of rows without one: {', '.join(CHECK_KINDS)}.")
    ] = None
    judge_url: Annotated[
        str | None, typer.Option(help="URL of the judge's API, as in https://…/v1.")
    ] = None
    judge_model: Annotated[str | None, typer.Option(help="The judge's model name.")] = None
    judge_key_env: Annotated[
        str | None, typer.Option(help="Environment variable that holds the judge's key.")
    ] = None
    max_tokens: Annotated[int, typer.Option(min=1, help="Of an answer.")] = 256
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first rows.")] = None
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0
    seed: Annotated[int, typer.Option(help="Seed of sampled answers.")] = 0
    batch: Annotated[int, typer.Option(min=1, max=512, help="Questions answered at a time.")] = 32
    device: DeviceOption = None
    dtype: DtypeOption = None
    quantize: QuantizeOption = None
    num_threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads."), Sets("engine.num_threads")
    ] = None


@takes_flags
def collect(flags: CollectFlags) -> None:
    """Label prompts with the answers of both models; the help is `COLLECT_HELP`."""
    with user_errors(failed=_FIXABLE, interrupted="run the same command again to continue"):
        settings = load_settings(config_file=flags.config, flags=setting_flags(flags))
        questions = read_questions(
            found_data(flags.data), default_check=_kind(flags.check), limit=flags.limit
        )
        plan = CollectPlan(
            max_tokens=flags.max_tokens,
            temperature=flags.temperature,
            seed=flags.seed,
            batch_size=flags.batch,
        )
        judge = _judge(flags.judge_url, flags.judge_model, flags.judge_key_env)
        done = asyncio.run(_run(settings, questions, flags.out, plan, judge))
    _say(done, flags.out)


async def _run(
    settings: Settings,
    questions: list[CollectQuestion],
    out: Path,
    plan: CollectPlan,
    judge: Judge | None,
) -> CollectProgress:
    """Load both models, and answer. Raises what loading and collecting raise."""
    from outrider.gateway.wiring.start import check_models

    check_models(settings)
    # These import torch, which takes seconds.
    from outrider.gateway.engines.backends.in_process import InProcessEngineClient
    from outrider.gateway.wiring import build as wiring

    console = make_console(stderr=True)
    with LoadingProgress(console) as loading:
        engine = InProcessEngineClient(
            lambda report: wiring.build_engine(settings, report), on_progress=loading.report
        )
        tokenizers = _tokenizers(settings)
        await engine.start()
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(engine.close)
        ask = (await stack.enter_async_context(judge)).is_right if judge else None
        info = await engine.info()
        collector = Collector(engine, info, tokenizers, plan, ask)
        labels = LabelFile(out, pair=collector.pair, small_weights=collector.small_weights)
        with _bars() as bars:
            task = bars.add_task("collecting", total=len(questions), right="")

            def show(progress: CollectProgress) -> None:
                bars.update(
                    task,
                    completed=progress.num_rows + progress.num_skipped,
                    right=f"small {progress.weak_accuracy:.1%}, large "
                    f"{progress.strong_accuracy:.1%} right",
                )

            return await collector.collect(questions, labels, show)


def _bars() -> Bars:
    console = make_console(stderr=True)
    return Bars(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[right]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )


def _tokenizers(settings: Settings) -> dict[Tier, ChatTokenizer]:
    """Raises CollectError for one that cannot be loaded."""
    tokenizers: dict[Tier, ChatTokenizer] = {}
    for tier, path in named_models(settings).items():
        try:
            tokenizers[tier] = load_chat_tokenizer(settings, tier, path)
        except (OSError, ValueError) as error:
            raise CollectError(f"{path}: the tokenizer cannot be loaded: {error}") from error
    return tokenizers


def _kind(name: str | None) -> AnswerCheckKind | None:
    for kind in CHECK_KINDS:
        if name == kind:
            return kind
    if name is None:
        return None
    raise CollectError(f"--check {name}: unknown; available: {', '.join(CHECK_KINDS)}")


def _judge(url: str | None, model: str | None, key_variable: str | None) -> Judge | None:
    if url is None and model is None:
        return None
    if url is None or model is None:
        raise CollectError("a judge needs both --judge-url and --judge-model")
    key = None
    if key_variable is not None:
        key = os.environ.get(key_variable)
        if not key:
            raise CollectError(f"--judge-key-env: the environment has no variable {key_variable}")
    return Judge(url=url, model=model, key=key)


def _say(done: CollectProgress, out: Path) -> None:
    typer.echo(
        f"{out}: {done.num_rows} rows; small {done.weak_accuracy:.1%} right, "
        f"large {done.strong_accuracy:.1%}"
    )
    if done.num_skipped:
        typer.echo(
            f"  {done.num_skipped} prompts were left out: longer than a model's context", err=True
        )
    if done.num_rows:
        typer.echo(f"Now: outrider router train --data {out} --out my-router")
