"""A kill -9 of one of two engine processes behind a gateway: its answers go on at the other.

As test_killed_streams_law.py has it for one engine: no error, no token twice, the usage of an
undisturbed answer, whatever the requests ask for.
"""

import json
from pathlib import Path

import pytest

from outrider.gateway.engines.backends.process_client import ProcessEngineClient
from outrider.gateway.engines.backends.spawning import EngineRecipe
from outrider.gateway.engines.backends.supervised_client import ReconnectPolicy
from outrider.gateway.engines.fleet.pool import EnginePool
from outrider.gateway.engines.fleet.replica import EngineReplica
from outrider.gateway.settings.tree import load_settings
from tests.gateway.conftest import wait_for
from tests.laws.gateways import ENGINE, gateway
from tests.laws.test_killed_streams_law import Escalating, ask_all


def replica(name: str, armed: Path) -> EngineReplica:
    """An engine process that ends when the file asks it to."""
    flags = {**ENGINE, "engine.process": True}
    settings = load_settings(flags=flags, environ={}, config_file=None)
    arguments = json.dumps({"settings": settings.model_dump_json(), "armed": str(armed)})
    recipe = EngineRecipe(builder="tests.laws.mortal_engine:build", arguments=arguments)
    return EngineReplica(
        name, ProcessEngineClient(recipe, policy=ReconnectPolicy(resume_within_s=0))
    )


@pytest.mark.slow
def test_answers_go_on_at_the_other_engine(tmp_path: Path) -> None:
    # One file for both: which of them has most of the requests is up to the pool.
    armed = tmp_path / "armed"
    pool = EnginePool([replica(name, armed) for name in ("x", "y")], resume_within_s=60)
    with gateway(policy=Escalating(), client=pool) as served:
        wait_for(lambda: all(state.is_up for state in pool.states()), 120)
        right = ask_all(served.url)
        assert right["escalated"].choices[0][0]
        armed.write_text("emitted 30", encoding="utf-8")
        assert ask_all(served.url) == right
        assert not armed.exists()
        assert pool.failovers["died"] >= 1
