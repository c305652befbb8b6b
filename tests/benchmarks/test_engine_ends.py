"""The script that lets engines end finds no token lost, and finds those that are."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.chaos import engine_ends
from outrider.engine.events import EngineEvent, TokensEmitted
from outrider.gateway.engines.fleet.pool import EnginePool


@pytest.mark.slow
def test_the_script_writes_its_results(tmp_path: Path) -> None:
    engine_ends.main(["--ends", "2", "--clients", "3", "--results", str(tmp_path)])
    (written,) = tmp_path.iterdir()
    found = json.loads(written.read_text(encoding="utf-8"))["results"]
    assert found["num_ends"] == 2
    assert found["num_requests"] > 2
    assert found["num_lost"] == found["num_misbilled"] == 0


@pytest.mark.long
def test_a_repeated_token_fails_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    submit = EnginePool.submit

    async def stutter(pool: EnginePool, *arguments: Any) -> AsyncIterator[EngineEvent]:
        num_events = 0
        async for event in submit(pool, *arguments):
            yield event
            num_events += isinstance(event, TokensEmitted)
            if num_events == 2 and pool.failovers["died"]:
                yield event

    monkeypatch.setattr(EnginePool, "submit", stutter)
    with pytest.raises(SystemExit, match="tokens were wrong"):
        engine_ends.main(["--ends", "3", "--clients", "3", "--results", str(tmp_path)])
