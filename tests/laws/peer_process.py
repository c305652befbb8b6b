"""An engine process that other engines may ask for blocks, and that ends at a named moment.

`python -m tests.laws.peer_process JSON` prints its address; see `tests.laws.mortal_engine`.
"""

import json
import sys
from contextlib import closing
from pathlib import Path

from outrider.engine.queue import block_exchange
from outrider.gateway.engines.backends.connected_gateway import ListenerBounds
from outrider.gateway.engines.backends.engine_listener import EngineListener
from outrider.gateway.engines.backends.fleet_keys import read_fleet_keys
from outrider.gateway.engines.backends.peer_lines import PeerLines
from outrider.gateway.engines.backends.step_loop import no_progress, serve_loaded
from outrider.gateway.settings.tree import Settings
from outrider.gateway.wiring.build import build_engine
from tests.laws.mortal_engine import MortalEngine


def main(arguments: str) -> None:
    """Serve until this process is ended."""
    options = json.loads(arguments)
    # The pair computes its prompts faster than a busy machine's sockets send anything.
    block_exchange.LEAST_WAIT_S = 30.0
    keys = read_fleet_keys(Path(options["keys"]))
    settings = Settings.model_validate_json(options["settings"])
    with (
        closing(EngineListener("tcp://127.0.0.1:0", keys, ListenerBounds())) as listener,
        closing(PeerLines(keys)) as peers,
    ):
        sys.stdout.write(f"{listener.endpoint}\n")
        sys.stdout.flush()
        inner = build_engine(settings, no_progress, peers=peers)
        engine = MortalEngine(inner, Path(options["armed"]))
        listener.open(engine.info(), {})
        serve_loaded(engine, listener)


if __name__ == "__main__":
    main(sys.argv[1])
