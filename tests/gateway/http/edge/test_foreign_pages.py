"""A gateway without keys answers this machine's programs and its own pages, and no other site's."""

from collections.abc import Iterator

import pytest
from pydantic import ValidationError
from starlette.datastructures import Headers

from outrider.gateway.answering.text.chat import ChatTokenizer
from outrider.gateway.contract.errors.tree import PermissionDeniedError
from outrider.gateway.http.edge.bounds import ConnectionBounds
from outrider.gateway.http.edge.foreign_pages import ForeignPages
from outrider.gateway.settings.http_bounds import CorsSettings, HttpSettings
from tests.gateway.http.edge.gateways import Whole, whole_gateway
from tests.gateway.http.edge.serving import Answered, Served, answer, served

LOCAL = ["localhost", "localhost:8000", "LOCALHOST", "a.localhost:1", "127.0.0.1:80", "127.1.2.3"]
CONTAINERS = ["host.docker.internal:8000", "host.containers.internal"]
FOREIGN = [
    "evil.example",
    "127.0.0.1.evil.example",
    "localhost.evil.example",
    "evillocalhost",
    "internal",
    "docker.internal.evil.example",
    "127.0.0.1@evil.example",
    "192.168.0.1",
    "[::2]",
    "[::1]:80:80",
    "",
]
PAGE = "https://app.example"


def code(
    method: str, host: str = "localhost", *, settings: HttpSettings | None = None, **headers: str
) -> str | None:
    """The code of the refusal; None where the request is let through."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        ForeignPages.of(settings or HttpSettings()).check(method, Headers({"host": host, **named}))
    except PermissionDeniedError as error:
        return error.code
    return None


@pytest.mark.parametrize("host", [*LOCAL, *CONTAINERS, "[::1]:8000"])
def test_names_of_this_machine_pass(host: str) -> None:
    assert code("GET", host) is code("POST", host) is None


@pytest.mark.parametrize("host", FOREIGN)
def test_names_that_only_point_to_this_machine_do_not(host: str) -> None:
    assert code("GET", host) == code("POST", host) == "host_not_allowed"
    allowed = HttpSettings(hosts=("gateway.example", "10.0.0.5"))
    assert code("GET", host, settings=allowed) == "host_not_allowed"
    assert code("GET", host, settings=HttpSettings(hosts=("*",))) is None


def test_listed_names_pass() -> None:
    listed = HttpSettings(hosts=("Gateway.example", "10.0.0.5", "[2001:db8::1]"))
    for host in ("gateway.example", "GATEWAY.EXAMPLE:8000", "10.0.0.5:80", "[2001:db8::1]:443"):
        assert code("GET", host, settings=listed) is None


@pytest.mark.parametrize("host", ["gateway.example:80", "http://a", "a b", "a/b", "::1", "*.a"])
def test_hosts_that_are_no_names_are_refused_in_the_settings(host: str) -> None:
    with pytest.raises(ValidationError, match="write it without scheme and port"):
        HttpSettings(hosts=(host,))


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"origin": "http://localhost"},
        {"origin": "http://localhost", "sec_fetch_site": "same-origin"},
        {"origin": "https://proxy.example", "sec_fetch_site": "same-origin"},
        {"sec_fetch_site": "none"},
    ],
)
def test_programs_and_own_pages_may_change_things(headers: dict[str, str]) -> None:
    assert code("POST", **headers) is None


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "http://localhost.evil.example"},
        {"origin": "http://localhost:3000"},
        {"origin": "null"},
        {"origin": ""},
        {"origin": "http://evil.example", "sec_fetch_site": "cross-site"},
        {"origin": "http://localhost", "sec_fetch_site": "cross-site"},
        {"origin": "http://evil.example", "sec_fetch_site": "none"},
        {"sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "same-site"},
        {"sec_fetch_site": "unknown"},
    ],
)
@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
def test_pages_of_other_sites_may_not(headers: dict[str, str], method: str) -> None:
    assert code(method, **headers) == "origin_not_allowed"
    assert code("GET", **headers) is None  # the browser keeps the answer from them


def test_pages_that_cors_allows_may() -> None:
    for origins in ((PAGE,), ("*",)):
        settings = HttpSettings(cors=CorsSettings(origins=origins))
        assert code("POST", settings=settings, origin=PAGE, sec_fetch_site="cross-site") is None
    assert code("POST", settings=HttpSettings(cors=CorsSettings(origins=(PAGE,))), origin="null")


# Over a socket. With keys: see test_attacks.


@pytest.fixture(scope="module")
def whole(tokenizer: ChatTokenizer) -> Whole:
    return whole_gateway(tokenizer)


@pytest.fixture(scope="module")
def running(whole: Whole) -> Iterator[Served]:
    with served(whole.app, ConnectionBounds()) as server:
        yield server


def ask(server: Served, method: str, path: str, *lines: str, body: bytes = b"") -> Answered:
    head = [
        f"{method} {path} HTTP/1.1",
        *lines,
        f"Content-Length: {len(body)}",
        "Connection: close",
    ]
    return answer(server.ask("\r\n".join([*head, "", ""]).encode() + body))


FORM = b'--x\r\ncontent-disposition: form-data; name="model"\r\n\r\nauto\r\n--x--'


def test_a_foreign_pages_form_reaches_nothing(running: Served) -> None:
    lines = ("Host: 127.0.0.1", "Content-Type: multipart/form-data; boundary=x")
    path = "/v1/audio/transcriptions"
    foreign = ask(running, "POST", path, *lines, "Origin: http://evil.example", body=FORM)
    assert (foreign.status, foreign.code) == (403, "origin_not_allowed")
    assert ask(running, "POST", path, *lines, body=FORM).status == 400  # no tier has it


@pytest.mark.parametrize("path", ["/", "/v1/models", "/metrics", "/v1/dashboard", "/nowhere"])
def test_a_name_that_is_bound_anew_reads_nothing(running: Served, path: str) -> None:
    found = ask(running, "GET", path, "Host: evil.example", "Authorization: Bearer none")
    assert (found.status, found.code) == (403, "host_not_allowed")
    assert ask(running, "GET", "/health", "Host: 10.0.0.7:8000").status == 200  # a load balancer
