"""Signing in at servers: keys that are rotated, tokens that expire, requests that are signed."""

import asyncio
import hashlib
import hmac
import re
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.shared.mock_upstream import MockScript
from outrider.gateway.contract.errors.tree import UpstreamError
from outrider.gateway.settings.tiers import UpstreamSettings
from outrider.gateway.settings.tree import SettingsError, load_settings
from outrider.gateway.upstream.credentials.base import CredentialError, SignedRequest, bearer
from outrider.gateway.upstream.credentials.rotating import (
    CommandKey,
    RotatingCredential,
    Secret,
    token_secret,
)
from outrider.gateway.upstream.credentials.vendors import AwsSignature, missing_library
from outrider.gateway.wiring.credentials import LiveSecrets, credential_complaints
from tests.gateway.conftest import wait_for
from tests.gateway.upstream.tiers import Bench, bench, until

REQUEST = SignedRequest(method="POST", url="https://host/v1/x", headers={}, body=b"{}")


def run(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), 60))


async def answered(under_test: Bench) -> None:
    answer = under_test.answer(stream=False)
    try:
        await answer.whole()
    finally:
        await answer.aclose()


def sent(under_test: Bench, name: str = "authorization") -> str | None:
    return under_test.mocks[0].requests[-1].headers.get(name)


# ---- files and commands ------------------------------------------------------------------------


def test_a_mounted_secret_is_read_again_when_it_changes(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("first-key\n")

    async def work() -> None:
        async with bench(MockScript(), api_key_file=file) as under_test:
            under_test.mocks[0].api_key = "first-key"
            await answered(under_test)
            assert sent(under_test) == "Bearer first-key"
            file.write_text("second-key-longer\n")
            # The server has changed its key already: the rejected request is sent once more.
            under_test.mocks[0].api_key = "second-key-longer"
            await answered(under_test)
            assert sent(under_test) == "Bearer second-key-longer"
            assert under_test.booked[-1].outcome == "answered"
            assert "second-key-longer" in LiveSecrets((), [under_test.tier.credential])
            file.unlink()  # while it is replaced, the key in use stays in use
            await answered(under_test)

    run(work)


def test_a_revoked_key_is_no_endless_loop(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("revoked-key")

    async def work() -> None:
        async with bench(MockScript(), api_key_file=file, max_retries=2) as under_test:
            under_test.mocks[0].api_key = "another"
            with pytest.raises(UpstreamError) as refused:
                await answered(under_test)
            assert refused.value.failure == "not_trusted"
            assert under_test.mocks[0].num_requests == 1
            assert "revoked-key" not in str(refused.value)

    run(work)


def test_a_command_prints_the_key_and_no_shell_sees_it(tmp_path: Path) -> None:
    script = tmp_path / "print key.py"
    script.write_text("import sys; print(sys.argv[1])")
    command = f"{sys.executable} '{script}' 'key-$HOME;ls'"

    async def work() -> None:
        async with bench(MockScript(), api_key_command=command) as under_test:
            await answered(under_test)
            assert sent(under_test) == "Bearer key-$HOME;ls"

    run(work)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import sys; sys.exit(3)", "ended with status 3"),
        ("print('x' * 100_000)", "printed more than 65536 bytes"),
        ("print()", "is empty"),
        ("print('two words')", "characters that no key has"),
    ],
)
def test_a_command_that_fails_is_told_and_bounded(code: str, said: str) -> None:
    async def work() -> None:
        command = CommandKey([sys.executable, "-c", code], "the command", 60, time.monotonic)
        with pytest.raises(CredentialError, match=said):
            await command.fetch()

    run(work)


def test_a_command_that_hangs_is_ended_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.gateway.upstream.credentials.rotating._FETCH_S", 1.0)
    pid = tmp_path / "pid"
    code = (
        "import subprocess, sys, time, pathlib;"
        "c = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
        f"pathlib.Path({str(pid)!r}).write_text(str(c.pid)); time.sleep(600)"
    )

    async def work() -> None:
        command = CommandKey([sys.executable, "-c", code], "the command", 60, time.monotonic)
        with pytest.raises(CredentialError, match="took longer"):
            await command.fetch()

    run(work)
    if pid.exists():  # a slow machine may not have come so far
        status = Path(f"/proc/{pid.read_text()}/stat")
        wait_for(lambda: not status.exists() or " Z " in status.read_text())


# ---- tokens ------------------------------------------------------------------------------------


class Tokens:
    """A token endpoint: what it gives, how often it was asked, and whether it hangs."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_asked = 0
        self.error: Exception | None = None
        self.hangs = False

    async def fetch(self) -> Secret:
        self.num_asked += 1
        if self.hangs:
            await asyncio.Event().wait()
        if self.error is not None:
            raise self.error
        return token_secret(
            f"token-{self.num_asked}", 1_000 + 600, clock_s=self.now_s, wall_s=1_000
        )

    def credential(self, timeout_s: float = 10.0) -> RotatingCredential:
        return RotatingCredential(
            self.fetch,
            name="tiers.cloud",
            as_headers=bearer,
            clock=lambda: self.now_s,
            timeout_s=timeout_s,
        )


async def token(credential: RotatingCredential) -> str:
    return (await credential.headers(REQUEST))["authorization"].removeprefix("Bearer ")


def test_a_token_is_fetched_once_for_all_and_renewed_before_it_expires() -> None:
    async def work() -> None:
        tokens = Tokens()
        credential = tokens.credential()
        assert set(await asyncio.gather(*(token(credential) for _ in range(9)))) == {"token-1"}
        assert tokens.num_asked == 1
        tokens.now_s = 350.0  # 250 s before its end: renewed beside the request
        assert await token(credential) == "token-1"
        await until(lambda: credential.secrets[0] == "token-2")
        assert await token(credential) == "token-2"
        assert credential.secrets == ("token-2", "token-1")

    run(work)


def test_an_endpoint_that_fails_or_hangs_leaves_a_good_token_in_use() -> None:
    async def work() -> None:
        tokens = Tokens()
        credential = tokens.credential(timeout_s=0.01)
        assert await token(credential) == "token-1"
        tokens.error = OSError("down")
        tokens.now_s = 400.0
        for _ in range(5):
            assert await token(credential) == "token-1"
            await asyncio.sleep(0)
        assert tokens.num_asked == 2, "after a failure it is left alone for a while"
        tokens.now_s = 601.0  # expired: no request is sent with it
        tokens.error, tokens.hangs = None, True
        with pytest.raises(CredentialError, match=r"took longer than 0.01 s"):
            await token(credential)
        with pytest.raises(CredentialError):
            await token(credential)
        assert tokens.num_asked == 3, "no second fetch beside one that hangs"
        tokens.hangs = False
        assert credential._task is not None
        credential._task.cancel()
        await asyncio.sleep(0)
        tokens.now_s = 700.0
        assert await token(credential) == "token-4"

    run(work)


def test_a_rejected_token_is_fetched_anew_once() -> None:
    async def work() -> None:
        tokens = Tokens()
        credential = tokens.credential()
        rejected = await credential.headers(REQUEST)
        renewed = await asyncio.gather(*(credential.renew(rejected) for _ in range(4)))
        assert renewed == [True] * 4
        assert tokens.num_asked == 2
        tokens.error = OSError("down")
        assert not await credential.renew(await credential.headers(REQUEST))

    run(work)


def test_without_a_credential_the_tier_fails_and_is_not_blamed(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("")

    async def work() -> None:
        async with bench(MockScript(), api_key_file=file) as under_test:
            for _ in range(8):
                with pytest.raises(UpstreamError) as failed:
                    await answered(under_test)
                assert failed.value.failure == "no_credential"
                assert "api_key_file is empty" in str(failed.value)
            assert under_test.tier.is_available
            assert not under_test.mocks[0].requests

    run(work)


# ---- vendors -----------------------------------------------------------------------------------


def test_azures_key_goes_into_its_own_header(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("azure-key")

    async def work() -> None:
        options = {"api_key_file": file, "sign_in": "api_key_header"}
        async with bench(MockScript(), **options) as under_test:
            await answered(under_test)
            assert (sent(under_test, "api-key"), sent(under_test)) == ("azure-key", None)

    run(work)


def test_aws_requests_are_signed_as_the_specification_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("botocore")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKID")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-access-key")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "session-token")
    url = "https://bedrock-runtime.us-east-1.amazonaws.com/openai/v1/chat/completions"
    request = SignedRequest(
        method="POST", url=url, headers={"content-type": "application/json"}, body=b'{"a": 1}'
    )

    async def work() -> None:
        signature = AwsSignature("us-east-1")
        headers = await signature.headers(request)
        assert _is_signed(request, headers, "secret-access-key", "us-east-1")
        assert not _is_signed(request, headers, "another", "us-east-1")
        assert headers["x-amz-security-token"] == "session-token"
        assert signature.secrets == ("secret-access-key", "session-token")

    run(work)


def _is_signed(
    request: SignedRequest, headers: Mapping[str, str], secret: str, region: str
) -> bool:
    """Check a signature by the steps of AWS's documentation of SigV4."""
    found = re.fullmatch(
        r"AWS4-HMAC-SHA256 Credential=AKID/(\d{8})/([a-z0-9-]+)/bedrock/aws4_request, "
        r"SignedHeaders=([a-z0-9;-]+), Signature=([0-9a-f]{64})",
        headers["authorization"],
    )
    assert found is not None
    day, _, names, signature = found.groups()
    host, path = request.url.removeprefix("https://").split("/", 1)
    values = {**headers, "host": host}
    assert day == headers["x-amz-date"][:8]
    return signature == signature_v4(
        (request.method, f"/{path}", "", request.body),
        {name: values[name] for name in names.split(";")},
        secret,
        (region, "bedrock"),
    )


def signature_v4(
    asked: tuple[str, str, str, bytes],
    headers: Mapping[str, str],
    secret: str,
    place: tuple[str, str],
) -> str:
    """Sign by the steps of AWS's documentation. asked: method, path, query and body; place: region
    and service; headers: those to be signed, by name.
    """
    method, path, query, body = asked
    lines = (f"{name}:{value}" for name, value in headers.items())
    digest = hashlib.sha256(body).hexdigest()
    canonical = "\n".join((method, path, query, *lines, "", ";".join(headers), digest))
    moment = headers["x-amz-date"]
    parts = (moment[:8], *place, "aws4_request")
    hashed = hashlib.sha256(canonical.encode()).hexdigest()
    text = "\n".join(("AWS4-HMAC-SHA256", moment, "/".join(parts), hashed))
    key = f"AWS4{secret}".encode()
    for part in parts:
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def test_our_steps_give_the_signatures_that_aws_has_published() -> None:
    """The example of the documentation (IAM's ListUsers), and get-vanilla of AWS's test suite."""
    secret, moment = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY", "20150830T123600Z"
    documented = signature_v4(
        ("GET", "/", "Action=ListUsers&Version=2010-05-08", b""),
        {
            "content-type": "application/x-www-form-urlencoded; charset=utf-8",
            "host": "iam.amazonaws.com",
            "x-amz-date": moment,
        },
        secret,
        ("us-east-1", "iam"),
    )
    assert documented == "5d672d79c15b13162d9279b0855cfba6789a8edb4c82c400e06b5924a6f2b5d7"
    vanilla = signature_v4(
        ("GET", "/", "", b""),
        {"host": "example.amazonaws.com", "x-amz-date": moment},
        secret,
        ("us-east-1", "service"),
    )
    assert vanilla == "5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31"


# ---- settings ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("preset", "more", "url"),
    [
        ("groq", {}, "https://api.groq.com/openai/v1"),
        ("azure", {"resource": "my-res"}, "https://my-res.openai.azure.com/openai/v1"),
        (
            "bedrock",
            {"region": "eu-west-1"},
            "https://bedrock-runtime.eu-west-1.amazonaws.com/openai/v1",
        ),
        (
            "vertex",
            {"project": "my-proj", "region": "europe-west4"},
            "https://europe-west4-aiplatform.googleapis.com/v1/projects/my-proj/locations/"
            "europe-west4/endpoints/openapi",
        ),
        (
            "vertex",
            {"project": "my-proj", "region": "global"},
            "https://aiplatform.googleapis.com/v1/projects/my-proj/locations/global/endpoints/"
            "openapi",
        ),
    ],
)
def test_a_preset_fills_in_what_is_not_set(preset: str, more: dict[str, str], url: str) -> None:
    made = UpstreamSettings.model_validate({"preset": preset, **more})
    assert made.url == (url,)
    own = UpstreamSettings.model_validate({"preset": preset, "url": "http://proxy/v1", **more})
    assert own.url == ("http://proxy/v1",)
    assert own.sign_in == made.sign_in


@pytest.mark.parametrize(
    ("tier", "said"),
    [
        ({"preset": "grok"}, "input should be"),
        ({"preset": "bedrock"}, "needs region"),
        ({"preset": "bedrock", "region": "us-east"}, "cannot be one of bedrock"),
        ({"preset": "bedrock", "region": "evil.example/x"}, "cannot be one of bedrock"),
        ({"preset": "vertex", "region": "us-central1"}, "needs project"),
        ({"preset": "vertex", "region": "us", "project": "my-proj"}, "cannot be one of vertex"),
        ({"preset": "azure", "resource": "a.b"}, "cannot be one of azure"),
        ({"preset": "groq", "sign_in": "aws"}, "is not one of groq's"),
        ({"url": "http://x/v1", "sign_in": "aws"}, "needs region"),
        ({"url": "http://x/v1", "api_key_env": "A", "api_key_file": "b"}, "only one of"),
    ],
)
def test_presets_and_places_that_cannot_be_are_refused(tier: dict[str, Any], said: str) -> None:
    flags = {f"tiers.cloud.{name}": value for name, value in tier.items()}
    with pytest.raises(SettingsError, match=said):
        load_settings(flags=flags, environ={})


def test_what_keeps_a_tier_from_signing_in_is_told_at_the_start(tmp_path: Path) -> None:
    def told(**tier: Any) -> str:
        options = UpstreamSettings.model_validate({"url": "http://x/v1", **tier})
        return "\n".join(credential_complaints("cloud", options, {"BAD": "two words"}))

    assert "GROQ_API_KEY is not set" in told(preset="groq")
    assert "characters that no key has" in told(api_key_env="BAD")
    assert "two words" not in told(api_key_env="BAD")
    assert "no such file" in told(api_key_file=str(tmp_path / "gone"))
    assert "no program" in told(api_key_command="no-such-program-here --key")
    if missing_library("entra") is not None:
        assert "pip install azure-identity" in told(sign_in="entra")
