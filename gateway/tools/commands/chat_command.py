"""`outrider chat`: its flags, and the gateway that it talks to."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from outrider.gateway.settings.tree import KEY_VARIABLE, Settings, load_settings
from outrider.gateway.tools.commands.chat_options import ChatOptions
from outrider.gateway.tools.commands.command_parts import (
    DeviceOption,
    DtypeOption,
    PairFlags,
    Tiers,
    reports_user_errors,
    start_logging,
    tier_flags,
    url_flags,
)
from outrider.gateway.tools.commands.flags import setting_flags, takes_flags
from outrider.gateway.tools.commands.user_errors import ChatError

DEFAULT_URL = "http://127.0.0.1:8000"

app = typer.Typer(rich_markup_mode="rich", add_completion=False)

_CHAT_HELP = """
Ask one question, or chat if none is given. Tokens that the small model drafted are green.

Uses the gateway at --url if one answers there, else starts an engine of its own for this chat.

[bold]Examples[/bold]

  outrider chat "What is 4786 + 3957?"

  outrider chat --model large --temperature 0.8 --seed 7 "Add 4827 and 1965."

  outrider chat --model cloud "Who are you?"  [dim]# an upstream tier[/dim]

  outrider chat --policy prefer_cloud --deadline-ms 2000 "Who are you?"

  outrider chat
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnEngineFlags(PairFlags):
    """The engine that answers where no gateway does."""

    tiers: Tiers = None
    device: DeviceOption = None
    dtype: DtypeOption = None

    def settings(self) -> dict[str, Any]:
        """Return the settings that were given, by their names."""
        return setting_flags(self) | url_flags(self.large, self.small) | tier_flags(self.tiers)


@app.command("chat", help=_CHAT_HELP)
@reports_user_errors
@takes_flags
def chat(
    *,
    prompt: Annotated[str | None, typer.Argument(help="The question.")] = None,
    url: Annotated[
        str | None,
        typer.Option(
            envvar="OUTRIDER_URL", help=f"URL of a running gateway; default: {DEFAULT_URL}."
        ),
    ] = None,
    options: ChatOptions,
    key: Annotated[
        str | None,
        typer.Option(envvar=KEY_VARIABLE, help="API key, if the gateway requires one."),
    ] = None,
    own: OwnEngineFlags,
) -> None:
    """Chat in the terminal; the help is `_CHAT_HELP`."""
    from outrider.gateway.tools.commands.terminal import make_console
    from outrider.gateway.tools.commands.terminal_chat import Gateway, converse, is_reachable, say

    console = make_console()

    def talk(base_url: str) -> None:
        gateway = Gateway(url=base_url, key=key)
        if prompt is None:
            converse(console, gateway, options)
        else:
            say(console, gateway, options, [{"role": "user", "content": prompt}])

    flags = own.settings()
    wants_own_engine = own.config is not None or bool(flags)
    # People have the address at hand as OpenAI's clients take it.
    running = (url or DEFAULT_URL).rstrip("/").removesuffix("/v1")
    if not wants_own_engine and is_reachable(running):
        talk(running)
    elif url is not None and not wants_own_engine:
        raise ChatError(f"no gateway answers at {url}; start one with `outrider serve`")
    else:
        _chat_with_own_engine(load_settings(config_file=own.config, flags=flags), talk)


def _chat_with_own_engine(settings: Settings, talk: Callable[[str], None]) -> None:
    """Start a private gateway for the length of a conversation."""
    from outrider.gateway.tools.commands.terminal import LoadingProgress, make_console
    from outrider.gateway.wiring.start import keep_torch_out

    start_logging("WARNING")
    if settings.engine.process or not settings.models.is_any:
        keep_torch_out()
    from outrider.gateway.wiring.serving import background_gateway

    with (
        LoadingProgress(make_console(stderr=True)) as progress,
        background_gateway(settings, progress.report) as base_url,
    ):
        progress.stop()
        talk(base_url)
