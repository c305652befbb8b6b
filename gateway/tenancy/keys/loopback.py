"""The addresses that the gateway may listen on while there is no key."""

from outrider.gateway.settings.loopback import is_loopback
from outrider.gateway.settings.tree import Settings


def listen_host(settings: Settings, has_keys: bool) -> tuple[str, str | None]:
    """Return the address to listen on, and a warning or None.

    With `keys.mode` auto, a gateway without keys serves this machine alone.
    """
    host = settings.server.host
    has_keys = has_keys or settings.keys.api_key is not None or bool(settings.sign_in.issuers)
    if is_loopback(host) or has_keys or settings.keys.mode == "required":
        return host, None
    if settings.keys.mode == "off":
        return host, (
            f"keys.mode is off: every client that reaches {host} by a name of http.hosts has full "
            "access"
        )
    own = "::1" if ":" in host else "127.0.0.1"
    return own, (
        f"no key exists, so only this machine may call the API: listening on {own}, not on "
        f"{host}. Create a key with `outrider keys create --name NAME` and restart."
    )
