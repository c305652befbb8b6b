"""The script of examples/api_product, as a user runs it, with its own settings."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from outrider.gateway.tenancy.keys.keys import Scopes
from outrider.gateway.tenancy.keys.records import KeyOrder
from tests.gateway.conftest import OpenWorld, wait_for
from tests.gateway.hybrid import LOCAL_TEXT

EXAMPLE = Path(__file__).parents[4] / "examples" / "api_product"


@pytest.mark.slow
def test_the_script_runs_with_its_settings(open_world: OpenWorld, tmp_path: Path) -> None:
    settings = tomllib.loads((EXAMPLE / "outrider.toml").read_text(encoding="utf-8"))
    more = {
        "database_url": f"sqlite:///{tmp_path}/product.db",
        "keys": {"refresh_s": 0.02},
        "ledger": {"flush_ms": 1},
    }
    with open_world(clouds=(), **settings, **more) as world:
        store = world.context.tenancy.keys.store
        assert store is not None
        admin = store.create(KeyOrder(name="admin", scopes=Scopes(is_admin=True))).text
        wait_for(lambda: world.http.get("/v1/models").status_code == 401)
        done = subprocess.run(
            [sys.executable, str(EXAMPLE / "api_product.py")],
            env={**os.environ, "OUTRIDER_URL": world.url, "ADMIN_KEY": admin},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:8] == [
        "models: ['assistant']",
        f"answer: miss {LOCAL_TEXT!r}",
        f"answer: hit {LOCAL_TEXT!r}",
        "another model: model_not_allowed",
        "ann: answered",
        "ann: answered",
        lines[6],
        "bob: answered",
    ]
    assert "The end user's limit requests_per_day is 2 requests" in lines[6]
    bill = dict(re.findall(r"bill: (\w+) \d+ (\d+\.\d+) USD", done.stdout))
    assert float(bill["answer"]) > 0
    assert float(bill["cached"]) == 0
    assert float(bill["ann"]) > float(bill["bob"]) > 0
    assert float(bill["answer"]) == pytest.approx(
        sum(float(bill[n]) for n in ("ann", "bob", "nobody"))
    )
