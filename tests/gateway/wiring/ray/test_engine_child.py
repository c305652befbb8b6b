"""An engine's process that cannot serve says why."""

from pathlib import Path

import pytest

from outrider.gateway.wiring.ray.engine_child import EngineChild, EngineEndedError

SMALL = Path(__file__).parents[4] / "draft" / "pair" / "small"


def test_a_refusal_is_no_address() -> None:
    """Its sentence names the address that was asked for, with the port 0."""
    child = EngineChild(["--small", str(SMALL), "--large", "none"], host="203.0.113.9", key=None)
    try:
        with pytest.raises(EngineEndedError, match=r"203\.0\.113\.9:0 can be reached"):
            child.wait_ready(60.0)
    finally:
        child.stop(0.0)
