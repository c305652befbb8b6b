"""Run the tests in two parts side by side, and those that failed once more.

    python .ci/tests.py 2 -m "not long"    processes of the shared part, then pytest's arguments

Tests that watch clocks, sockets and processes run one after the other in one process. Beside it two
processes share all others and give way to it; with 0 (a GPU's memory is for one) they come later.
Each part runs to its end, even if the other fails. Up to five failed tests get a second try when
nothing else runs; the last line then says so.
"""

import json
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import IO

WATCHING = [
    *("tests/benchmarks", "tests/pages", "tests/gateway/telemetry", "tests/gateway/upstream"),
    *("tests/gateway/answering/candidates", "tests/gateway/engines/backends"),
    *("tests/gateway/http/edge", "tests/gateway/http/server"),
    *("tests/gateway/tools/measuring/bench", "tests/gateway/wiring/ray"),
]
MOST_TRIED_AGAIN = 5
CACHE = Path(".pytest_cache")


def begin(
    part: str, *arguments: str, niceness: int = 0, output: IO[bytes] | None = None
) -> subprocess.Popen[bytes]:
    """Start pytest for a part, which remembers its own failures."""
    command = ["nice", "-n", str(niceness), sys.executable, "-m", "pytest", *sys.argv[2:]]
    command += ["-o", f"cache_dir={CACHE / part}", *arguments]
    return subprocess.Popen(command, stdout=output, stderr=output and subprocess.STDOUT)


def memory_of(part: str) -> Path:
    """Return the file in which pytest keeps the names of failed tests."""
    return CACHE / part / "v" / "cache" / "lastfailed"


def run_both(workers: int) -> dict[str, int]:
    """Return the exit status of each part."""
    sharing = ["-n", str(workers), "--dist", "worksteal", "tests"]
    sharing += [f"--ignore={folder}" for folder in WATCHING]
    CACHE.mkdir(exist_ok=True)
    with (CACHE / "alone.log").open("w+b") as log:
        alone = begin("alone", *WATCHING, output=log)
        if not workers:
            alone.wait()
        statuses = {"shared": begin("shared", *sharing, niceness=10).wait(), "alone": alone.wait()}
        log.seek(0)
        sys.stdout.buffer.write(log.read())
    return statuses


def try_again(parts: list[str]) -> bool:
    """Return whether all tests pass that have failed, if they are few."""
    names = {part: list(json.loads(memory_of(part).read_text())) for part in parts}
    if len([*chain(*names.values())]) > MOST_TRIED_AGAIN:
        return False
    say("These failed; their second try:", *chain(*names.values()))
    options = ("--last-failed", "--last-failed-no-failures=none")
    return not any([begin(part, *options).wait() for part in parts])  # noqa: C419 - try all


def say(*lines: str) -> None:
    """Write lines at once: pytest writes to the same place."""
    sys.stdout.write("\n".join((*lines, "")))
    sys.stdout.flush()


def main() -> int:
    """Return 0 if every test passed, at the second try at the latest."""
    workers = int(sys.argv[1])
    for part in ("shared", "alone"):
        memory_of(part).unlink(missing_ok=True)
    statuses = run_both(workers)
    failed = [part for part, status in statuses.items() if status]
    result = "FAILED" if failed else "passed"
    # 1: tests failed. Another status: it was broken off, or found no tests.
    if failed and all(statuses[part] == 1 for part in failed) and try_again(failed):
        result = "passed, these at the second try"
    by_themselves = f"by themselves: exit {statuses['alone']}"
    say(f"tests in {workers} processes: exit {statuses['shared']}; {by_themselves}; all: {result}")
    return int(result == "FAILED")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
