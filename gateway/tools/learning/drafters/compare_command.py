"""`outrider draft compare`: several drafters of a large model side by side."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.gateway.settings.tree import NONE, Settings
from outrider.gateway.tools.commands.flags import takes_flags
from outrider.gateway.tools.learning.drafters.drafter_tables import print_comparison
from outrider.gateway.tools.learning.drafters.shared import (
    LARGE_HELP,
    OWN_HEAD,
    DraftEngineFlags,
    PromptDataPath,
    TrafficFlags,
    draft_errors,
    found_models,
    need,
    quiet_transformers,
    say_stage,
    speculating,
)

if TYPE_CHECKING:
    from outrider.draft.training.compare import Compared
    from outrider.draft.training.tune import DraftLimits, Traffic
    from outrider.engine.core import Engine


COMPARE_HELP = """
Compare drafters of a large model: acceptance by depth, milliseconds a level, tokens per second.

A drafter is a small model with the same tokenizer, a folder of an EAGLE-3, P-EAGLE or DFlash head,
or mtp for the head in the large model's own checkpoint. Each is run on the same prompts in turn
with plain decoding: as chains of first choices, which show how deep it is right, and as trees sized
by cost, as `outrider serve` drafts. Use it on a quiet machine.

[bold]Examples[/bold]

  outrider draft compare ./large --drafter ./small --drafter my-head --data prompts.jsonl

  outrider draft compare ./large --drafter my-head --drafter mtp --data prompts.jsonl
  --concurrency 8 --plot drafters.svg
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareFlags:
    """The models, the data, and where the picture goes."""

    large: Annotated[str, typer.Argument(help=LARGE_HELP)]
    drafter: Annotated[
        list[str], typer.Option(help="A small model, a head, or mtp; again for each drafter.")
    ]
    data: PromptDataPath
    plot: Annotated[
        Path | None,
        typer.Option(help="Picture to draw, .png or .svg; .html: a page with the table, too."),
    ] = None

    def check(self) -> None:
        """Refuse what cannot be compared or drawn, before anything heavy is imported."""
        if self.plot is not None:
            if self.plot.suffix not in (".png", ".svg", ".html"):
                raise typer.BadParameter(
                    f"--plot {self.plot}: the name must end in .png, .svg or .html"
                )
            if self.plot.suffix == ".png":
                need("bench", "--plot")
        if len(set(self.drafter)) < len(self.drafter):
            raise typer.BadParameter("a --drafter is named twice; name each once")


@takes_flags
def compare(
    flags: CompareFlags,
    traffic: TrafficFlags,
    depth: Annotated[int, typer.Option(min=1, max=16, help="Of the chains.")] = 7,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds that are measured.")] = 3,
    *,
    engine: DraftEngineFlags,
) -> None:
    """Measure drafters side by side; the help is `COMPARE_HELP`."""
    flags.check()
    large, *drafters = found_models((flags.large, *flags.drafter), flags.data)
    with draft_errors("nothing was written"):
        from outrider.gateway.wiring import start as wiring

        given = {
            "models.large": large,
            "speculation.enabled": True,
            "speculation.adaptive": True,
        }
        chosen = {path: engine.settings(given | _drafter_flags(path)) for path in drafters}
        for settings in chosen.values():
            wiring.check_models(settings)
        quiet_transformers()
        asked = traffic.of(flags.data, large)
        found = [
            _measure(path, settings, asked, rounds=rounds, depth=depth)
            for path, settings in chosen.items()
        ]
    print_comparison(found)
    if flags.plot is not None:
        from outrider.gateway.tools.learning.drafters.charts import draw_comparison

        typer.echo(f"Drew {draw_comparison(found, flags.plot)}")


def _drafter_flags(path: str) -> dict[str, Any]:
    """The settings that make a path a drafter: a small model's or a head's."""
    if _is_head(path):
        return {"models.small": NONE, "models.drafter": path}
    return {"models.small": path}


def _is_head(path: str) -> bool:
    """True for a drafter that reads the large model's hidden states."""
    from outrider.draft.heads.head_config import is_head
    from outrider.engine.model.weights import resolve_checkpoint

    return path == OWN_HEAD or is_head(resolve_checkpoint(path))


def _measure(
    path: str, settings: Settings, traffic: "Traffic", *, rounds: int, depth: int
) -> "Compared":
    """Load the large model with one drafter, measure, and let both go."""
    from outrider.draft.training.compare import measure_drafter
    from outrider.gateway.wiring import engine as engine_wiring
    from outrider.gateway.wiring.drafter import head_of, measure_budget
    from outrider.verifier.params import Tier

    typer.echo(f"{path} ...", err=True)
    runners = engine_wiring.load_runners(settings, say_stage())
    budget = measure_budget(settings, runners, say_stage())
    head = head_of(runners)
    drafting = runners["small"] if head is None else head.runner
    asked: dict[Tier, Any] = {"large": runners["large"], "small": drafting}

    def build(choice: "DraftLimits") -> "Engine":
        if choice.adaptive:
            return engine_wiring.join(settings, runners, budget)
        source = "model" if head is None else "head"
        chosen = speculating(settings, {**asdict(choice), "sources": (source,)})
        return engine_wiring.join(chosen, runners, None)

    return measure_drafter(
        Path(path).name,
        kind="small" if head is None else head.model.kind,
        build=build,
        runners=asked,
        traffic=traffic,
        rounds=rounds,
        depth=depth,
        on_run=lambda label: typer.echo(f"{label} ...", err=True),
    )
