"""A gateway of one process whose event loop stands still ends, and says where it stood."""

import asyncio
import subprocess
import sys
import threading
from typing import Any

import pytest

from outrider.engine.events import EngineInfo
from outrider.gateway.http.server.listening import listen
from outrider.gateway.settings.tree import load_settings
from outrider.gateway.tools.commands import serve_command
from outrider.gateway.workers.watchdog import until_silent

STALLING = """
import asyncio, logging, re, sys, time
from outrider.gateway.workers.watchdog import LoopWatchdog

def sleeps():
    time.sleep(60)

def holds_the_interpreter():
    re.match(r"(a+)+$", "a" * 40 + "b")

async def main():
    with LoopWatchdog(0.5) as watchdog:
        watchdog.start()
        await asyncio.sleep(0)
        globals()[sys.argv[1]]()

logging.basicConfig()
asyncio.run(main())
"""


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("stalls", "said"),
    [
        ("sleeps", "event loop stands still and the process ends silent_s=0.5"),
        ("holds_the_interpreter", "Timeout (0:00:01)!"),
    ],
)
def test_a_loop_that_stands_still_ends_the_process(stalls: str, said: str) -> None:
    process = subprocess.run(
        [sys.executable, "-c", STALLING, stalls],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert process.returncode == 1, process.stderr
    assert said in process.stderr
    assert f"in {stalls}" in process.stderr


def test_only_two_questions_in_a_row_without_an_answer_are_a_standstill() -> None:
    answers = iter([True, False, True, False, False])

    async def ask(timeout_s: float) -> None:
        assert timeout_s == 0.005
        if not next(answers):
            raise TimeoutError

    asyncio.run(until_silent(ask, 0.01))
    assert list(answers) == []


def test_serve_is_watched_from_when_it_serves_until_it_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[bool] = []

    def look() -> None:
        seen.append(any(thread.name == "watchdog" for thread in threading.enumerate()))

    class Run:
        def __init__(self, _: object, listener: Any, *, on_ready: Any, **__: object) -> None:
            listener.close()
            self._on_ready = on_ready

        async def run(self) -> None:
            look()
            self._on_ready(EngineInfo(tiers={}, speculation=False), "")
            look()

        def stop(self) -> None: ...

    monkeypatch.setattr(serve_command, "_gateway_run", lambda: Run)
    settings = load_settings(environ={}, flags={}, config_file=None)
    serve_command._serve_with(settings, listen("127.0.0.1", 0), None, "")
    look()
    assert seen == [False, True, False]
