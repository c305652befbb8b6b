"""Settings of keys: whether they are wanted, and how their secrets are kept."""

from typing import Annotated, Literal

from pydantic import Field, SecretStr

from gateway.settings.sections import Section

KeyMode = Literal["auto", "required", "off"]


class KeySettings(Section):
    """Authentication. Keys are made by `outrider keys create`."""

    mode: KeyMode = "auto"
    """auto: a key is required once one exists; until then only this machine may call the API;
    required: always; off: never, so anything that can reach the port may call the API."""
    secret: SecretStr | None = None
    """What hashes of keys are keyed with; unset: drawn at the first start and kept in the database,
    where all its gateways find it."""
    admin_token: SecretStr | None = None
    """A token for /admin beside keys with the admin scope; unset: such keys only."""
    open_metrics: bool = False
    """Whether /metrics is answered without a key, for a scraper on a network of its own. It shows
    the load of all tenants together, and no names of theirs."""
    refresh_s: Annotated[float, Field(gt=0)] = 1.0
    """How soon keys that another process makes or revokes are known here."""
