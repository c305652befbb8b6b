"""`outrider alerts test`: post an alert to the webhook of the settings."""

import asyncio
import time

import typer

from outrider.gateway.settings.tree import SettingsError, load_settings
from outrider.gateway.tools.commands.command_parts import ConfigFile
from outrider.gateway.tools.commands.user_errors import user_errors

app = typer.Typer(
    name="alerts",
    help="Alerts about budgets and failures: try the webhook.",
    no_args_is_help=True,
    add_completion=False,
)


@app.callback()
def alerts() -> None:
    """Keep `test` a command of its own."""


@app.command("test")
def try_webhook(config: ConfigFile = None) -> None:
    """Post a signed alert once; exit status 1 unless the webhook answers with 2xx."""
    with user_errors(usage=(SettingsError,)):
        settings = load_settings(config_file=config).alerts
        if settings.url is None:
            raise SettingsError("alerts.url is not set, so there are no alerts")
    from outrider.gateway.alerts.conditions import Alert
    from outrider.gateway.alerts.delivery import Webhook

    alert = Alert(event="test", at_s=time.time(), data={"message": "outrider alerts test"})

    async def post() -> int | str:
        return await Webhook(settings).post(alert)

    outcome = asyncio.run(post())
    typer.echo(f"{alert.alert_id}: {outcome}")
    if not isinstance(outcome, int) or not 200 <= outcome < 300:
        raise typer.Exit(1)
