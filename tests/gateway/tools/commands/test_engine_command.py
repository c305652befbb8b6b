"""`outrider engine` and a gateway's client to it, as processes with real models."""

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.engine.events import Finished
from outrider.engine.request import EngineRequest
from outrider.gateway.engines.backends.fleet_keys import read_fleet_keys
from outrider.gateway.engines.backends.remote_client import RemoteEngineClient
from outrider.verifier.params import SamplingParams
from tests.gateway.engines.backends.clients import run, tokens

ENGINE = (sys.executable, "-P", "-m", "outrider.gateway.cli", "engine")


def outrider_engine(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([*ENGINE, *arguments], capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_keys_an_engine_an_answer_and_its_end(tmp_path: Path) -> None:
    key = str(tmp_path / "fleet.key")
    assert outrider_engine("keygen", key).returncode == 0
    refused = outrider_engine("--listen", "tcp://0.0.0.0:0")
    assert refused.returncode == 2
    assert "--insecure" in refused.stderr
    listen = ("--listen", "tcp://127.0.0.1:0", "--key", key, "--set", "engine.num_blocks=64")
    with subprocess.Popen([*ENGINE, *listen], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        endpoint = next(line for line in process.stdout if "is ready on" in line).split()[-1]
        taken = outrider_engine("--listen", endpoint, "--key", key)
        assert taken.returncode == 2
        assert "in use" in taken.stderr

        async def main() -> None:
            client = RemoteEngineClient(endpoint, read_fleet_keys(Path(key)))
            await client.start()
            assert set((await client.info()).tiers) == {"small", "large"}
            request = EngineRequest(
                request_id="a",
                prompt_token_ids=(5, 6, 7),
                tier="large",
                sampling=SamplingParams(max_tokens=5),
            )
            events = []
            async for event in client.submit(request):
                events.append(event)
                if len(events) == 1:
                    process.send_signal(signal.SIGTERM)  # it ends the answer first
            assert isinstance(events[-1], Finished)
            assert tokens(events)
            await asyncio.to_thread(process.wait, 60)
            await client.close()

        run(main())
        assert process.returncode == 0
