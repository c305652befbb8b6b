"""`outrider retention`: what is kept, where, and for how long."""

import typer

from outrider.gateway.settings.retention import DAY_S, KEPT, kept_s
from outrider.gateway.settings.tree import SettingsError, load_settings
from outrider.gateway.tools.commands.command_parts import ConfigFile
from outrider.gateway.tools.commands.database_cli import AsJson, echo_json
from outrider.gateway.tools.commands.user_errors import user_errors

app = typer.Typer(add_completion=False)


@app.command("retention")
def retention(config: ConfigFile = None, as_json: AsJson = False) -> None:
    """List what is kept of tenants and their texts, where, and for how long.

    retention.days bounds what has a setting here; `outrider erase` removes one tenant's.
    """
    with user_errors(usage=(SettingsError,)):
        settings = load_settings(config_file=config)
    rows = [(kept, kept_s(settings, kept)) for kept in KEPT]
    documents = [
        {
            "what": kept.what,
            "where": kept.where,
            "setting": kept.setting and ".".join(kept.setting),
            "seconds": seconds,
            "kept": kept.otherwise if seconds is None else _told(seconds),
        }
        for kept, seconds in rows
    ]
    if as_json:
        echo_json(documents)
        return
    for each in documents:
        setting = f"  [{each['setting']}]" if each["setting"] else ""
        typer.echo(f"{each['what']}: {each['kept']}, {each['where']}{setting}")


def _told(seconds: float) -> str:
    for size_s, unit in ((DAY_S, "days"), (3600.0, "hours")):
        if seconds >= size_s:
            return f"{seconds / size_s:g} {unit}"
    return f"{seconds:g} s"
