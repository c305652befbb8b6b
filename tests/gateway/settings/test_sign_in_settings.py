"""Settings of sign-in: what cannot be safe does not start."""

from typing import Any

import pytest

from outrider.gateway.settings.tree import SettingsError, load_settings

GRANTS = {"all": {"team": "research"}}
GOOD = {"url": "https://idp.example", "audience": "gateway", "grants": GRANTS}


def load(**changed: Any) -> Any:
    flags = {"sign_in.issuers": {"idp": {**GOOD, **changed}}, "sign_in.url": "https://g.example"}
    return load_settings(flags=flags, environ={}).sign_in.issuers["idp"]


def test_an_issuer_in_variables() -> None:
    start = "OUTRIDER_SIGN_IN__ISSUERS__ACME"
    environ = {
        f"{start}__URL": "https://acme.example/realms/a",
        f"{start}__AUDIENCE": "one,two",
        f"{start}__GRANTS__STAFF__CLAIM": "groups",
        f"{start}__GRANTS__STAFF__VALUE": "staff",
        f"{start}__GRANTS__STAFF__TEAM": "research",
    }
    acme = load_settings(environ=environ).sign_in.issuers["acme"]
    assert acme.audience == ("one", "two")
    assert acme.grants["staff"].value == "staff"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"url": "http://idp.example"}, "https://"),
        ({"url": "file:///etc/passwd"}, "https://"),
        ({"url": "https://user:word@idp.example"}, "https://"),
        ({"jwks_url": "ftp://idp.example/keys"}, "https://"),
        ({"algorithms": ["HS256"]}, "algorithms"),
        ({"algorithms": ["none"]}, "algorithms"),
        ({"algorithms": []}, "algorithms"),
        ({"audience": ""}, "audience is empty"),
        ({"grants": {}}, "grants"),
        ({"grants": {"a": {"claim": "groups"}}}, "belong together"),
        ({"grants": {"a": {"claim": "", "value": "x"}}}, "grants.a.claim"),
        ({"client_id": ""}, "client_id"),
        ({"clock_skew_s": 3600}, "clock_skew_s"),
        ({"client_id": "pages", "scopes": "profile"}, "openid"),
    ],
)
def test_unsafe_issuers_are_refused(changed: dict[str, Any], said: str) -> None:
    assert load()
    with pytest.raises(SettingsError) as refused:
        load(**changed)
    assert said in str(refused.value)
    assert "word" not in str(refused.value)


def test_issuers_fit_together() -> None:
    for issuers, said in (
        ({"a": GOOD, "b": GOOD}, "another issuer's"),
        ({"A b": GOOD}, "small letters"),
        ({"a": {**GOOD, "client_id": "pages"}}, "needs sign_in.url"),
    ):
        with pytest.raises(SettingsError) as refused:
            load_settings(flags={"sign_in.issuers": issuers}, environ={})
        assert said in str(refused.value)
