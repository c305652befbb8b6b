"""Addresses on which a gateway without keys may listen; durations as people write them."""

import pytest
from pydantic import SecretStr

from outrider.gateway.settings.keys import KeyMode, KeySettings
from outrider.gateway.settings.loopback import is_loopback
from outrider.gateway.settings.sections import ServerSettings
from outrider.gateway.settings.tree import Settings, SettingsError
from outrider.gateway.tenancy.keys.loopback import listen_host
from outrider.gateway.tenancy.keys.timestamps import date_text, duration_s, expiry_s
from outrider.gateway.wiring.start import serving_host


def settings(host: str, mode: KeyMode = "auto") -> Settings:
    return Settings(server=ServerSettings(host=host), keys=KeySettings(mode=mode))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.9.9.9"])
@pytest.mark.parametrize("mode", ["auto", "off", "required"])
def test_this_machine_alone_is_always_well(host: str, mode: KeyMode) -> None:
    assert listen_host(settings(host, mode), has_keys=False) == (host, None)


@pytest.mark.parametrize(
    ("host", "own"), [("0.0.0.0", "127.0.0.1"), ("10.1.2.3", "127.0.0.1"), ("::", "::1")]
)
def test_without_keys_only_this_machine_may_ask(host: str, own: str) -> None:
    chosen, warning = listen_host(settings(host), has_keys=False)
    assert chosen == own
    assert warning is not None
    assert host in warning
    assert "outrider keys create" in warning
    assert listen_host(settings(host), has_keys=True) == (host, None)
    assert listen_host(settings(host, "required"), has_keys=False) == (host, None)


def test_a_key_of_the_settings_opens_the_gateway_to_others() -> None:
    keys = KeySettings(api_key=SecretStr("a-key-of-these-settings"))
    opened = Settings(server=ServerSettings(host="0.0.0.0"), keys=keys)
    assert listen_host(opened, has_keys=False) == ("0.0.0.0", None)
    assert serving_host(opened) == ("0.0.0.0", None)


def test_an_open_door_is_told_of() -> None:
    host, warning = listen_host(settings("0.0.0.0", "off"), has_keys=True)
    assert host == "0.0.0.0"
    assert warning is None
    host, warning = listen_host(settings("0.0.0.0", "off"), has_keys=False)
    assert host == "0.0.0.0"
    assert warning is not None
    assert "keys.mode is off" in warning


def test_names_of_hosts_are_not_looked_up() -> None:
    assert not is_loopback("gateway.example")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("15m", 900), ("1.5h", 5400), ("30d", 2_592_000), ("2 W", 1_209_600)],
)
def test_durations(text: str, seconds: float) -> None:
    assert duration_s(text, "--grace") == seconds
    assert expiry_s(text, "--expires", 1000.0) == 1000 + seconds


def test_dates_are_utcs_unless_they_say_otherwise() -> None:
    assert expiry_s("1970-01-03", "--expires", 0.0) == 172_800
    assert expiry_s("1970-01-01T12:00", "--expires", 0.0) == 43_200
    assert expiry_s("1970-01-01T12:00+02:00", "--expires", 0.0) == 36_000
    assert date_text(172_800) == "1970-01-03"
    assert date_text(43_200) == "1970-01-01 12:00"
    assert date_text(None) == "-"


@pytest.mark.parametrize("text", ["", "soon", "-3d", "30", "1e9d", "2027-13-01", "1970-01-01"])
def test_other_times_are_refused_in_words(text: str) -> None:
    with pytest.raises(SettingsError, match=r"--expires .*(write it as|in the past)"):
        expiry_s(text, "--expires", 1000.0)
