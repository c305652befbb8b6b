"""Each tier's tokenizer and chat template, and the checkpoint's own sampling parameters."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from outrider.engine.model.checkpoint_files import sampling_defaults
from outrider.gateway.settings.tree import Settings, SettingsError
from outrider.verifier.params import Tier

if TYPE_CHECKING:
    from outrider.gateway.answering.text.chat import ChatTokenizer


def load_chat_tokenizer(settings: Settings, tier: Tier, path: str) -> "ChatTokenizer":
    """Load the tokenizer of a tier's checkpoint, a folder or hub id.

    Raises SettingsError for the template, and as `ChatTokenizer.load` does.
    """
    from outrider.gateway.answering.text.chat import ChatTokenizer

    wanted = settings.models.tool_format
    return ChatTokenizer.load(
        path, None if wanted == "auto" else wanted, template=chat_template(settings, tier)
    )


def checkpoint_defaults(settings: Settings, models: Mapping[Tier, str]) -> dict[str, float]:
    """Return the sampling parameters of requests that set none: those of the large model, if any.

    One set for both tiers, so that an escalated answer is the one of the large model alone.
    """
    if settings.models.generation_config == "none" or not models:
        return {}
    return sampling_defaults(models.get("large") or models["small"])


def chat_template(settings: Settings, tier: Tier) -> str | None:
    """Read the chat template that the settings name for a tier; None for the checkpoint's own.

    Raises SettingsError for a file that cannot be read, and for one that is no template.
    """
    file = settings.models.template_file(tier)
    if file is None:
        return None
    where = f"models.chat_template = {str(file)!r} (--chat-template)"
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise SettingsError(
            f"{where}: no such file. Name a Jinja template, such as chat_template.jinja."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{where} cannot be read: {error}") from None
    if not text.strip():
        raise SettingsError(f"{where} is empty. It has to be a Jinja template of messages.")
    _check_syntax(where, text)
    return text


def _check_syntax(where: str, text: str) -> None:
    import jinja2

    from outrider.gateway.answering.text.template_language import check_syntax

    try:
        check_syntax(text)
    except jinja2.TemplateSyntaxError as error:
        raise SettingsError(f"{where}: line {error.lineno} is no Jinja: {error.message}") from None
