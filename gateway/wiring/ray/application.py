"""A fleet to import: `serve run outrider.gateway.wiring.ray.application:fleet`."""

from pathlib import Path
from typing import Any

from ray import serve

from outrider.gateway.settings.tree import SettingsError
from outrider.gateway.wiring.ray.deployments import build_application
from outrider.gateway.wiring.ray.plan import parse_plan, read_plan


def fleet(arguments: dict[str, Any]) -> serve.Application:
    """Build the application of `file=fleet.toml`, or of what such a file has in it, as arguments.

    Serve's own options say where its proxies listen, not the plan's. Raises SettingsError.
    """
    file = arguments.get("file")
    if file is None:
        return build_application(parse_plan(arguments, "args"))
    if len(arguments) > 1:
        raise SettingsError("args: file and other arguments exclude each other")
    return build_application(read_plan(Path(file)))
