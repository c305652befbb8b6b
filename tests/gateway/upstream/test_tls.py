"""Errors of TLS have clear messages. The certificates are real, made by openssl."""

import asyncio
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvloop
from aiohttp.client_reqrep import ConnectionKey

from outrider.gateway.contract.errors.tree import UpstreamError
from outrider.gateway.settings.tiers import TimeoutSettings
from outrider.gateway.upstream.connection_errors import error_of
from outrider.gateway.upstream.transport import Transport
from outrider.gateway.upstream.waits import ExchangeLimits
from tests.gateway.upstream.raw_server import Connection, RawServer, answering, raw_server, whole

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the keys")

TIMEOUTS = TimeoutSettings(connect_s=10, first_token_s=10, between_tokens_s=10, total_s=10)
NEW_KEY = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"

Run = Callable[[Coroutine[Any, Any, None]], None]
on_both_loops = pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])


@dataclass(frozen=True)
class Certificates:
    """A folder of keys and certificates, all but one signed by the authority `ca`."""

    folder: Path

    @property
    def ca_file(self) -> Path:
        return self.folder / "ca.pem"

    def openssl(self, command: str, *more: str) -> None:
        subprocess.run(
            ["openssl", *command.split(), *more], cwd=self.folder, check=True, capture_output=True
        )

    def sign(self, name: str, host: str, *, num_days: int = 30) -> None:
        self.openssl(f"req {NEW_KEY} -keyout {name}.key -out {name}.csr -subj /CN={name}")
        (self.folder / f"{name}.ext").write_text(f"subjectAltName={host}")
        signing = "-CA ca.pem -CAkey ca.key -CAcreateserial"
        self.openssl(
            f"x509 -req -in {name}.csr {signing} -days {num_days} -extfile {name}.ext"
            f" -out {name}.pem"
        )

    def server(self, name: str) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.folder / f"{name}.pem", self.folder / f"{name}.key")
        return context


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    made = Certificates(tmp_path_factory.mktemp("tls"))
    authority = "-keyout ca.key -out ca.pem -days 30 -subj /CN=authority"
    usage = "keyUsage=critical,keyCertSign"
    made.openssl(f"req -x509 {NEW_KEY} {authority} -addext {usage}")
    alone = "-keyout alone.key -out alone.pem -days 30 -subj /CN=alone"
    made.openssl(f"req -x509 {NEW_KEY} {alone} -addext subjectAltName=IP:127.0.0.1")
    made.sign("good", "IP:127.0.0.1,DNS:localhost")
    made.sign("other_address", "IP:127.0.0.2")
    made.sign("other_host", "DNS:elsewhere.example")
    made.sign("expired", "IP:127.0.0.1,DNS:localhost", num_days=-1)
    return made


async def ask(url: str, ca_file: Path | None) -> bytes:
    transport = Transport(tier="cloud", timeouts=TIMEOUTS, max_connections=4, ca_file=ca_file)
    await transport.start()
    try:
        return await (await transport.post(url, {}, b"{}")).read()
    finally:
        await transport.close()


@on_both_loops
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_file_of_certificates_makes_a_server_trusted(
    made: Certificates, run: Run, host: str
) -> None:
    async def main() -> None:
        async with raw_server(answering(whole(b"hello")), tls=made.server("good")) as server:
            assert await ask(f"https://{host}:{server.port}/v1", made.ca_file) == b"hello"

    run(main())


@pytest.mark.slow_cases
@on_both_loops
@pytest.mark.parametrize(
    ("name", "host", "trusts_authority", "words"),
    [
        ("expired", "127.0.0.1", True, "its certificate has expired"),
        ("alone", "127.0.0.1", True, "its certificate is self-signed; name it in ca_file"),
        ("good", "127.0.0.1", False, "from an authority that is not trusted here; name it in ca"),
        ("other_address", "127.0.0.1", True, "its certificate is for another address"),
        ("other_host", "localhost", True, "its certificate is for another host name"),
    ],
)
def test_a_certificate_that_is_not_accepted(
    made: Certificates, run: Run, name: str, host: str, trusts_authority: bool, words: str
) -> None:
    async def main() -> None:
        async with raw_server(answering(whole(b"hello")), tls=made.server(name)) as server:
            ca_file = made.ca_file if trusts_authority else None
            with pytest.raises(UpstreamError) as caught:
                await ask(f"https://{host}:{server.port}/v1", ca_file)
            assert caught.value.failure == "tls"
            assert str(caught.value).startswith("The cloud tier cannot be reached over TLS: ")
            assert words in str(caught.value)
            assert host not in str(caught.value)
            assert server.requests == []

    run(main())


@on_both_loops
def test_a_server_that_speaks_no_tls(run: Run) -> None:
    async def handler(connection: Connection, server: RawServer) -> None:
        await connection.reader.read(1)
        await connection.send(whole(b"speak up", status="400 Bad Request"))

    async def main() -> None:
        async with raw_server(handler) as server:
            with pytest.raises(UpstreamError, match=r"is the URL https by mistake\?$") as caught:
                await ask(f"https://127.0.0.1:{server.port}/v1", None)
            assert caught.value.failure == "tls"

    run(main())


@on_both_loops
def test_a_server_that_speaks_only_tls(made: Certificates, run: Run) -> None:
    async def main() -> None:
        async with raw_server(answering(whole(b"hello")), tls=made.server("good")) as server:
            with pytest.raises(UpstreamError) as caught:
                await ask(f"http://127.0.0.1:{server.port}/v1", None)
            assert caught.value.failure in ("tls", "reset")

    run(main())


@pytest.mark.uvloop
async def test_an_alert_of_tls_is_known_as_one() -> None:
    async def handler(connection: Connection, server: RawServer) -> None:
        await connection.request()
        await connection.send(b"\x15\x03\x03\x00\x02\x02\x50")

    async with raw_server(handler) as server:
        with pytest.raises(UpstreamError, match="begin its URL with https") as caught:
            await ask(server.url, None)
        assert caught.value.failure == "tls"


@contextmanager
def blocking_server(context: ssl.SSLContext) -> Iterator[str]:
    """Make one handshake, and tell the client why it failed: asyncio's servers just hang up."""

    def serve() -> None:
        with listening, suppress(OSError):
            plain, _ = listening.accept()
            with plain, context.wrap_socket(plain, server_side=True) as connection:
                connection.recv(1)

    listening = socket.create_server(("127.0.0.1", 0))
    listening.settimeout(10)
    url = f"https://127.0.0.1:{listening.getsockname()[1]}/v1"
    thread = threading.Thread(target=serve)
    thread.start()
    yield url
    thread.join()


@on_both_loops
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_a_server_that_wants_a_certificate_of_ours(
    made: Certificates, run: Run, version: ssl.TLSVersion
) -> None:
    context = made.server("good")
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(made.ca_file)
    context.minimum_version = context.maximum_version = version

    async def main() -> None:
        with blocking_server(context) as url:
            with pytest.raises(UpstreamError) as caught:
                await ask(url, made.ca_file)
            # Since 1.3 the client is done before the server has looked at its certificate: what it
            # sends meanwhile may break before the alert is read.
            if version == ssl.TLSVersion.TLSv1_2:
                assert caught.value.failure == "tls"
                assert "the handshake failed (sslv3 alert handshake failure)" in str(caught.value)
            elif caught.value.failure != "reset":
                assert "requires a client certificate" in str(caught.value)

    run(main())


@on_both_loops
@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
def test_a_server_whose_version_is_too_old(made: Certificates, run: Run) -> None:
    context = made.server("good")
    context.maximum_version = ssl.TLSVersion.TLSv1_1
    context.set_ciphers("ALL:@SECLEVEL=0")

    async def main() -> None:
        with blocking_server(context) as url:
            with pytest.raises(UpstreamError) as caught:
                await ask(url, made.ca_file)
            assert caught.value.failure == "tls"
            assert "the handshake failed (" in str(caught.value)
            assert "protocol" in str(caught.value)

    run(main())


@pytest.mark.parametrize(
    ("code", "words"), [(9, "not valid yet"), (23, "not accepted (certificate revoked)")]
)
def test_other_faults_of_a_certificate(code: int, words: str) -> None:
    cause = ssl.SSLCertVerificationError(1, "certificate verify failed")
    cause.verify_code = code
    cause.verify_message = "certificate revoked"
    key = ConnectionKey("cloud.example", 443, True, True, None, None, None)
    error = aiohttp.ClientConnectorCertificateError(key, cause)
    exchange = ExchangeLimits(tier="cloud", replica="x:1", timeouts=TIMEOUTS, started_s=0)
    assert words in str(error_of(error, exchange))


def test_an_alert_behind_the_handshake_is_told_as_a_cause() -> None:
    alert = ssl.SSLError(1, "tlsv13 alert certificate required")
    alert.reason = "TLSV13_ALERT_CERTIFICATE_REQUIRED"
    error = aiohttp.ClientOSError(1, "lost")
    error.__cause__ = alert
    exchange = ExchangeLimits(tier="cloud", replica="x:1", timeouts=TIMEOUTS, started_s=0)
    assert "requires a client certificate" in str(error_of(error, exchange))


@pytest.mark.parametrize("content", [None, "", "no certificate"])
@pytest.mark.uvloop
async def test_a_file_that_holds_no_certificates(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "ca.pem"
    if content is not None:
        file.write_text(content)

    with pytest.raises(ValueError, match=r"ca_file .* cannot be used: .*PEM"):
        await ask("https://127.0.0.1:1/v1", file)
