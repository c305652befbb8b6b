"""Time for Ray Serve's own processes on a machine that is busy, and less said by Ray."""

import logging
import os
from typing import Final

# Ray's 5 s for its proxy to import what it needs are too few there: it would be ended each time.
_PATIENCE: Final = {
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60",
}


def allow_slow_starts() -> None:
    """Set it for a cluster that this process starts, where the environment says nothing else."""
    for name, seconds in _PATIENCE.items():
        os.environ.setdefault(name, seconds)


def quieten_serve() -> None:
    """Leave out what Ray Serve tells of each of its steps; to be called once it is imported."""
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
