"""How much later does a model on demand answer than `outrider serve` with that model alone?

Method: `alone` is `outrider serve --large MODEL --small none` from its start to the end of its
first answer, of one token. `on demand` is one request to a gateway whose tier that model is, and
which has not loaded it: it is put out by hand before each round. `loaded` is the same request once
more. They are measured in turn (A B A B), with pass times that were kept at the warm-up, as any
later start finds them.

Reading it: `late` is a round's `on demand` less its `alone`; negative where a process that only
serves the model is there sooner than one that also parses a command line. `added` is the part of
`on demand` in which the model's process was not loading: before its start, and from its readiness
to the answer. It tells on a busy machine too. The goal bounds the median rounds of both.

    python -m benchmarks.gateway.bench_on_demand
"""

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import httpx

from benchmarks.shared import benchmark
from benchmarks.shared.benchmark import Benchmark, Goal, Results, Table, figure, option
from benchmarks.shared.harness import DEMO_PAIR, measure_in_turn, timed, without_engine_environment
from benchmarks.shared.record import Summary
from outrider.gateway.tools.demo.process import GatewayProcess

GOAL_S: Final = 1.0
_TOKEN: Final = "0123456789abcdef0123456789abcdef"
_NAME: Final = "cold"
_TIMEOUT_S: Final = 600.0
_CHAT: Final[Mapping[str, Any]] = {
    "messages": [{"role": "user", "content": "What is 17 + 25?"}],
    "max_tokens": 1,
}


@dataclass(frozen=True, kw_only=True)
class Options(benchmark.Options):
    """Flags of the command line."""

    model: Path = option(DEMO_PAIR / "large", "the model's folder or GGUF file")
    repeats: int = option(5, "measured rounds")


def measure(options: Options) -> Results:
    """Return the seconds of each way."""
    added: list[float] = []
    with tempfile.TemporaryDirectory() as folder, without_engine_environment():
        file = Path(folder) / "outrider.toml"
        file.write_text(_settings(options.model), encoding="utf-8")
        arguments = ["--config", str(file), "--set", f"keys.admin_token={_TOKEN}"]
        with GatewayProcess([*arguments, "--set", "keys.mode=off"]) as process:
            url = process.start()
            seconds = measure_in_turn(
                {
                    "alone": partial(_alone, options.model),
                    "on demand": partial(_cold, url, added),
                    "loaded": partial(timed, partial(_ask, url, _NAME)),
                },
                repeats=options.repeats,
                description="loading",
            )
    late = [
        cold - alone for cold, alone in zip(seconds["on demand"], seconds["alone"], strict=True)
    ]
    found = {name: Summary.of(each) for name, each in seconds.items()}
    return {**found, "late": Summary.of(late), "added": Summary.of(added[1:])}


def _settings(model: Path) -> str:
    return (
        f"[tiers.{_NAME}.on_demand]\n"
        f'checkpoint = "{model}"\n'
        "max_sequences = 64\n"
        "[on_demand]\n"
        "memory_gib = 1000\n"
        f"start_within_s = {_TIMEOUT_S}\n"
    )


def _alone(model: Path) -> float:
    """Return the seconds in which a gateway with the model starts and answers once."""
    alone = ["--large", str(model), "--small", "none", "--set", "engine.kv_cache_gib=1"]
    with GatewayProcess(alone) as process:
        return timed(lambda: _ask(process.start(), "large"))


def _cold(url: str, added: list[float]) -> float:
    """Put the model out; return the seconds of a request to it, and add those beside loading."""
    models = f"{url}/admin/models"
    headers = {"authorization": f"Bearer {_TOKEN}"}
    unload = f"{models}/{_NAME}/unload"
    httpx.post(unload, headers=headers, timeout=_TIMEOUT_S).raise_for_status()
    seconds = timed(partial(_ask, url, _NAME))
    (model,) = httpx.get(models, headers=headers, timeout=_TIMEOUT_S).json()["data"]
    added.append(seconds - model["load_s"])
    return seconds


def _ask(url: str, model: str) -> None:
    body = {**_CHAT, "model": model}
    httpx.post(f"{url}/v1/chat/completions", json=body, timeout=_TIMEOUT_S).raise_for_status()


def goals(results: Results) -> list[Goal]:
    """Bound the median round."""
    late, added = results["late"], results["added"]
    return [
        Goal(words="later than alone, s", measured=late.median, bound=GOAL_S),
        Goal(words="beside loading, s", measured=added.median, bound=GOAL_S),
    ]


def tables(options: Options, results: Results) -> Iterator[Table]:
    """Seconds by way."""
    columns = (("seconds", figure("seconds")), ("p99", figure("seconds", part="p99")))
    entries = {name: {"seconds": results[name]} for name in results if name != "goals"}
    yield Table(title=f"until the answer of {options.model.name}", columns=columns, entries=entries)


BENCHMARK: Final = Benchmark(
    options=Options, measure=measure, tables=tables, goals=goals, variant="demo-large"
)

if __name__ == "__main__":
    BENCHMARK.start()
