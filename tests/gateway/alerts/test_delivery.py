"""Alerts reach the webhook once, signed, whatever it answers."""

import asyncio
import base64

import pytest
from prometheus_client import CollectorRegistry

from outrider.gateway.alerts.conditions import Alert
from outrider.gateway.alerts.delivery import Webhook, signed
from outrider.gateway.settings.tree import SettingsError, load_settings
from tests.gateway.checks.services import KEY, SECRET, Said, Service, running_service
from tests.gateway.waiting import wait_for

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
    answers: list[Said], *alerts: Alert, timeout_s: float = 10.0
) -> tuple[Service, dict[str, float]]:
    """Deliver the alerts to a webhook with these answers, then 204; return the metric by state."""
    registry = CollectorRegistry()

    async def run(service: Service) -> None:
        settings = service.alert_settings(timeout_s=timeout_s)
        webhook = Webhook(settings, registry, sleep=no_time)
        for alert in alerts:
            webhook.offer(alert)
        task = asyncio.create_task(webhook.run())
        await webhook.close()
        task.cancel()

    with running_service(lambda _: answers.pop(0) if answers else 204) as service:
        asyncio.run(run(service))
        (family,) = registry.collect()
        samples = (each for each in family.samples if each.name == "outrider_alerts_total")
        return service, {each.labels["state"]: each.value for each in samples}


def test_an_alert_is_posted_in_the_standard_form_and_signed() -> None:
    service, counts = delivered([], ALERT)
    (document,) = service.questions
    assert document == {
        "type": "breaker.opened",
        "timestamp": "1970-01-01T00:16:40.500+00:00",
        "data": {"tier": "cloud"},
    }
    assert counts == {"sent": 1}
    (headers,) = service.headers
    moment = int(headers["webhook-timestamp"])
    assert headers.items() >= signed(KEY, ALERT.alert_id, moment, service.bodies[0]).items()


@pytest.mark.parametrize(
    ("answers", "num_tries", "outcome"),
    [
        ([500, 429, 503], 4, "sent"),
        ([500] * 20, 8, "failed"),
        *(([status], 1, "failed") for status in (302, 307, 400, 401, 410)),
    ],
)
def test_what_may_pass_is_tried_again_under_one_id_and_redirects_are_not_followed(
    answers: list[Said], num_tries: int, outcome: str
) -> None:
    service, counts = delivered(answers, ALERT)
    assert [each["webhook-id"] for each in service.headers] == [ALERT.alert_id] * num_tries
    assert counts == {outcome: 1}


def test_too_many_alerts_are_dropped_and_counted() -> None:
    alerts = [Alert(event="budget.reached", at_s=1.0, data={"n": n}) for n in range(258)]
    service, counts = delivered([], *alerts)
    assert [each["data"]["n"] for each in service.questions] == [*range(256)]
    assert counts == {"dropped": 2, "sent": 256}


def test_an_answer_of_100_mb_is_not_read() -> None:
    service, counts = delivered([b"x" * 100_000_000], ALERT)
    assert counts == {"sent": 1}
    wait_for(lambda: service.num_cut == 1)


def test_a_webhook_that_hangs_is_given_up() -> None:
    service, counts = delivered([None], ALERT, timeout_s=0.1)
    assert len(service.headers) == 2  # the second try was answered
    assert counts == {"sent": 1}


def test_an_address_where_nothing_listens_fails_alone() -> None:
    with running_service(lambda _: 204) as service:
        settings = service.alert_settings()
    assert asyncio.run(Webhook(settings).post(ALERT)) == "ClientConnectorError"


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
