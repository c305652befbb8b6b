"""A fleet as an application to import: `serve run outrider.gateway.ray_fleet.application:fleet`."""

from pathlib import Path
from typing import Any

from ray import serve

from outrider.gateway.ray_fleet.deployments import build_application
from outrider.gateway.ray_fleet.plan import parse_plan, read_plan
from outrider.gateway.settings.tree import SettingsError


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
