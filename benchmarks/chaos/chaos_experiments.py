"""Experiments of `benchmarks.chaos.chaos`: which arm a request was in, and what the reports count.

`models` gives users different models for one alias; `drafts` switches speculation off in some
requests of all kinds, which must not change a text.
"""

import json
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.chaos.chaos_questions import CHAIN, TRIED
from benchmarks.shared.record import ROOT

MODEL_ARMS: Final[Mapping[str, str]] = {"small": "small", "large": "large", "chain": CHAIN}
"""Models by arm of the experiment `models`."""
ONE_TEXT_ARMS: Final = ("small", "large")
"""Its arms in which a question has one text."""
NUM_USERS: Final = 24
_ARMS: Final[Mapping[str, Sequence[str]]] = {"models": (*MODEL_ARMS,), "drafts": ("on", "off")}
_LABEL: Final = re.compile(r"(?:^|[,:])(models|drafts):\d+/(\w+)")
_WAIT_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmCount:
    """Requests of an arm, of those that took part by chance; `num_answered` of them in full."""

    num_requests: int
    num_answered: int


Counts = Mapping[tuple[str, str], ArmCount]
"""By experiment and arm."""


def create_experiments(database_url: str) -> None:
    """Create and start them."""
    arms = [f"{arm} model={model}" for arm, model in MODEL_ARMS.items()]
    users = ("--unit", "user", "--set", f'eligible.models=["{TRIED}"]')
    _command("create", "models", database_url, arms, *users, "--start")
    arms = [f"{arm} speculation={arm}" for arm in _ARMS["drafts"]]
    _command("create", "drafts", database_url, arms, "--layer", "drafts", "--unit", "request",
             "--start")  # fmt: skip


def _command(
    what: str, name: str, database_url: str, arms: Sequence[str] = (), *flags: str
) -> dict[str, Any]:
    command = [sys.executable, "-m", "outrider.gateway.cli", "experiment", what, name, "--json"]
    command += [word for arm in arms for word in ("--arm", arm)]
    command += [*flags, "--database-url", database_url]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return dict(json.loads(made.stdout))


def arms_of(label: str) -> dict[str, str]:
    """Return the arm in each experiment, of the header x-outrider-arm or the ledger's column."""
    return dict(_LABEL.findall(label))


def is_forced(label: str) -> bool:
    """Return whether the request named its arm, and is not counted."""
    return label.startswith("forced:")


def read_reports(database_url: str, least: Mapping[tuple[str, str], int]) -> Counts:
    """Return what the experiments' reports count, once that is `least` answers, or a minute later.

    A gateway brings its counts to the database every few seconds.
    """
    deadline_s = time.monotonic() + _WAIT_S
    while True:
        counts = {
            (name, each["arm"]): _count(each)
            for name in _ARMS
            for each in _command("report", name, database_url)["arms"]
        }
        missing = any(counts[place].num_answered < number for place, number in least.items())
        if not missing or time.monotonic() > deadline_s:
            return counts
        time.sleep(1.0)


def _count(arm: Mapping[str, Any]) -> ArmCount:
    """Return an arm's counts: the report has shares, of requests that clients did not cancel."""
    shares = {name: each["estimate"] or 0.0 for name, each in arm["shares"].items()}
    num_ended = arm["requests"] * (1.0 - shares["cancelled"])
    num_answered = round(num_ended * (1.0 - shares["failed"] - shares["refused"]))
    return ArmCount(num_requests=arm["requests"], num_answered=num_answered)


def count_answers(labels: Sequence[str]) -> Counter[tuple[str, str]]:
    """Return the number of answers of each experiment's arms, of those who did not name theirs."""
    return Counter(
        place for label in labels if not is_forced(label) for place in arms_of(label).items()
    )
