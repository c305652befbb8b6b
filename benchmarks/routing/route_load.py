"""Clients of a gateway in a process of their own: half chat, half ask prompts of given lengths.

Started by bench_router with the port, the seconds and the folder of texts; prints what it sent as
one JSON line.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.shared.http_stream import ChatConnection, StreamError

_HOST = "127.0.0.1"
# So that the asked prompts come into a gateway that is at work, not into one that they block.
_PAUSE_S = 0.002


async def chat(port: int, texts: Iterator[str], deadline_s: float, sent: Counter[str]) -> None:
    """One client: chat after chat, until the time is over."""
    async with ChatConnection(_HOST, port) as connection:
        while time.monotonic() < deadline_s:
            await connection.chat(_request(next(texts), max_tokens=32))
            sent["chats"] += 1


async def ask(port: int, texts: Iterator[str], deadline_s: float, sent: Counter[str]) -> None:
    """One client that asks for one token of an answer each time."""
    while time.monotonic() < deadline_s:
        await asyncio.sleep(_PAUSE_S)
        # Texts that are longer than the model's context are routed, and then refused.
        with contextlib.suppress(StreamError):
            async with ChatConnection(_HOST, port) as connection:
                await connection.chat(_request(next(texts), max_tokens=1))
        sent["asked"] += 1


def _request(text: str, *, max_tokens: int) -> dict[str, object]:
    return {
        "model": "auto",
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": max_tokens,
    }


async def _run(arguments: argparse.Namespace) -> Counter[str]:
    chats = json.loads((arguments.texts / "chats.json").read_text(encoding="utf-8"))
    asked = json.loads((arguments.texts / "asked.json").read_text(encoding="utf-8"))
    deadline_s = time.monotonic() + arguments.seconds
    sent: Counter[str] = Counter()
    works = ((chat, itertools.cycle(chats)), (ask, itertools.cycle(asked)))
    await asyncio.gather(
        *(
            work(arguments.port, texts, deadline_s, sent)
            for work, texts in works
            for _ in range(arguments.clients)
        )
    )
    return sent


def main(argv: Sequence[str] | None = None) -> None:
    """Send until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--clients", type=int, required=True, help="of each kind")
    parser.add_argument("--texts", type=Path, required=True)
    print(json.dumps(asyncio.run(_run(parser.parse_args(argv)))))


if __name__ == "__main__":
    main()
