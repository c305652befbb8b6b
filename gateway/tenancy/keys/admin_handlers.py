"""Typed handlers of /admin: what a handler takes and returns describes its endpoint.

@admin("POST", "/admin/keys", "The key, shown once.")
async def create_key(self, call: AdminCall, wanted: KeyCreate) -> NewKeyReport: ...
"""

import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import Any, Final, Literal, TypeVar, get_type_hints

from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from outrider.gateway.audit.actor import acting
from outrider.gateway.contract.errors.tree import BadRequestError
from outrider.gateway.contract.errors.validation import bad_request
from outrider.gateway.contract.schema.openapi import failures, json_content, success
from outrider.gateway.contract.schema.structs import json_response
from outrider.gateway.tenancy.keys.authenticator import Authenticator
from outrider.gateway.tenancy.keys.keys import Principal

HttpMethod = Literal["GET", "POST", "PUT", "PATCH", "DELETE"]
Handler = TypeVar("Handler", bound=Callable[..., Awaitable[Any]])

_FAILURES: Final[Mapping[int, str]] = {
    403: "The key has not the admin scope.",
    404: "Unknown key, team or experiment, or no database.",
    429: "Too many wrong keys came from this address.",
    503: "The database is unavailable.",
}
_NAMES: Final[Mapping[str, str]] = {
    "key_id": "The key's public id: 8 characters.",
    "team": "The team's id or name.",
    "experiment": "The experiment's name.",
    "adapter": "The adapter's name.",
    "prompt": "The prompt's name.",
    "model": "The model's name: its tier's.",
}
"""What stands in braces in a path."""
_PATH_SCHEMAS: Final = {"prompt": {"type": "string", "pattern": "^[A-Za-z0-9._-]{1,64}$"}}
"""Where more is known of it than that it is text."""

_ALWAYS: Final = frozenset({401, 403, 404, 429, 503})
_OF_BODIES: Final = frozenset({400, 413, 415})
_MOST_DIGITS: Final = 11
_MAX_TEXT_CHARS: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminQuery:
    """A whole number in the address, up to `most`, or a text where that is None."""

    name: str
    description: str
    most: int | None = None
    default: int | None = None
    least: int = 1

    @property
    def parameter(self) -> dict[str, Any]:
        """Describe it for /openapi.json."""
        schema: dict[str, Any] = {"type": "string", "maxLength": _MAX_TEXT_CHARS}
        if self.most is not None:
            schema = {"type": "integer", "minimum": self.least, "maximum": self.most}
        if self.default is not None:
            schema["default"] = self.default
        return _parameter("query", self.name, self.description, schema)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminCall:
    """A request of an administrator. `body`: as it came; empty where the handler takes none."""

    request: Request
    principal: Principal
    body: bytes = b""

    @property
    def by(self) -> str:
        """Name the administrator's key for the log."""
        return self.principal.key_id

    def name(self, part: str) -> str:
        """Return what stands in the path for `{part}`."""
        found: str = self.request.path_params[part]
        return found

    def text(self, query: AdminQuery) -> str | None:
        """Return a text of the address. Raises BadRequestError."""
        text = self.request.query_params.get(query.name)
        if text is not None and (len(text) > _MAX_TEXT_CHARS or not text.isprintable()):
            raise BadRequestError(
                f"{query.name}: this text cannot be a name or an id.", param=query.name
            )
        return text

    def number(self, query: AdminQuery) -> int | None:
        """Return a whole number of the address. Raises BadRequestError."""
        text, most = self.text(query), query.most
        if text is None or most is None:
            return query.default
        is_number = text.isascii() and text.isdigit()
        if not is_number or not query.least <= int(text[:_MOST_DIGITS]) <= most:
            raise BadRequestError(
                f"{query.name} must be a whole number from {query.least} to {most}.",
                param=query.name,
            )
        return int(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminRoute:
    """An endpoint."""

    method: HttpMethod
    path: str
    handler: str
    """The method's name."""
    operation: dict[str, Any]
    """Its description for /openapi.json."""
    body: type[BaseModel] | None
    """The model of its body, if it has one."""
    models: tuple[type, ...]
    """All that the description names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mark:
    """The mark that `admin` puts on a handler."""

    method: HttpMethod
    path: str
    description: str
    queries: Sequence[AdminQuery]
    answer: type | None
    conflicts: bool


_MARKS: Final[dict[Callable[..., Awaitable[Any]], _Mark]] = {}


def admin(
    method: HttpMethod,
    path: str,
    description: str,
    *,
    queries: Sequence[AdminQuery] = (),
    answer: type | None = None,
    conflicts: bool = False,
) -> Callable[[Handler], Handler]:
    """Make a method of `AdminHandlers` the handler of an endpoint.

    `description`: of its answer. `answer`: its model, where the method's own type is not.
    `conflicts`: it may answer 409.
    """

    def mark(handler: Handler) -> Handler:
        _MARKS[handler] = _Mark(
            method=method,
            path=path,
            description=description,
            queries=queries,
            answer=answer,
            conflicts=conflicts,
        )
        return handler

    return mark


class AdminHandlers:
    """Base of the handlers, which refuse principals without the admin scope.

    They raise GatewayErrors: AuthenticationError, PermissionDeniedError, NotFoundError,
    ConflictError, BadRequestError, StorageError.
    """

    def __init__(
        self, authenticator: Authenticator, read_body: Callable[[Request], Awaitable[bytes]]
    ) -> None:
        """`read_body` reads a JSON body, within the limits of all bodies."""
        self._authenticator = authenticator
        self._read_body = read_body

    def require(self, principal: Principal) -> None:
        """Raise AuthenticationError or PermissionDeniedError for who may not."""
        self._authenticator.require_admin(principal)

    @classmethod
    def routes(cls) -> tuple[AdminRoute, ...]:
        """Return the endpoints, in the order of their handlers."""
        handlers = filter(inspect.isfunction, vars(cls).values())
        return tuple(_route(handler, _MARKS[handler]) for handler in handlers if handler in _MARKS)

    def endpoint(self, route: AdminRoute) -> Callable[[Request, Principal], Awaitable[Response]]:
        """Return what answers an authenticated request."""
        handler = getattr(self, route.handler)

        async def answer(request: Request, principal: Principal) -> Response:
            self.require(principal)
            with acting(f"key/{principal.key_id}"):
                if route.body is None:
                    return _answer(await handler(AdminCall(request=request, principal=principal)))
                body = await self._read_body(request)
                call = AdminCall(request=request, principal=principal, body=body)
                return _answer(await handler(call, parsed(route.body, body)))

        return answer


Parsed = TypeVar("Parsed", bound=BaseModel)


def parsed(model: type[Parsed], body: bytes) -> Parsed:
    """Read a JSON body. Raises BadRequestError."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise bad_request(error, body) from None


def _answer(content: object) -> Response:
    """Return a response that no cache may keep: it may hold a key."""
    return json_response(content, {"cache-control": "no-store"})


# ---- the description ----------------------------------------------------------------------------


def _route(handler: Callable[..., Any], mark: _Mark) -> AdminRoute:
    """Describe an endpoint by its handler's types."""
    hints = get_type_hints(handler)
    answer = mark.answer or hints.pop("return")
    body = next((kind for kind in hints.values() if _is_body(kind)), None)
    return AdminRoute(
        method=mark.method,
        path=mark.path,
        handler=handler.__name__,
        operation=_operation(handler.__name__, mark, answer, body),
        body=body,
        models=(answer,) if body is None else (body, answer),
    )


def _is_body(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _operation(name: str, mark: _Mark, answer: type, body: type | None) -> dict[str, Any]:
    statuses = _ALWAYS | (set() if body is None else _OF_BODIES)
    statuses |= ({409} if mark.conflicts else set()) | ({400} if mark.queries else set())
    first, *others = name.split("_")
    operation: dict[str, Any] = {
        "operationId": first + "".join(word.title() for word in others),
        "tags": ["admin"],
        "parameters": [*_path_parameters(mark.path), *(query.parameter for query in mark.queries)],
        "responses": {"200": success(answer, mark.description)}
        | failures(*sorted(statuses), words=_FAILURES),
    }
    if body is not None:
        operation["requestBody"] = {"required": True, "content": json_content(body)}
    return operation


def _path_parameters(path: str) -> Iterator[dict[str, Any]]:
    for _, name, _, _ in Formatter().parse(path):
        if name:
            schema = _PATH_SCHEMAS.get(name, {"type": "string", "minLength": 1})
            yield _parameter("path", name, _NAMES[name], schema)


def _parameter(
    place: Literal["path", "query"], name: str, description: str, schema: dict[str, Any]
) -> dict[str, Any]:
    return {
        "name": name,
        "in": place,
        "required": place == "path",
        "description": description,
        "schema": schema,
    }
