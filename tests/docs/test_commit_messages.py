"""The check of commit messages that contributors can install."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.markdown import ROOT

CHECK = ROOT / ".ci" / "commit-msg"


def complaints(message: str, folder: Path) -> list[str]:
    file = folder / "COMMIT_EDITMSG"
    file.write_text(message)
    done = subprocess.run(
        [sys.executable, str(CHECK), str(file)], capture_output=True, text=True, check=False
    )
    assert (done.returncode == 0) == (not done.stderr)
    return done.stderr.splitlines()


@pytest.mark.parametrize(
    "message",
    [
        "Pin a model's revision on the hub per tier\n",
        "Seed the noise by choice\n\nThe reason, over\ntwo lines.\n# what git adds; unread",
        f"Take {'x' * 67}",
        "Merge branch 'a'; b",
    ],
)
def test_a_good_message_passes(message: str, tmp_path: Path) -> None:
    assert complaints(message, tmp_path) == []


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("", "there is no subject"),
        (f"Take {'x' * 68}", "73 characters"),
        ("The queue is fair now", "begins with 'The'"),
        ("Added a queue", "begins with 'Added'"),
        ("add a queue", "small letter"),
        ("Add a queue.", "full stop"),
        ("Add a queue; mend the clock", "semicolon"),
        ("Add a queue\nbecause", "not empty"),
        (f"Add a queue\n\n{'word ' * 30}", "the most"),
    ],
)
def test_a_bad_one_is_told_why(message: str, said: str, tmp_path: Path) -> None:
    (complaint,) = complaints(message, tmp_path)
    assert said in complaint
