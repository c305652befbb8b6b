"""Asks the servers of bench_gguf for an answer, and reads what their streams say."""

import contextlib
import http.client
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

from benchmarks.shared.turns import Turn
from benchmarks.shared.upstream_servers import HOST, Server

SEED: Final = 7
_TIMEOUT_S: Final = 300.0
_COUNTS: Final = re.compile(
    r"outrider_spec_decode_num_(draft|accepted)_tokens_per_source_total"
    r'\{position="(\d+)",source="\w+"\} (\S+)'
)

Answer = Callable[[Sequence[int], int, float], Turn]
"""Answers token ids with at most so many tokens, at a temperature."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftedTurn(Turn):
    """An answer whose guesses are known by their depth: entry 0 is the token right after."""

    verified_by_depth: tuple[int, ...]
    accepted_by_depth: tuple[int, ...]


def ask_outrider(
    server: Server, token_ids: Sequence[int], max_tokens: int, temperature: float = 0.0
) -> Turn:
    """Answer by the API that OpenAI's clients use."""
    body = {
        "model": "large",
        "prompt": list(token_ids),
        "max_tokens": max_tokens,
        "temperature": temperature,
        "seed": SEED,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    return _turn(
        server,
        "/v1/completions",
        body,
        tokens_of=lambda event: [id for one in event["choices"] for id in one["token_ids"]],
        counts_of=_outrider_counts,
    )


def ask_drafting(
    server: Server, token_ids: Sequence[int], max_tokens: int, temperature: float = 0.0
) -> DraftedTurn:
    """Answer as `ask_outrider` does; the metrics before and after tell the guesses' depths."""
    before = depth_counts(server.get("/metrics"))
    turn = ask_outrider(server, token_ids, max_tokens, temperature)
    after = depth_counts(server.get("/metrics"))
    verified, accepted = (
        tuple(now - (old[at] if at < len(old) else 0) for at, now in enumerate(new))
        for old, new in zip(before, after, strict=True)
    )
    known = {field.name: getattr(turn, field.name) for field in fields(Turn)}
    return DraftedTurn(**known, verified_by_depth=verified, accepted_by_depth=accepted)


def depth_counts(metrics: str) -> tuple[list[int], list[int]]:
    """Read verified and accepted nodes by depth, of all draft sources, from a page of metrics."""
    found: dict[str, dict[int, int]] = {"draft": {}, "accepted": {}}
    for kind, position, count in _COUNTS.findall(metrics):
        by_depth = found[kind]
        by_depth[int(position)] = by_depth.get(int(position), 0) + int(float(count))
    size = 1 + max((depth for counts in found.values() for depth in counts), default=-1)
    verified, accepted = ([counts.get(at, 0) for at in range(size)] for counts in found.values())
    return verified, accepted


def ask_llama(
    server: Server, token_ids: Sequence[int], max_tokens: int, temperature: float = 0.0
) -> Turn:
    """Answer by llama.cpp's own API, whose streams name tokens."""
    sampling: dict[str, Any] = {"samplers": ["top_k"], "top_k": 1}
    if temperature:
        sampling = {"samplers": ["temperature"], "temperature": temperature, "seed": SEED}
    body = {
        "prompt": list(token_ids),
        "n_predict": max_tokens,
        "stream": True,
        "return_tokens": True,
        **sampling,
    }
    return _turn(
        server,
        "/completion",
        body,
        tokens_of=lambda event: event["tokens"],
        counts_of=_llama_counts,
    )


def ask(server: Server, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a whole answer in JSON. Raises RuntimeError with the server's words."""
    with contextlib.closing(_connection(server)) as connection:
        found: dict[str, Any] = json.loads(_posted(server, connection, path, body).read())
    return found


def _outrider_counts(event: Mapping[str, Any]) -> tuple[float | None, int, int]:
    found = event.get("outrider") or {}
    mean = found.get("mean_emitted_tokens") or None
    return mean, found.get("drafted_tokens", 0), found.get("accepted_tokens", 0)


def _llama_counts(event: Mapping[str, Any]) -> tuple[float | None, int, int]:
    found = event.get("timings") or {}
    accepted = found.get("draft_n_accepted", 0)
    if "predicted_n" not in found:
        return None, 0, 0
    num_tokens = found["predicted_n"]
    return num_tokens / max(1, num_tokens - accepted), found.get("draft_n", 0), accepted


def _turn(
    server: Server,
    path: str,
    body: Mapping[str, Any],
    *,
    tokens_of: Callable[[Mapping[str, Any]], list[int]],
    counts_of: Callable[[Mapping[str, Any]], tuple[float | None, int, int]],
) -> Turn:
    """Ask, and time the events that bring tokens; they are parsed when the clock has stopped.

    `counts_of`: tokens a pass, drafted and accepted ones, of the event that tells them.
    """
    with contextlib.closing(_connection(server)) as connection:
        sent_s = time.perf_counter()
        response = _posted(server, connection, path, body)
        lines = [(time.perf_counter(), line) for line in response if line.startswith(b"data: {")]
    events = [(arrived_s, json.loads(line.removeprefix(b"data: "))) for arrived_s, line in lines]
    arrivals = [(at_s, tokens) for at_s, event in events if (tokens := tokens_of(event))]
    counts = [found for _, event in events if (found := counts_of(event))[0]]
    if not arrivals:
        return Turn(token_ids=[], wall_s=time.perf_counter() - sent_s)
    token_ids = [token for _, tokens in arrivals for token in tokens]
    mean, num_drafted, num_accepted = counts[-1] if counts else (None, 0, 0)
    return Turn(
        token_ids=token_ids,
        wall_s=arrivals[-1][0] - sent_s,
        decode_s=arrivals[-1][0] - arrivals[0][0],
        num_decoded_tokens=len(token_ids) - len(arrivals[0][1]),
        num_passes=round(len(token_ids) / mean) if mean else 0,
        num_drafted_tokens=num_drafted,
        num_accepted_tokens=num_accepted,
    )


def _connection(server: Server) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(HOST, server.port, timeout=_TIMEOUT_S)


def _posted(
    server: Server, connection: http.client.HTTPConnection, path: str, body: Mapping[str, Any]
) -> http.client.HTTPResponse:
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != http.client.OK:
        raise RuntimeError(f"{server.name}: {response.read()[:500].decode(errors='replace')}")
    return response
