"""Terminal output: progress, the start-up banner, coloured tokens."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final, Self

from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from outrider.engine.events import EngineInfo
from outrider.engine.model.checkpoint_files import hub_commit
from outrider.gateway.settings.tiers import UpstreamSettings

_WIDEST: Final = 1000
DRAFTED_STYLE = "bold green"
"""Tokens that the small model guessed and the large one confirmed."""


def make_console(*, stderr: bool = False) -> Console:
    """A console that leaves numbers and brackets in answers alone."""
    return Console(stderr=stderr, highlight=False)


def print_whole(console: Console, table: Table) -> None:
    """Print a table at its full width: a narrow terminal wraps its lines and cuts no figure."""
    options = console.options.update(max_width=_WIDEST)
    console.width = max(console.width, Measurement.get(console, options, table).maximum)
    console.print(table)


class LoadingProgress:
    """A progress line while models load: a bar in a terminal, else one line for each stage."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._seen: set[str] = set()
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("starting the engine", total=1.0)

    def __enter__(self) -> Self:
        """Show it."""
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Take it away."""
        self.stop()

    def report(self, stage: str, fraction: float) -> None:
        """Show the current stage and the completed fraction in [0, 1]."""
        self._progress.update(self._task, description=stage, completed=fraction)
        if not self._console.is_terminal and stage not in self._seen:
            self._seen.add(stage)
            self._console.print(f"{stage} ...")

    def stop(self) -> None:
        """Take the bar away; may be called again."""
        self._progress.stop()


def print_banner(
    console: Console,
    url: str,
    info: EngineInfo,
    tiers: Mapping[str, UpstreamSettings] = MappingProxyType({}),
    routing: str = "",
    names: Iterable[str] = (),
    notes: Iterable[str] = (),
) -> None:
    """Print the gateway's address, its tiers, how one is chosen, and a command to try it.

    `names`: further names of models, of aliases and adapters. `notes`: further lines.
    """
    console.print(f"[bold]Outrider is ready on {url}[/bold]", soft_wrap=True)
    _print_tiers(console, info)
    for name, upstream in tiers.items():
        where = ", ".join(upstream.url)
        if upstream.model_on_demand is not None:
            where = f"{upstream.on_demand.checkpoint}, loaded on demand"
        label = f"{upstream.model} at " if upstream.model else ""
        console.print(
            f"  {name:<6} {escape(label + where)} "
            f"({upstream.server}{', on this device' if upstream.local else ''})",
            soft_wrap=True,
        )
    _print_speculation(console, info)
    if routing:
        console.print(f"  routing {escape(routing)}", soft_wrap=True)
    for note in notes:
        console.print(f"  {escape(note)}", soft_wrap=True)
    models = ", ".join(["auto", *info.tiers, *tiers, *names])
    body = '{"model": "auto", "messages": [{"role": "user", "content": "What is 17 + 25?"}]}'
    console.print(f"Models: {escape(models)}. Try it:", soft_wrap=True)
    console.print(
        f"  curl {url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'",
        soft_wrap=True,
        markup=False,
    )
    console.print(f'  outrider chat --url {url} "What is 17 + 25?"', soft_wrap=True)


def print_engine_banner(console: Console, endpoint: str, info: EngineInfo, key: str | None) -> None:
    """Print an engine's address, its tiers, and a command that starts a gateway to it."""
    console.print(f"[bold]An engine of Outrider is ready on {endpoint}[/bold]", soft_wrap=True)
    _print_tiers(console, info)
    _print_speculation(console, info)
    named = "" if key is None else f" --engine-key {key}"
    console.print("Gateways need the same models' names, for their tokenizers:", soft_wrap=True)
    console.print(f"  outrider serve --engines {endpoint}{named}", soft_wrap=True, markup=False)


def _print_tiers(console: Console, info: EngineInfo) -> None:
    for tier, model in info.tiers.items():
        millions = model.num_parameters / 1e6
        commit = hub_commit(model.path)
        name = model.model_id if commit is None else f"{model.model_id} (commit {commit[:12]})"
        console.print(
            f"  {tier:<6} {escape(name)}  {millions:,.1f} M parameters, "
            f"{model.scheme} on {model.device}"
            f"{', deterministic' if model.deterministic else ''}, context {model.max_context}",
            soft_wrap=True,
        )


def _print_speculation(console: Console, info: EngineInfo) -> None:
    if info.tiers:
        named = " or ".join(info.drafters) or "text alone"
        drafts = f"on: {named} drafts for large" if info.speculation else "off"
        console.print(f"  speculation {drafts}", soft_wrap=True)


def token_text(text: str, *, was_drafted: bool) -> Text:
    """A token in the colour that says whether it was drafted."""
    return Text(text, style=DRAFTED_STYLE if was_drafted else "")


def print_check(console: Console, status: str, name: str, detail: str, advice: str) -> None:
    """Print a line of `outrider doctor`, and below it what to do."""
    mark, style = {"ok": ("✓", "green"), "warning": ("!", "yellow")}.get(status, ("✗", "red"))
    console.print(Text.assemble((mark, style), f" {name:<12} {detail}"), soft_wrap=True)
    if advice:
        console.print(Text(f"  {'':<12} {advice}", style=style), soft_wrap=True)
