"""A fleet on a real Ray Serve: from zero when somebody asks, through a kill, and back to zero."""

import asyncio
import io
import os
import signal
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from outrider.engine.events import EngineEvent, Finished, TokensEmitted
from outrider.engine.request import EngineRequest
from outrider.gateway.engines.backends.fleet_keys import write_fleet_keys
from outrider.gateway.engines.fleet.addresses import resolve
from outrider.gateway.engines.fleet.discovery import DiscoveredPool
from outrider.gateway.settings.sections import EngineSettings
from outrider.gateway.settings.tree import Settings
from outrider.gateway.tools.commands.fleet.status import status_table
from outrider.gateway.wiring.fleet import build_remote
from outrider.gateway.wiring.ray.patience import allow_slow_starts
from outrider.verifier.params import SamplingParams
from tests.gateway.engines.backends.clients import becomes, started, tokens

ray = pytest.importorskip("ray", reason="pip install 'outrider[fleet]': Ray Serve is not here")

SMALL = Path(__file__).parents[4] / "draft" / "pair" / "small"
APPLICATION = "fleet"
PATIENCE_S = 400.0  # a busy machine imports torch twice, and Ray five times

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def page() -> Iterator[str]:
    """The address of Serve's proxy in a small cluster; one for all tests here."""
    from ray import serve

    allow_slow_starts()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="or-") as folder:  # sockets need short paths
        ray.init(
            address="local",  # None is any that runs here
            num_cpus=1,  # a logical one; Ray starts an idle process for each
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=80 * 2**20,
            _temp_dir=folder,
        )
        try:
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            yield f"http://127.0.0.1:{port}/"
        finally:
            serve.shutdown()
            ray.shutdown()


def start_fleet(folder: Path, **engine: object) -> None:
    """Run a fleet of the bundled small model, which begins without an engine."""
    from ray import serve

    from outrider.gateway.wiring.ray.application import fleet

    write_fleet_keys(folder / "fleet.key")
    small = {
        "small": str(SMALL),
        "min_replicas": 0,
        "num_cpus": 0.5,
        "drain_timeout_s": 5.0,
        "settings": {"engine.num_threads": 1},
        **engine,
    }
    arguments = {"key": str(folder / "fleet.key"), "host": "127.0.0.1", "engines": {"chat": small}}
    serve.run(fleet(arguments), name=APPLICATION, route_prefix="/")


def gateway_pool(page: str, folder: Path) -> DiscoveredPool:
    """The engine client of a gateway with `--engines PAGE`."""
    options = EngineSettings(
        replicas=(page,),
        replicas_key=folder / "fleet.key",
        start_within_s=PATIENCE_S,
        resume_within_s=PATIENCE_S,
    )
    pool = build_remote(Settings(engine=options))
    assert isinstance(pool, DiscoveredPool)
    return pool


def request(name: str, max_tokens: int) -> EngineRequest:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=7)
    return EngineRequest(
        request_id=name, prompt_token_ids=(5, 6, 7), tier="small", sampling=sampling
    )


async def engine_pid() -> int:
    from ray import serve

    def ask() -> int:
        handle = serve.get_deployment_handle("chat", APPLICATION)
        found: int = handle.pid.remote().result(timeout_s=PATIENCE_S)
        return found

    return await asyncio.to_thread(ask)


def shown_status() -> str:
    output = io.StringIO()
    Console(file=output, width=200).print(status_table(APPLICATION))
    return output.getvalue()


@pytest.mark.slow
def test_an_engine_is_started_for_the_first_request_and_replaced_when_it_is_killed(
    page: str, tmp_path: Path
) -> None:
    async def main() -> None:
        await becomes_listed(page, 0)
        pool = gateway_pool(page, tmp_path)
        async with started(pool):
            assert pool.is_asleep
            assert "none until a request comes" in await asyncio.to_thread(shown_status)
            answer = [event async for event in pool.submit(request("first", 200))]
            assert isinstance(answer[-1], Finished)
            assert len(tokens(answer)) == 200
            shown = await asyncio.to_thread(shown_status)
            assert "1 running" in shown
            assert all(state.name in shown for state in pool.states())

            pid = await engine_pid()
            events: list[EngineEvent] = []
            async for event in pool.submit(request("again", 200)):
                if isinstance(event, TokensEmitted) and not tokens(events):
                    os.kill(pid, signal.SIGKILL)
                events.append(event)
            assert isinstance(events[-1], Finished)
            assert tokens(events) == tokens(answer)  # the next engine went on with it
            assert await engine_pid() != pid
            assert pool.failovers["died"]

    start_fleet(tmp_path)
    asyncio.run(main())


@pytest.mark.long
def test_a_fleet_without_work_ends_its_engines_and_starts_one_again(
    page: str, tmp_path: Path
) -> None:
    async def main() -> None:
        pool = gateway_pool(page, tmp_path)
        async with started(pool):
            for name in ("first", "second"):
                answer = [event async for event in pool.submit(request(name, 5))]
                assert len(tokens(answer)) == 5
                await becomes_listed(page, 0)
                await becomes(lambda: pool.is_asleep and not pool.states(), PATIENCE_S)

    start_fleet(tmp_path, downscale_delay_s=1.0)
    asyncio.run(main())


async def becomes_listed(page: str, number: int) -> None:
    """Wait until the fleet's page lists so many addresses; a new one says at first that it is."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                if len((await resolve(page)).addresses) == number:
                    return
            except OSError:
                pass
            await asyncio.sleep(0.2)
