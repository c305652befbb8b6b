"""`outrider cache warm`: has a running gateway's engines compute a prompt, and keep it."""

import asyncio
import json
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.parse import quote

import typer

from outrider.gateway.settings.tree import KEY_VARIABLE, SettingsError
from outrider.gateway.tools.commands.chat_command import DEFAULT_URL
from outrider.gateway.tools.commands.command_parts import reports_user_errors

WARM_HELP: Final = """
Have a running gateway compute a prompt now, and keep it for requests that begin with it.

FILE is a system prompt as text, or JSON with the messages and tools of a chat request.

[bold]Examples[/bold]

  outrider cache warm rules.txt --ttl 8h

  outrider cache warm agent.json --name agent --model large --key KEY  [dim]# an admin's[/dim]

  outrider cache warm rules.txt --tenant TEAM_ID  [dim]# requests of that team's keys find it[/dim]

  curl -X DELETE http://127.0.0.1:8000/admin/prompts/rules  [dim]# keep it no longer[/dim]
"""
_FIELDS: Final = ("model", "messages", "tools", "chat_template_kwargs")
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_TIMEOUT_S: Final = 3600.0
"""A long prompt takes an engine on a CPU many minutes."""


@reports_user_errors
def warm(
    *,
    file: Annotated[Path, typer.Argument(help="The prompt: text, or JSON with messages.")],
    name: Annotated[
        str | None, typer.Option(help="Its name; the file's without its ending by default.")
    ] = None,
    ttl: Annotated[
        str, typer.Option(help="How long it is kept: seconds, or 30m, 8h, 7d; 30 days at most.")
    ] = "1h",
    model: Annotated[
        str | None, typer.Option(help="The model that keeps it; auto: each of the machine's.")
    ] = None,
    tenant: Annotated[
        str | None,
        typer.Option(help="The id of the team, or key, whose requests find it; default: your own."),
    ] = None,
    url: Annotated[
        str, typer.Option(envvar="OUTRIDER_URL", help="URL of the gateway.")
    ] = DEFAULT_URL,
    key: Annotated[
        str | None,
        typer.Option(envvar=KEY_VARIABLE, help="A key with the admin scope, or the admin token."),
    ] = None,
) -> None:
    """Keep a prompt by name; the help is `WARM_HELP`."""
    body = _body(file) | {"ttl_s": _seconds(ttl)}
    given = {"model": model, "tenant": tenant}
    body |= {field: value for field, value in given.items() if value is not None}
    from outrider.gateway.tools.commands.session import ask_gateway

    base = url.rstrip("/").removesuffix("/v1")
    place = f"{base}/admin/prompts/{quote(name or file.stem, safe='')}"
    report = asyncio.run(ask_gateway("PUT", place, key=key, timeout_s=_TIMEOUT_S, body=body))
    for tier in report["tiers"]:
        typer.echo(
            f"{report['name']}: {tier['tokens']:,} tokens in the {tier['tier']} model's cache"
            f"{_engines(tier['engines'])}, for {tier['expires_in_s']:,.0f} s"
        )


def _engines(number: int) -> str:
    return "" if number == 1 else f" of {number} engines"


def _body(file: Path) -> dict[str, Any]:
    """Return the fields that a prompt is made of. Raises SettingsError for a file that is none."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{file} cannot be read: {error}") from None
    if not text.strip():
        raise SettingsError(f"{file} is empty")
    try:
        read = json.loads(text)
    except ValueError:
        read = None
    if isinstance(read, dict) and "messages" in read:
        return {field: read[field] for field in _FIELDS if read.get(field) is not None}
    if file.suffix == ".json":
        raise SettingsError(f'{file} is no JSON object with "messages"')
    return {"messages": [{"role": "system", "content": text.rstrip()}]}


def _seconds(ttl: str) -> float:
    """Read a time. Raises SettingsError."""
    unit = _SECONDS.get(ttl[-1:])
    number = ttl if unit is None else ttl[:-1]
    try:
        return float(number) * (unit or 1)
    except ValueError:
        raise SettingsError(f"--ttl {ttl}: write it as seconds, or as 30m, 8h or 7d") from None
