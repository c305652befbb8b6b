"""`outrider draft compare`: several drafters of a large model side by side."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.gateway.settings.tree import NONE, Settings
from outrider.gateway.tools.commands.command import DeviceOption, DtypeOption
from outrider.gateway.tools.learning.drafters.shared import (
    OWN_HEAD,
    EngineConfigFile,
    EngineThreads,
    PromptDataPath,
    TrainingSeed,
    draft_errors,
    draft_settings,
    found_data,
    need,
    quiet_transformers,
    refuse_missing,
    say_stage,
)
from outrider.gateway.tools.learning.drafters.tables import print_comparison

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


def compare(  # noqa: PLR0913 - a flag each
    large: Annotated[str, typer.Argument(help="Folder or Hugging Face id of the large model.")],
    drafter: Annotated[
        list[str], typer.Option(help="A small model, a head, or mtp; again for each drafter.")
    ],
    data: PromptDataPath,
    plot: Annotated[
        Path | None, typer.Option(help="Picture to draw; its name ends in .png or .svg.")
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, help="How many prompts of the data.")] = 16,
    concurrency: Annotated[int, typer.Option(min=1, help="Answers under way at once.")] = 1,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of an answer.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    depth: Annotated[int, typer.Option(min=1, max=16, help="Of the chains.")] = 7,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds that are measured.")] = 3,
    seed: TrainingSeed = 0,
    config: EngineConfigFile = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    num_threads: EngineThreads = None,
) -> None:
    """Measure drafters side by side; the help is `COMPARE_HELP`."""
    if plot is not None:
        if plot.suffix not in (".png", ".svg"):
            raise typer.BadParameter(f"--plot {plot}: the name must end in .png or .svg")
        need("bench", "--plot")
    if len(set(drafter)) < len(drafter):
        raise typer.BadParameter("a --drafter is named twice; name each once")
    refuse_missing((large, *drafter), data)
    with draft_errors("nothing was written"):
        from outrider.gateway.wiring import start as wiring

        flags = {
            "models.large": large,
            "engine.device": device,
            "engine.dtype": dtype,
            "engine.num_threads": num_threads,
            "speculation.enabled": True,
            "speculation.adaptive": True,
        }
        chosen = {path: draft_settings(config, flags | _drafter_flags(path)) for path in drafter}
        for settings in chosen.values():
            wiring.check_models(settings)
        quiet_transformers()
        traffic = _traffic(
            large,
            found_data(data),
            num_prompts=prompts,
            concurrency=concurrency,
            sampling={"max_tokens": max_tokens, "temperature": temperature, "seed": seed},
        )
        found = [
            _measure(path, settings, traffic, rounds=rounds, depth=depth)
            for path, settings in chosen.items()
        ]
    print_comparison(found)
    if plot is not None:
        from outrider.gateway.tools.learning.drafters.plots import draw_comparison

        typer.echo(f"Drew {draw_comparison(found, plot)}")


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


def _traffic(
    large: str, data: Path, *, num_prompts: int, concurrency: int, sampling: dict[str, Any]
) -> "Traffic":
    from transformers import AutoTokenizer

    from outrider.draft.training.prompt_file import read_prompts
    from outrider.draft.training.tune import sample_traffic
    from outrider.engine.model.read_config import read_model_config
    from outrider.verifier.params import SamplingParams

    model = read_model_config(large)
    return sample_traffic(
        read_prompts(data)[:num_prompts],
        AutoTokenizer.from_pretrained(large, trust_remote_code=False),
        SamplingParams(**sampling, stop_token_ids=model.eos_token_ids),
        max_context=model.max_position_embeddings,
        concurrency=concurrency,
    )


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
        limits: dict[str, Any] = {}
        if not choice.adaptive:
            limits = {
                "adaptive": False,
                "max_draft_nodes": choice.max_draft_nodes,
                "max_draft_depth": choice.max_draft_depth,
                "max_branching": choice.max_branching,
                "max_frontier": choice.max_frontier,
                "sources": ("model",) if head is None else ("head",),
            }
        speculation = settings.speculation.model_copy(update=limits)
        chosen = settings.model_copy(update={"speculation": speculation})
        return engine_wiring.join(chosen, runners, budget if choice.adaptive else None)

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
