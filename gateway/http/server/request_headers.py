"""A request whose headers are read once."""

from typing import Any

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Receive, Scope, Send


class RequestHeaders(Headers):
    """Headers by name, each decoded once.

    Starlette goes through all of them for every name that is looked up, and clients send twenty.
    """

    def __init__(self, scope: Scope) -> None:
        super().__init__(raw=scope["headers"])
        self._by_name: dict[str, list[str]] = {}
        for name, value in self.raw:
            self._by_name.setdefault(name.decode("latin-1"), []).append(value.decode("latin-1"))

    def __getitem__(self, key: str) -> str:
        return self._by_name[key.lower()][0]

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and key.lower() in self._by_name

    def get(self, key: str, default: Any = None) -> Any:
        """Return the first value of a name."""
        found = self._by_name.get(key.lower())
        return default if found is None else found[0]

    def getlist(self, key: str) -> list[str]:
        """Return all values of a name."""
        return list(self._by_name.get(key.lower(), ()))


class HeadedRequest(Request):
    """A request with its headers read already."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, headers: RequestHeaders) -> None:
        super().__init__(scope, receive, send)
        self._read_headers = headers

    @property
    def headers(self) -> RequestHeaders:
        """Return the headers."""
        return self._read_headers
