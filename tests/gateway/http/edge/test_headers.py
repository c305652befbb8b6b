"""Headers for browsers: security headers and CORS."""

import pytest
from pydantic import ValidationError
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.types import Receive, Scope, Send

from outrider.gateway.http.edge.cors import CorsPolicy
from outrider.gateway.http.edge.headers import EdgeHeaders
from outrider.gateway.settings.http_bounds import CorsSettings
from tests.gateway.http.edge.asking import Exchange, ask, http_scope

PAGE = "https://app.example"
PREFLIGHT = (
    ("origin", PAGE),
    ("access-control-request-method", "POST"),
    ("access-control-request-headers", "authorization,content-type,x-stainless-os"),
)


class Endpoint:
    """Counts its calls; answers JSON unless told otherwise."""

    def __init__(self, response: Response | None = None) -> None:
        self.response = response or JSONResponse({"ok": True})
        self.num_calls = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.num_calls += 1
        await self.response(scope, receive, send)


@pytest.fixture
def endpoint() -> Endpoint:
    return Endpoint()


def get(app: EdgeHeaders, *headers: tuple[str, str]) -> Exchange:
    return ask(app, http_scope("/v1/models", method="GET", headers=headers))


def preflight(app: EdgeHeaders, *headers: tuple[str, str]) -> Exchange:
    return ask(app, http_scope(method="OPTIONS", headers=headers or PREFLIGHT))


def cors(*origins: str) -> CorsPolicy | None:
    return CorsPolicy.of(CorsSettings(origins=origins))


def test_every_answer_has_the_security_headers(endpoint: Endpoint) -> None:
    answer = get(EdgeHeaders(endpoint))
    assert answer.body == b'{"ok":true}'
    assert answer.headers == {
        "content-length": "11",
        "content-type": "application/json",
        "cache-control": "no-store",
        "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "x-frame-options": "DENY",
        "cross-origin-resource-policy": "same-origin",
    }


def test_headers_set_by_an_endpoint_are_kept() -> None:
    own = {"content-security-policy": "default-src 'self'", "cache-control": "no-cache"}
    answer = get(EdgeHeaders(Endpoint(HTMLResponse("<p>", headers=own))))
    assert answer.headers.items() >= own.items()
    names = [name for name, _ in answer.messages[0]["headers"]]
    assert len(names) == len(set(names))


def test_headers_of_one_answer_do_not_get_into_the_next(endpoint: Endpoint) -> None:
    app = EdgeHeaders(endpoint, cors=cors(PAGE))
    first = get(app, ("origin", PAGE))
    second = get(app)
    assert first.headers["access-control-allow-origin"] == PAGE
    assert "access-control-allow-origin" not in second.headers
    assert len(get(app).messages[0]["headers"]) == len(second.messages[0]["headers"])


def test_without_origins_there_is_no_cors(endpoint: Endpoint) -> None:
    assert cors() is None
    answer = get(EdgeHeaders(endpoint, cors=cors()), ("origin", PAGE))
    assert not [name for name in answer.headers if name.startswith("access-control")]
    assert "vary" not in answer.headers
    preflight(EdgeHeaders(endpoint), *PREFLIGHT)
    assert endpoint.num_calls == 2  # it goes on, to be told that there is no such method


def test_a_page_that_may_ask_reads_the_answer(endpoint: Endpoint) -> None:
    answer = get(EdgeHeaders(endpoint, cors=cors("http://a.example", PAGE)), ("origin", PAGE))
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert answer.headers["access-control-expose-headers"] == "*"
    assert answer.headers["vary"] == "origin"
    assert "access-control-allow-credentials" not in answer.headers


@pytest.mark.parametrize(
    "origin",
    [
        "https://app.example.evil.example",
        "https://evil-app.example",
        "http://app.example",
        "https://app.example:8443",
        "HTTPS://APP.EXAMPLE",
        "null",
        "",
        "*",
    ],
)
def test_other_pages_may_not_read_it(endpoint: Endpoint, origin: str) -> None:
    app = EdgeHeaders(endpoint, cors=cors(PAGE))
    answer = get(app, ("origin", origin))
    assert answer.status == 200
    assert "access-control-allow-origin" not in answer.headers
    assert answer.headers["vary"] == "origin"
    refused = preflight(app, ("origin", origin), *PREFLIGHT[1:])
    assert refused.status == 403
    assert b"origin_not_allowed" in refused.body
    assert "access-control-allow-origin" not in refused.headers


def test_answers_to_refused_origins_vary_as_well(endpoint: Endpoint) -> None:
    assert get(EdgeHeaders(endpoint, cors=cors(PAGE))).headers["vary"] == "origin"
    assert "vary" not in get(EdgeHeaders(endpoint, cors=cors("*"))).headers


def test_a_preflight_reaches_no_endpoint(endpoint: Endpoint) -> None:
    answer = preflight(EdgeHeaders(endpoint, cors=cors(PAGE)))
    assert endpoint.num_calls == 0
    assert answer.status == 204
    assert answer.body == b""
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert answer.headers["access-control-allow-headers"] == PREFLIGHT[2][1]
    assert int(answer.headers["access-control-max-age"]) > 0
    assert "access-control-allow-private-network" not in answer.headers


def test_a_preflight_to_a_private_network_is_told(endpoint: Endpoint) -> None:
    wish = ("access-control-request-private-network", "true")
    answer = preflight(EdgeHeaders(endpoint, cors=cors(PAGE)), *PREFLIGHT, wish)
    assert answer.headers["access-control-allow-private-network"] == "true"


def test_header_names_that_are_none_are_not_repeated(endpoint: Endpoint) -> None:
    strange = ("access-control-request-headers", "x-a\x0b, <script>")
    answer = preflight(EdgeHeaders(endpoint, cors=cors(PAGE)), *PREFLIGHT[:2], strange)
    assert "access-control-allow-headers" not in answer.headers


def test_all_pages(endpoint: Endpoint) -> None:
    app = EdgeHeaders(endpoint, cors=cors("*"))
    assert get(app, ("origin", "null")).headers["access-control-allow-origin"] == "*"
    assert preflight(app).headers["access-control-allow-origin"] == "*"


def test_an_options_request_that_is_no_preflight_goes_on(endpoint: Endpoint) -> None:
    app = EdgeHeaders(endpoint, cors=cors(PAGE))
    preflight(app, ("origin", PAGE))
    preflight(app, *PREFLIGHT[1:])
    assert endpoint.num_calls == 2


@pytest.mark.parametrize("origin", ["app.example", "https://app.example/", "https://*", "null"])
def test_invalid_origins_are_refused_in_the_settings(origin: str) -> None:
    with pytest.raises(ValidationError, match="is not an origin; write scheme, host and port only"):
        CorsSettings(origins=(origin,))


def test_origins_are_written_as_browsers_do() -> None:
    assert CorsSettings(origins=("HTTPS://App.Example:8443",)).origins == (
        "https://app.example:8443",
    )


def test_the_lifespan_passes() -> None:
    seen = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append((scope["type"], send))

    scope = {"type": "lifespan"}
    exchange = ask(EdgeHeaders(app), scope)
    assert seen == [("lifespan", exchange.send)]


@pytest.mark.parametrize("policy", [None, cors("http://a.example")])
def test_a_refused_origin_is_logged_once_with_the_setting(
    endpoint: Endpoint, policy: CorsPolicy | None, caplog: pytest.LogCaptureFixture
) -> None:
    app = EdgeHeaders(endpoint, cors=policy)
    preflight(app)
    preflight(app)
    (told,) = [record.getMessage() for record in caplog.records]
    assert f"origin={PAGE} setting=http.cors.origins" in told
