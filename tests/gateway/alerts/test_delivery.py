"""Alerts reach the webhook once, signed, whatever it answers."""

import asyncio
import base64
from collections.abc import Awaitable, Callable

import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry

from outrider.gateway.alerts.conditions import Alert
from outrider.gateway.alerts.delivery import Webhook, signed
from outrider.gateway.settings.tree import SettingsError, load_settings
from tests.gateway.alerts.receiver import SECRET, Receiver, receiving
from tests.gateway.waiting import until

ALERT = Alert(event="breaker.opened", at_s=1_000.5, data={"tier": "cloud"})


def test_the_signature_is_that_of_standard_webhooks() -> None:
    key = base64.b64decode("MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    body = b'{"test": 2432232314}'
    found = signed(key, "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330.5, body)
    assert found["webhook-timestamp"] == "1614265330"
    assert found["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


async def no_time(_: float) -> None:
    """Wait for nothing."""


def delivered(
    answers: list[int | Callable[[web.Request], Awaitable[web.StreamResponse]]],
    *alerts: Alert,
    timeout_s: float = 10.0,
) -> tuple[Receiver, dict[str, float]]:
    """Deliver the alerts; return what came, and the metric by state."""

    async def run() -> tuple[Receiver, dict[str, float]]:
        registry = CollectorRegistry()
        async with receiving() as receiver:
            receiver.answers = answers
            webhook = Webhook(receiver.settings(timeout_s=timeout_s), registry, sleep=no_time)
            for alert in alerts:
                webhook.offer(alert)
            task = asyncio.create_task(webhook.run())
            await webhook.close()
            task.cancel()
        (family,) = registry.collect()
        counts = {
            each.labels["state"]: each.value
            for each in family.samples
            if each.name == "outrider_alerts_total"
        }
        return receiver, counts

    return asyncio.run(run())


def test_an_alert_is_posted_in_the_standard_form() -> None:
    receiver, counts = delivered([], ALERT)
    (document,) = receiver.got
    assert document == {
        "type": "breaker.opened",
        "timestamp": "1970-01-01T00:16:40.500+00:00",
        "data": {"tier": "cloud"},
    }
    assert counts == {"sent": 1}


def test_failures_that_may_pass_are_tried_again_under_one_id() -> None:
    receiver, counts = delivered([500, 429, 503], ALERT)
    assert receiver.ids == [ALERT.alert_id] * 4
    assert counts == {"sent": 1}


@pytest.mark.parametrize("status", [302, 307, 400, 401, 410])
def test_refusals_are_not_tried_again_and_redirects_not_followed(status: int) -> None:
    receiver, counts = delivered([status], ALERT)
    assert receiver.paths == ["/alerts"]
    assert counts == {"failed": 1}


def test_a_webhook_that_always_fails_is_given_up() -> None:
    receiver, counts = delivered([500] * 20, ALERT, Alert(event="router.drifted", at_s=1.0))
    assert [each["type"] for each in receiver.got] == (
        ["breaker.opened"] * 8 + ["router.drifted"] * 8
    )
    assert counts == {"failed": 2}


def test_too_many_alerts_are_dropped_and_counted() -> None:
    alerts = [Alert(event="budget.reached", at_s=1.0, data={"n": n}) for n in range(258)]
    receiver, counts = delivered([], *alerts)
    assert [each["data"]["n"] for each in receiver.got] == [*range(256)]
    assert counts == {"dropped": 2, "sent": 256}


def test_an_answer_of_100_mb_is_not_read() -> None:
    sent_bytes = 0

    async def endless(request: web.Request) -> web.StreamResponse:
        nonlocal sent_bytes
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(1_600):
            await response.write(b"x" * 65_536)
            sent_bytes += 65_536
        return response

    _, counts = delivered([endless], ALERT)
    assert counts == {"sent": 1}
    assert sent_bytes < 50 * 2**20


def test_a_webhook_that_hangs_is_given_up() -> None:
    async def hang(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(3600)
        raise AssertionError

    receiver, counts = delivered([hang], ALERT, timeout_s=0.1)
    assert receiver.ids == [ALERT.alert_id] * 2  # the second try was answered
    assert counts == {"sent": 1}


def test_an_address_where_nothing_listens_fails_alone() -> None:
    async def run() -> int | str:
        async with receiving() as receiver:
            settings = receiver.settings()
        await until(lambda: True)
        return await Webhook(settings).post(ALERT)

    assert asyncio.run(run()) == "ClientConnectorError"


@pytest.mark.parametrize(
    ("alerts", "complaint"),
    [
        ({"url": "http://hooks.example/x", "secret": SECRET}, "https:// address"),
        ({"url": "https://hooks.example:99999/x", "secret": SECRET}, "alerts.url .*Port"),
        ({"url": "https://[hooks.example/x", "secret": SECRET}, "alerts.url .*Invalid"),
        ({"url": "https://hooks.example/x"}, "alerts.secret: is needed"),
        ({"url": "https://hooks.example/x", "secret": "mine"}, "24 to 64 bytes"),
        ({"url": "https://hooks.example/x", "secret": "whsec_c2hvcnQ="}, "24 to 64 bytes"),
    ],
)
def test_settings_that_cannot_work_are_refused(alerts: dict[str, str], complaint: str) -> None:
    flags = {f"alerts.{name}": value for name, value in alerts.items()}
    with pytest.raises(SettingsError, match=complaint) as refused:
        load_settings(flags=flags, environ={})
    assert "hooks.example" not in str(refused.value)  # its path may hold a token


@pytest.mark.parametrize(
    "alerts",
    [
        {"url": "http://127.0.0.1:9/x"},
        {"url": "http://[::1]/x"},
        {"url": "https://hooks.example/x"},
        {"url": "https://hooks.example/x", "budget_shares": "0.9,1"},
    ],
)
def test_safe_addresses_are_taken(alerts: dict[str, object]) -> None:
    flags = {f"alerts.{name}": value for name, value in {**alerts, "secret": SECRET}.items()}
    assert load_settings(flags=flags, environ={}).alerts.url is not None
