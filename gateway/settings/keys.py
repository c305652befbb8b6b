"""Settings of keys: when they are required, and how their secrets are hashed."""

from typing import Annotated, Literal

from pydantic import Field, SecretStr

from outrider.gateway.settings.sections import Section

KeyMode = Literal["auto", "required", "off"]


class KeySettings(Section):
    """Authentication. Create keys with `outrider keys create`."""

    mode: KeyMode = "auto"
    """auto: a key is required once one exists or `api_key` is set; until then only this machine may
    call the API; required: always; off: never, so anything that can reach the port may call it."""
    secret: SecretStr | None = None
    """Secret for hashing keys; unset: generated at the first start and kept in the database, where
    all gateways that share it read it."""
    admin_token: SecretStr | None = None
    """Token for /admin, in addition to keys with the admin scope; unset: such keys only."""
    api_key: SecretStr | None = None
    """A key beside those of `outrider keys create`, for a gateway with one client: it may do all
    but administrate. `outrider serve` reads it from OUTRIDER_API_KEY too."""
    open_metrics: bool = False
    """Answer /metrics without a key, for a scraper on a private network. It shows the load of all
    tenants together, without their names."""
    refresh_s: Annotated[float, Field(gt=0)] = 1.0
    """Interval at which keys created or revoked by another process are read."""
