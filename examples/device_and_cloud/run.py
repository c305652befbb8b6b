"""A device and a cloud: llama.cpp's server, a gateway before it, a cloud that is cut off.

    python tests/gateway/upstream/write_gguf.py draft/pair/small small.gguf   # or any GGUF of yours
    python examples/device_and_cloud/run.py small.gguf

Needs `pip install xllamacpp`; the cloud is another Outrider with the bundled pair.
"""

import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
HARD = "Put 297, 322, 985, 204, 553, 898, 695, 641 in order, largest first."
WAIT_S = 120.0


def free_port() -> int:
    """Return a port of loopback without a listener."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@contextlib.contextmanager
def running(url: str, command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program until its page answers, and end it behind the block."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline_s = time.monotonic() + WAIT_S
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5):
                break
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise SystemExit(f"{' '.join(command)} did not start")
            time.sleep(0.05)
        yield process
    finally:
        process.terminate()
        process.wait(30)


def outrider(port: int, *options: str) -> list[str]:
    """Return the command of a gateway that keeps nothing."""
    command = [sys.executable, "-m", "outrider.gateway.cli", "serve", "--port", str(port), *options]
    return [*command, "--set", "database_url=none", "--num-threads", "1"]


def ask(url: str, prompt: str, on_text: Any = None, **options: Any) -> tuple[str, dict[str, Any]]:
    """Return the streamed answer's text and report. `on_text` is called with the text so far."""
    body = {
        "model": "auto",
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0,
        "max_tokens": 300,
        "stream": True,
        "outrider": options,
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )
    text, report = "", {}
    with urllib.request.urlopen(request, timeout=60) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                return text, {"tier": "-", "reason": f"broke off: {chunk['error']['code']}"}
            report |= chunk.get("outrider") or {}
            text += "".join(c["delta"].get("content") or "" for c in chunk["choices"])
            if on_text is not None and text:
                on_text(text)
    return text, report


def say(what: str, text: str, report: dict[str, Any]) -> None:
    """Print one answer, and why it is that tier's."""
    last = text.strip().splitlines()[-1]
    sys.stdout.write(f"{what:<18} {report['tier']:<7} {last}\n{'':<26} ({report['reason']})\n")


def main(model: str) -> None:
    """Ask, cut the cloud off in mid-answer, ask on."""
    device, cloud, gate = (free_port() for _ in range(3))
    urls = [f"http://127.0.0.1:{port}" for port in (device, cloud, gate)]
    settings = ("--set", "tiers.device.server=llama_cpp", "--set", "tiers.device.continues=true")
    settings += ("--set", "tiers.cloud.server=outrider")
    settings += ("--set", "tiers.cloud.model=large", "--set", "tiers.cloud.max_retries=0")
    router = Path("draft/pair/router")
    options = ("--small", f"{urls[0]}/v1", "--tier", f"cloud={urls[1]}/v1", *settings)
    server = [sys.executable, str(HERE / "llama_server.py"), model, str(device)]
    with (
        running(f"{urls[0]}/v1/models", server),
        running(f"{urls[1]}/ready", outrider(cloud)) as far,
        running(f"{urls[2]}/ready", outrider(gate, *options, "--router", str(router))),
    ):
        say("easy", *ask(urls[2], "What is 48 + 37?"))
        say("hard", *ask(urls[2], HARD))
        say("private", *ask(urls[2], HARD, privacy="private"))

        def cut(text: str) -> None:
            if far.poll() is None:
                far.send_signal(signal.SIGKILL)
                far.wait()

        # The device goes on where the cloud's answer broke off: the app sees one answer.
        say("cut in mid-answer", *ask(urls[2], HARD, cut))
        say("asked again", *ask(urls[2], HARD))


if __name__ == "__main__":
    main(sys.argv[1])
