"""An A/B experiment over two models, from its size to its verdict, with the command line alone.

    outrider serve                                      # in one terminal
    python examples/experiments/compare_models.py       # in another

OUTRIDER_URL is where the gateway is, unless it is http://127.0.0.1:8000. Gateway and commands have
to use the same database: the default one, or OUTRIDER_DATABASE_URL.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

URL: Final = os.environ.get("OUTRIDER_URL", "http://127.0.0.1:8000")
PAGE: Final = Path(os.environ.get("REPORT", "experiment.html"))
NAME: Final = "small-or-large"
ROUND: Final = 150
MAX_ROUNDS: Final = 10


def outrider(*arguments: str) -> str:
    """Run a command, and return what it prints. Ends the script where the command fails."""
    command = [sys.executable, "-m", "outrider.gateway.cli", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"outrider {' '.join(arguments)}\n{done.stdout}{done.stderr}")
    return done.stdout


def report() -> dict[str, Any]:
    """Return the report as it stands. Looking is free: the intervals hold at any time."""
    found: dict[str, Any] = json.loads(outrider("experiment", "report", NAME, "--json"))
    return found


def main() -> None:
    """Size, experiment, traffic, report."""
    # Times that differ by a third, and scatter as much as their mean: a few hundred requests.
    print(outrider(  # noqa: T201
        *("experiment", "size", "--metric", "e2e", "--from", "300", "--to", "200"),
        *("--variation", "1"),
    ))  # fmt: skip
    outrider(
        *(
            "experiment",
            "create",
            NAME,
            "--arm",
            "control model=large",
            "--arm",
            "small model=small",
        ),
        *("--unit", "user", "--set", "metric=e2e", "--start"),
    )
    for number in range(MAX_ROUNDS):
        # Requests for `auto`, each from one of 500 users. Fresh questions: a seed for each round.
        outrider(
            *("bench", "--url", URL, "--model", "auto", "--users", "500", "--seed", str(number)),
            *("--num-requests", str(ROUND), "--concurrency", "4", "--max-tokens", "48"),
            *("--warm-up", "0"),
        )
        verdict = report()["verdict"]
        print(f"after {(number + 1) * ROUND} requests: {verdict['text']}")  # noqa: T201
        if verdict["is_decided"]:
            break
    outrider("experiment", "stop", NAME)
    print(outrider("experiment", "report", NAME, "--html", str(PAGE)))  # noqa: T201
    print(f"The page: {PAGE}")  # noqa: T201


if __name__ == "__main__":
    main()
