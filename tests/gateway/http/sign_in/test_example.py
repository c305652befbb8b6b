"""The settings of examples/sign_in, with a scripted issuer in the place of Keycloak."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from outrider.gateway.settings.tree import load_settings
from outrider.gateway.tenancy.keys.records import TeamOrder
from tests.gateway.tenancy.metering.tenants import Open
from tests.gateway.tenancy.sign_in.issuer import ScriptedIssuer, scripted_issuer

FILE = Path(__file__).parents[4] / "examples/sign_in/outrider.toml"
SECRET = "OUTRIDER_SIGN_IN__ISSUERS__ACME__CLIENT_SECRET"


@pytest.fixture
def issuer() -> Iterator[ScriptedIssuer]:
    with scripted_issuer() as made:
        yield made


def test_the_example_gives_people_their_teams(opened: Open, issuer: ScriptedIssuer) -> None:
    settings = load_settings(config_file=FILE, environ={SECRET: "secret"})
    acme = settings.sign_in.issuers["acme"]
    assert acme.client_secret is not None
    assert acme.client_secret.get_secret_value() == "secret"
    sign_in: dict[str, Any] = settings.sign_in.model_dump()
    sign_in["issuers"]["acme"]["url"] = issuer.url
    issuer.claims = {"sub": "ada", "aud": "outrider"}
    with opened(sign_in=sign_in) as made:
        store = made.world.context.tenancy.keys.store
        assert store is not None
        teams = {name: store.create_team(TeamOrder(name=name)) for name in ("research", "guests")}
        made.world.says("Hello")

        def status(path: str, **claims: Any) -> int:
            headers = {"authorization": f"Bearer {issuer.token(**claims)}"}
            return httpx.get(f"{made.world.url}{path}", headers=headers).status_code

        guest = {"realm_access": {"roles": ["guest"]}}
        made.until(lambda: status("/v1/models", **guest) == 200)
        assert status("/v1/models/small", **guest) == 200
        assert status("/v1/models/auto", **guest) == 403
        assert status("/v1/models/auto", groups=["/research"]) == 200
        assert status("/v1/models", groups=["/research/x"]) == 403
        assert status("/admin/keys", groups=["/research"]) == 403
        assert status("/admin/keys", realm_access={"roles": ["outrider-admin"]}) == 200
        assert len(teams) == 2
