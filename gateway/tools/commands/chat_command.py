"""`outrider chat`: its flags, and the gateway that it talks to."""

from collections.abc import Callable
from typing import Annotated

import typer

from outrider.gateway.contract.schema.kinds import Policy
from outrider.gateway.settings.tree import KEY_VARIABLE, Settings, load_settings
from outrider.gateway.tools.commands.command import (
    ConfigFile,
    DeviceOption,
    DtypeOption,
    LargeOption,
    LargeRevision,
    Small,
    SmallRevision,
    Tiers,
    model_flags,
    reports_user_errors,
    start_logging,
    tier_flags,
)
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


@app.command("chat", help=_CHAT_HELP)
@reports_user_errors
def chat(  # noqa: PLR0913 - a flag each
    prompt: Annotated[str | None, typer.Argument(help="The question.")] = None,
    url: Annotated[
        str | None,
        typer.Option(
            envvar="OUTRIDER_URL", help=f"URL of a running gateway; default: {DEFAULT_URL}."
        ),
    ] = None,
    model: Annotated[
        str, typer.Option(help="auto, small, large, an upstream tier or one of its models.")
    ] = "auto",
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same text.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Maximum tokens of an answer.")
    ] = None,
    speculation: Annotated[
        bool,
        typer.Option("--speculation/--no-speculation", help="Turn speculative decoding on or off."),
    ] = True,
    policy: Annotated[
        Policy | None, typer.Option(help="Which tiers may answer: local models, upstream tiers.")
    ] = None,
    is_private: Annotated[
        bool, typer.Option("--private", help="Keep the request on the gateway's machine.")
    ] = False,
    deadline_ms: Annotated[
        float | None, typer.Option(min=1.0, help="Time limit for the whole answer.")
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(envvar=KEY_VARIABLE, help="API key, if the gateway requires one."),
    ] = None,
    config: ConfigFile = None,
    large: LargeOption = None,
    small: Small = None,
    large_revision: LargeRevision = None,
    small_revision: SmallRevision = None,
    tiers: Tiers = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
) -> None:
    """Chat in the terminal; the help is `_CHAT_HELP`."""
    from outrider.gateway.tools.commands.terminal import make_console
    from outrider.gateway.tools.commands.terminal_chat import (
        ChatOptions,
        Gateway,
        converse,
        is_reachable,
        say,
    )

    console = make_console()
    options = ChatOptions(
        model=model,
        temperature=temperature,
        seed=seed,
        max_tokens=max_tokens,
        speculation=speculation,
        policy=policy,
        is_private=is_private,
        deadline_ms=deadline_ms,
    )

    def talk(base_url: str) -> None:
        gateway = Gateway(url=base_url, key=key)
        if prompt is None:
            converse(console, gateway, options)
        else:
            say(console, gateway, options, [{"role": "user", "content": prompt}])

    flags = {
        **model_flags(large, small),
        "models.large_revision": large_revision,
        "models.small_revision": small_revision,
        "engine.device": device,
        "engine.dtype": dtype,
        **tier_flags(tiers or []),
    }
    wants_own_engine = config is not None or any(value is not None for value in flags.values())
    # People have the address at hand as OpenAI's clients take it.
    running = (url or DEFAULT_URL).rstrip("/").removesuffix("/v1")
    if not wants_own_engine and is_reachable(running):
        talk(running)
    elif url is not None and not wants_own_engine:
        raise ChatError(f"no gateway answers at {url}; start one with `outrider serve`")
    else:
        _chat_with_own_engine(load_settings(config_file=config, flags=flags), talk)


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
