"""/metrics is for keys with the metrics scope, or open where the settings say so."""

from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from outrider.gateway.contract.errors.tree import PermissionDeniedError
from outrider.gateway.tenancy.keys.keys import ANONYMOUS, Scopes
from outrider.gateway.tenancy.keys.records import KeyOrder
from outrider.gateway.tools.commands.keys_cli import app
from tests.gateway.tenancy.keys.world import ADMIN_TOKEN, World
from tests.gateway.tenancy.metering.tenants import Open

SCRAPER = Scopes(models=frozenset(), tiers=frozenset(), reads_metrics=True)


def test_metrics_need_a_scope_once_a_key_exists(tmp_path: Path) -> None:
    world = World(tmp_path)

    async def work() -> None:
        authenticator = world.authenticator
        authenticator.require_metrics(ANONYMOUS)
        made = {
            name: world.store.create(KeyOrder(name=name, scopes=scopes)).text
            for name, scopes in (
                ("plain", Scopes()),
                ("scraper", SCRAPER),
                ("admin", Scopes(is_admin=True)),
            )
        }
        await world.keys.refresh()
        for name, key in (*made.items(), ("token", ADMIN_TOKEN)):
            principal = authenticator.authenticate(f"Bearer {key}", None, None)
            if name == "plain":
                with pytest.raises(PermissionDeniedError, match="metrics scope"):
                    authenticator.require_metrics(principal)
            else:
                authenticator.require_metrics(principal)

    world.run(work)


@pytest.mark.slow
def test_a_tenants_key_reads_no_metrics_and_a_scrapers_key_nothing_else(opened: Open) -> None:
    with opened() as made:
        plain, scraper = made.new_key("plain"), made.new_key("scraper", scopes=SCRAPER)

        def get(key: str, path: str) -> httpx.Response:
            return httpx.get(made.world.url + path, headers={"authorization": f"Bearer {key}"})

        refused, scraped = get(plain, "/metrics"), get(scraper, "/metrics")
        listed = get(scraper, "/v1/models").json()["data"]
        headers = {"authorization": f"Bearer {scraper}"}
        asked = [made.world.chat(model=model, headers=headers) for model in ("auto", "small")]
        admin = get(scraper, "/admin/keys")
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "metrics_only")
    assert "outrider_keys 3.0" in scraped.text
    assert listed == []
    assert [response.status_code for response in asked] == [403, 403]
    assert admin.status_code == 403


@pytest.mark.slow
def test_a_setting_opens_metrics_alone(opened: Open) -> None:
    with opened(keys={"refresh_s": 0.02, "open_metrics": True}) as made:
        assert httpx.get(f"{made.world.url}/metrics").status_code == 200
        for path in ("/metrics/", "//metrics", "/Metrics", "/v1/models", "/v1/dashboard"):
            assert httpx.get(made.world.url + path).status_code == 401, path


def test_the_command_line_makes_a_scrapers_key(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/keys.db"
    run = CliRunner().invoke(
        app, ["create", "--name", "prometheus", "--metrics", "--database-url", url, "--json"]
    )
    assert run.exit_code == 0, run.output
    world = World(tmp_path)
    (key,) = world.store.load().keys
    world.database.close()
    assert key.scopes == SCRAPER
    assert replace(key.scopes, reads_metrics=False) == Scopes(models=frozenset(), tiers=frozenset())
