"""`make demo-fleet`: three engines by Ray Serve, of which one is killed and to which one is added.

First a single engine answers every question. Then a fleet of the same models does, under load that
makes prompts wait: an engine is killed with `kill -9` in the middle of its answers, and the policy
adds a fourth. Every answer has to be the single engine's, to the letter.
"""

import asyncio
import contextlib
import os
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import openai
from rich.console import Console
from rich.table import Table
from rich.text import Text

from outrider.gateway.engines.backends.fleet_keys import write_fleet_keys
from outrider.gateway.tools.demo.process import DemoError, GatewayProcess

_PAIR: Final = Path(__file__).parents[3] / "draft" / "pair"
_ENGINES: Final = 3
_APPLICATION: Final = "outrider-demo"
_CLIENTS: Final = 24
_LEAST_PATIENCE_S: Final = 120.0
_PATIENCE: Final = 6.0  # times what one engine takes here to start and to answer all questions
_DETERMINISTIC: Final = ("--deterministic", "--dtype", "float32", "--num-threads", "1")
_ENGINE_SETTINGS: Final[dict[str, str | int | float | bool]] = {
    "engine.deterministic": True,
    "engine.dtype": "float32",
    "engine.num_threads": 1,
}
_OBJECTIVE_S: Final = 0.02  # prompts of the bundled pair are short: so one is added here too


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetQuestion:
    """A question with all that makes its answer one text."""

    prompt: str
    model: str
    temperature: float
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetReply:
    """An answer; `first_s`: seconds to its first text."""

    question: FleetQuestion
    text: str
    first_s: float
    error: str = ""


QUESTIONS: Final = tuple(
    FleetQuestion(prompt=prompt, model=model, temperature=temperature, seed=seed)
    for seed, (prompt, model, temperature) in enumerate(
        (f"What is {1187 + 371 * number} + {2948 + 89 * number}?", model, temperature)
        for number in range(10)
        for model, temperature in (("large", 0.0), ("large", 0.9), ("small", 0.8))
    )
)


async def ask(client: openai.AsyncOpenAI, question: FleetQuestion) -> FleetReply:
    """Stream one answer."""
    started_s = time.perf_counter()
    first_s, pieces, error = 0.0, list[str](), ""
    try:
        stream = await client.chat.completions.create(
            model=question.model,
            messages=[{"role": "user", "content": question.prompt}],
            temperature=question.temperature,
            seed=question.seed,
            max_tokens=200,
            stream=True,
        )
        async for chunk in stream:
            for choice in chunk.choices:
                if choice.delta.content:
                    first_s = first_s or time.perf_counter() - started_s
                    pieces.append(choice.delta.content)
    except openai.OpenAIError as failure:
        error = str(failure)
    return FleetReply(question=question, text="".join(pieces), first_s=first_s, error=error)


def _client(url: str, timeout_s: float | None = None) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=timeout_s
    )


async def ask_all(url: str) -> list[FleetReply]:
    """Ask every question, one after the other."""
    async with _client(url) as client:
        return [await ask(client, question) for question in QUESTIONS]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


class RayFleet:
    """The fleet: three replicas of the bundled pair, a fourth where prompts wait."""

    def __init__(self, folder: Path, key: Path) -> None:
        """Start a Ray of its own, and wait until the replicas serve."""
        import ray
        from ray import serve

        from outrider.gateway.wiring.ray.deployments import build_application
        from outrider.gateway.wiring.ray.patience import allow_slow_starts, quieten_serve
        from outrider.gateway.wiring.ray.plan import EnginePlan, FleetPlan

        allow_slow_starts()
        quieten_serve()
        self._ray, self._serve = ray, serve
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}/"
        ray.init(
            address="local",
            num_cpus=8,  # logical ones
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            object_store_memory=80 * 2**20,
            _temp_dir=str(folder / "ray"),
        )
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        engine = EnginePlan(
            large=str(_PAIR / "large"),
            small=str(_PAIR / "small"),
            min_replicas=_ENGINES,
            max_replicas=_ENGINES + 1,
            first_token_s=_OBJECTIVE_S,
            num_cpus=0.5,
            upscale_delay_s=2.0,
            settings=_ENGINE_SETTINGS,
        )
        plan = FleetPlan(key=key, host="127.0.0.1", http_port=port, engines={"pair": engine})
        serve.run(build_application(plan), name=_APPLICATION, route_prefix="/")

    def num_running(self) -> int:
        """Replicas that serve."""
        deployment = self._serve.status().applications[_APPLICATION].deployments["pair"]
        return sum(
            count for state, count in deployment.replica_states.items() if state == "RUNNING"
        )

    def kill_one(self) -> int:
        """Kill the engine of any replica with SIGKILL; returns its process."""
        handle = self._serve.get_deployment_handle("pair", _APPLICATION)
        pid: int = handle.pid.remote().result()
        os.kill(pid, signal.SIGKILL)
        return pid

    def close(self) -> None:
        """End it all."""
        self._serve.shutdown()
        self._ray.shutdown()


async def load(
    url: str, fleet: RayFleet, console: Console, patience_s: float
) -> tuple[list[FleetReply], int]:
    """Ask under load, kill an engine, and go on until another one is there.

    Returns the replies and the most replicas that there were. `patience_s`: for that other one, and
    for each answer.
    """
    replies: list[FleetReply] = []
    most = fleet.num_running()
    has_begun, is_enough = asyncio.Event(), asyncio.Event()

    async def one_client(client: openai.AsyncOpenAI, place: int) -> None:
        turn = place
        while not is_enough.is_set():
            replies.append(await ask(client, QUESTIONS[turn % len(QUESTIONS)]))
            turn += 1
            if len(replies) == _CLIENTS:
                has_begun.set()

    async with _client(url, patience_s) as client:
        clients = [asyncio.create_task(one_client(client, place)) for place in range(_CLIENTS)]
        await has_begun.wait()
        pid = await asyncio.to_thread(fleet.kill_one)
        console.print(f"kill -9 {pid}: an engine, with answers under way.")
        until_s = time.monotonic() + patience_s
        while most <= _ENGINES and time.monotonic() < until_s:
            await asyncio.sleep(0.5)
            most = max(most, await asyncio.to_thread(fleet.num_running))
        if most > _ENGINES:
            console.print(f"The policy has added an engine: {most} serve.")
        is_enough.set()
        await asyncio.gather(*clients)
    return replies, most


def judge(
    console: Console, alone: Sequence[FleetReply], replies: Sequence[FleetReply], most: int
) -> int:
    """Print the table. Returns the exit status: 0 where all is as it has to be."""
    texts = {reply.question: reply.text for reply in alone}
    table = Table(title="One engine and a fleet of the same", title_justify="left", box=None)
    for name in ("", "answers", "equal to the single engine's", "first text, p50", "failed"):
        table.add_column(name, justify="left" if not name else "right")
    num_wrong = 0
    for name, part in (("one engine, alone", alone), ("fleet, under load", replies)):
        equal = sum(not each.error and each.text == texts[each.question] for each in part)
        failed = sum(bool(each.error) for each in part)
        firsts = [each.first_s for each in part if not each.error]
        first = f"{1e3 * statistics.median(firsts):.0f} ms" if firsts else "-"
        table.add_row(name, str(len(part)), str(equal), first, str(failed))
        num_wrong += len(part) - equal
    console.print(table)
    for reply in [each for each in (*alone, *replies) if each.error][:3]:
        console.print(Text(f"Failed: {reply.question.prompt} {reply.error}", style="red"))
    if most <= _ENGINES:
        console.print("[red]The policy has added no engine.[/red]")
    if num_wrong or most <= _ENGINES:
        return 1
    console.print(f"[green]All {len(alone) + len(replies)} answers are the same.[/green]")
    return 0


def run(console: Console) -> int:
    """The whole demo. Returns the exit status."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="outrider-")))
        console.print("A single engine answers first ...")
        models = ("--large", str(_PAIR / "large"), "--small", str(_PAIR / "small"))
        began_s = time.monotonic()
        with GatewayProcess([*models, *_DETERMINISTIC]) as single:
            alone = asyncio.run(ask_all(single.start()))
        patience_s = max(_LEAST_PATIENCE_S, _PATIENCE * (time.monotonic() - began_s))
        key = folder / "fleet.key"
        write_fleet_keys(key)
        console.print(f"Ray Serve starts {_ENGINES} engines ...")
        fleet = RayFleet(folder, key)
        stack.callback(fleet.close)
        engines = ("--engines", fleet.url, "--engine-key", str(key))
        gateway = stack.enter_context(GatewayProcess([*models, *engines]))
        url = gateway.start()
        console.print(f"They serve, behind a gateway on {url}. {_CLIENTS} clients ask at once.")
        replies, most = asyncio.run(load(url, fleet, console, patience_s))
        return judge(console, alone, replies, most)


@contextlib.contextmanager
def _timed(console: Console) -> Iterator[None]:
    started_s = time.perf_counter()
    yield
    console.print(f"Done in {time.perf_counter() - started_s:.0f} s.")


def main() -> int:
    """Run the demo; says what is missing where Ray is not installed."""
    console: Any = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    try:
        import ray  # noqa: F401
    except ImportError:
        console.print("[red]The demo needs Ray Serve: pip install 'outrider\\[fleet]'.[/red]")
        return 1
    try:
        with _timed(console):
            return run(console)
    except DemoError as error:
        console.print(Text(f"The demo failed: {error}", style="red"), soft_wrap=True)
        return 1


if __name__ == "__main__":
    sys.exit(main())
