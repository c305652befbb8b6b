"""Outrider as it was at an earlier commit, run beside this one."""

import io
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[3]
BEFORE: Final = "5f4ec355cb5b56c8de45c903833addeffe72188d"
"""The last commit with tables of version 0004; its engines speak version 3 of the protocol."""
LONG_BEFORE: Final = "6803ae541e8e8bdb29ebe19cb974f113ec14a03a"
"""The last commit whose engines speak version 2 of the protocol."""
_PRODUCT: Final = ("gateway", "engine", "draft", "router", "verifier", "kernels", ".ci/src")
_START_S: Final = 180.0


@dataclass(frozen=True, kw_only=True)
class Version:
    """A tree of the product, and the folder in which its processes run."""

    root: Path
    folder: Path

    def command(self, *arguments: str) -> subprocess.Popen[str]:
        """Start one of its commands. What it logs is in the file `log`, which each one begins."""
        (self.folder / "cache").mkdir(parents=True, exist_ok=True)
        with (self.folder / "log").open("w") as log:
            return subprocess.Popen(
                [sys.executable, "-P", "-m", "outrider.gateway.cli", *arguments],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=self.folder,
                env=os.environ
                | {
                    "PYTHONPATH": str(self.root / ".ci" / "src"),
                    "XDG_CACHE_HOME": str(self.folder / "cache"),
                    "XDG_STATE_HOME": str(self.folder),
                },
            )

    @contextmanager
    def running(self, *arguments: str) -> Iterator[str]:
        """Run a server; its address. It is ended in good order."""
        with self.command(*arguments) as process:
            try:
                assert process.stdout is not None
                found = (re.search(r"ready on (\S+)", line) for line in process.stdout)
                address = next((each[1] for each in found if each), None)
                assert address is not None, self.said()
                yield address
            finally:
                process.terminate()

    def refusal(self, *arguments: str) -> str:
        """Run a server that cannot start; what it says."""
        with self.command(*arguments) as process:
            try:
                process.communicate(timeout=_START_S)
            finally:
                process.kill()
        assert process.returncode > 0, "it has started"
        return self.said()

    def said(self) -> str:
        """What its newest command has logged."""
        return (self.folder / "log").read_text(encoding="utf-8")


def this_version(folder: Path) -> Version:
    """The tree that is tested."""
    return Version(root=ROOT, folder=folder)


def earlier_version(commit: str, folder: Path) -> Version:
    """Unpack the product as it was at a commit; skips the test where git does not know that."""
    command = ("git", "-C", str(ROOT), "archive", commit, *_PRODUCT)
    try:
        archive = subprocess.run(command, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip(f"no git history with commit {commit[:8]}: a shallow clone, or an sdist")
    with tarfile.open(fileobj=io.BytesIO(archive)) as packed:
        packed.extractall(folder / "tree", filter="tar")
    return Version(root=folder / "tree", folder=folder)
