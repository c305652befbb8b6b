"""The gateway's socket, apart from the server, so that it can be opened before that is imported."""

import socket

from outrider.gateway.settings.tree import SettingsError


def listen(host: str, port: int) -> socket.socket:
    """Take the port before anything slow happens. Raises SettingsError if it cannot be taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # So that a restarted gateway need not wait for the old one's connections to time out.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise SettingsError(
            f"cannot listen on {host} port {port}: {(error.strerror or str(error)).lower()}. "
            "Choose another with --port (0 takes any free one) or stop what listens there."
        ) from None
    return listener


def url_of(listener: socket.socket) -> str:
    """Return the address to type into a browser."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)
    return f"http://{f'[{host}]' if ':' in host and '[' not in host else host}:{port}"
