"""What the commands of `outrider draft` have in common: options, settings, errors."""

import contextlib
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.engine.errors import EngineError
from outrider.gateway.settings.extras import need_extra
from outrider.gateway.settings.public_models import fetch_advice, public_path
from outrider.gateway.settings.sections import is_local
from outrider.gateway.settings.tree import Settings, SettingsError, is_missing_folder, load_settings
from outrider.gateway.tools.commands.command_parts import DeviceOption, DtypeOption
from outrider.gateway.tools.commands.data_files import DATA_VARIABLE, found_data
from outrider.gateway.tools.commands.flags import Sets, setting_flags
from outrider.gateway.tools.commands.user_errors import user_errors
from outrider.gateway.wiring.checkpoints import checkpoint

if TYPE_CHECKING:
    from outrider.draft.training.tune import Traffic

OWN_HEAD = "mtp"
"""In the place of a path: the head in the large model's own checkpoint."""

LARGE_HELP = "Folder, GGUF file, public name or Hugging Face id of the large model."
LargeModel = Annotated[str, typer.Option(help=LARGE_HELP)]
PromptDataPath = Annotated[
    Path,
    typer.Option(
        help="JSONL or CSV with prompt, messages or text, or a .txt of a prompt a line. A relative "
        f"path is also looked up under ${DATA_VARIABLE}."
    ),
]
TrainingSeed = Annotated[int, typer.Option(help="Seed of weights, batches and sampled answers.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftEngineFlags:
    """The engine that runs the models."""

    config: Annotated[Path | None, typer.Option("--config", help="Settings file (engine).")] = None
    device: DeviceOption = None
    dtype: DtypeOption = None
    num_threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads."), Sets("engine.num_threads")
    ] = None

    def settings(self, flags: dict[str, Any]) -> Settings:
        """Return the settings of the file and these flags. Raises SettingsError.

        Training and measuring read checkpoints by their names alone, so no revision may be set.
        """
        settings = load_settings(config_file=self.config, flags=flags | setting_flags(self))
        if settings.models.has_revision:
            raise SettingsError(
                "the settings pin a model's revision, which outrider draft does not take: fetch it "
                "(hf download NAME --revision REVISION), and name the folder that this prints"
            )
        return settings


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficFlags:
    """The requests that drafting is measured with."""

    prompts: Annotated[int, typer.Option(min=1, help="How many prompts of the data.")] = 16
    concurrency: Annotated[int, typer.Option(min=1, help="Answers under way at once.")] = 1
    max_tokens: Annotated[int, typer.Option(min=1, help="Of an answer.")] = 128
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0
    seed: TrainingSeed = 0

    def of(self, data: Path, large: str) -> "Traffic":
        """Return prompts of the data as the large model reads them. Raises PromptDataError."""
        from transformers import AutoTokenizer

        from outrider.draft.training.prompt_file import read_prompts
        from outrider.draft.training.tune import sample_traffic
        from outrider.engine.model.read_config import read_model_config
        from outrider.verifier.params import SamplingParams

        model = read_model_config(large)
        return sample_traffic(
            read_prompts(found_data(data))[: self.prompts],
            AutoTokenizer.from_pretrained(large, trust_remote_code=False),
            SamplingParams(
                max_tokens=self.max_tokens,
                temperature=self.temperature,
                seed=self.seed,
                stop_token_ids=model.eos_token_ids,
            ),
            max_context=model.max_position_embeddings,
            concurrency=self.concurrency,
        )


def found_models(models: Iterable[str], data: Path) -> list[str]:
    """Return the folder or hub id that each name means: of a checkpoint, or for a GGUF file.

    Exit where one of them or the data are not there, before anything heavy is imported.
    """
    with user_errors(failed=(SettingsError, EngineError)):
        paths = [name if is_local(name) else public_path(name) for name in models]
        for path in paths:
            if is_missing_folder(path) and path != OWN_HEAD:
                raise SettingsError(
                    fetch_advice(path)
                    or f"{path}: no such folder. Name a folder with a checkpoint, a GGUF file, or "
                    "a Hugging Face id such as Qwen/Qwen3-0.6B."
                )
        if not found_data(data).is_file():
            raise SettingsError(f"{data}: no such file, nor under ${DATA_VARIABLE}. Name the data.")
        return [checkpoint(path) for path in paths]


@contextlib.contextmanager
def draft_errors(after_interruption: str) -> Iterator[None]:
    """Print errors that the user can fix, and exit."""
    from outrider.draft.training.distill import DistillError
    from outrider.draft.training.prompt_file import PromptDataError

    fixable = (DistillError, PromptDataError, EngineError, SettingsError)
    with user_errors(failed=fixable, interrupted=after_interruption):
        yield


def need(extra: str, purpose: str) -> None:
    """Exit with what to install where a package of an extra is missing."""
    with user_errors(failed=(SettingsError,)):
        need_extra(extra, purpose)


def quiet_transformers() -> None:
    """Its bars for loading and saving a handful of tensors would bury ours."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s %(message)s")


def say_stage() -> Any:
    """A progress callback that writes a line for each stage."""
    seen: set[str] = set()

    def report(stage: str, _: float) -> None:
        if stage not in seen:
            seen.add(stage)
            typer.echo(f"{stage} ...", err=True)

    return report


def speculating(settings: Settings, limits: dict[str, Any]) -> Settings:
    """Return the settings with these limits of trees."""
    speculation = settings.speculation.model_copy(update=limits)
    return settings.model_copy(update={"speculation": speculation})
