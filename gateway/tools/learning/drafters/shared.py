"""What the commands of `outrider draft` have in common: options, settings, errors."""

import contextlib
import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.engine.errors import EngineError
from outrider.gateway.settings.extras import need_extra
from outrider.gateway.settings.tree import Settings, SettingsError, is_missing_folder, load_settings
from outrider.gateway.tools.commands.user_errors import user_errors

DATA_VARIABLE = "OUTRIDER_DATA"
OWN_HEAD = "mtp"
"""In the place of a path: the head in the large model's own checkpoint."""

LargeModel = Annotated[str, typer.Option(help="Folder or Hugging Face id of the large model.")]
PromptDataPath = Annotated[
    Path,
    typer.Option(
        help="JSONL or CSV with prompt, messages or text, or a .txt of a prompt a line. A relative "
        f"path is also looked up under ${DATA_VARIABLE}."
    ),
]
EngineConfigFile = Annotated[Path | None, typer.Option("--config", help="Settings file (engine).")]
EngineThreads = Annotated[int | None, typer.Option(min=1, help="CPU threads.")]
TrainingSeed = Annotated[int, typer.Option(help="Seed of weights, batches and sampled answers.")]


def refuse_missing(models: Iterable[str | None], data: Path) -> None:
    """Exit where a model's folder or the data are not there, before anything heavy is imported."""
    with user_errors(failed=(SettingsError,)):
        for model in models:
            if model is not None and is_missing_folder(model) and model != OWN_HEAD:
                raise SettingsError(
                    f"{model}: no such folder. Name a folder with a checkpoint, or a Hugging Face "
                    "id such as Qwen/Qwen3-0.6B."
                )
        if not found_data(data).is_file():
            raise SettingsError(f"{data}: no such file, nor under ${DATA_VARIABLE}. Name the data.")


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


def draft_settings(config: Path | None, flags: dict[str, Any]) -> Settings:
    """Return the settings of a file and these flags. Raises SettingsError.

    Training and measuring read checkpoints by their names alone, so no revision may be set.
    """
    settings = load_settings(config_file=config, flags=flags)
    if settings.models.has_revision:
        raise SettingsError(
            "the settings pin a model's revision, which outrider draft does not take: fetch it "
            "(hf download NAME --revision REVISION), and name the folder that this prints"
        )
    return settings


def found_data(path: Path) -> Path:
    """Return a path, below $OUTRIDER_DATA where there is no such file here."""
    root = os.environ.get(DATA_VARIABLE)
    if root and not path.is_absolute() and not path.exists():
        return Path(root) / path
    return path


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
