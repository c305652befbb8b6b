"""For how long does the largest permitted body hold the event loop, so that no stream goes on?

Method: a gateway over an engine without models is sent each of the largest bodies that its default
bounds let through (`largest_bodies`), once with local models only and once with an upstream tier
beside them, which reads bodies by another way. Meanwhile another connection asks for /health again
and again, every millisecond. The gap is the longest time that one of these took; `busy` is the most
processor time, of all its threads, that the gateway took during one of them. Each body is sent in
several rounds, all bodies in each round.

Reading it: a gap is what another tenant's stream waits for. Whatever else runs on the machine adds
to it, so the figures of a body are the least of its rounds; `smallest` is the machine's own share.
On a machine with other work `busy` says more. The goal is 100 ms.

    python -m benchmarks.gateway.bench_largest_bodies
    python -m benchmarks.gateway.bench_largest_bodies --only "chat: tool" --gateway local
"""

import contextlib
import http.client
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from benchmarks.gateway.largest_bodies import largest_bodies
from benchmarks.shared import benchmark
from benchmarks.shared.benchmark import (
    Benchmark,
    Results,
    Table,
    figure,
    milliseconds,
    option,
    within,
)
from benchmarks.shared.harness import progress_bar
from benchmarks.shared.upstream_servers import HOST, Server, mock_server, tenant_server

GOAL_S: Final = 0.1
_PAUSE_S: Final = 0.001
_TIMEOUT_S: Final = 120.0
_AFTER_S: Final = 0.02
"""Seconds after the last byte of an answer in which gaps still count."""
_OPTIONS: Final = ("--set", "database_url=none", "--context", "1000000")
_PING: Final = b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
_LOCAL: Final = "local"
_UPSTREAM: Final = "upstream"
_BOTH: Final = "both"
_MODELS: Final = {_LOCAL: "large", _UPSTREAM: "cloud"}

Bodies = Mapping[str, tuple[str, bytes]]
"""Path and content, by name."""


@dataclass(frozen=True, kw_only=True)
class Options(benchmark.Options):
    """Flags of the command line."""

    repeats: int = option(5, "measured rounds")
    only: str = option("", "bodies whose name holds this")
    gateway: Literal["local", "upstream", "both"] = option("both", "that is asked")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """One body's request: its status, the time to its answer, and the longest gap meanwhile."""

    status: int
    seconds: float
    gap_s: float
    busy_s: float


# ---- heartbeat --------------------------------------------------------------------------------


class Heartbeat:
    """Asks for /health in a thread, one after the other, on one connection."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._socket = socket.create_connection((HOST, server.port), timeout=_TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.longest_s = 0.0
        self.busiest_s = 0.0
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._beat)

    def __enter__(self) -> "Heartbeat":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._has_ended.set()
        self._thread.join()
        self._socket.close()

    def _beat(self) -> None:
        while not self._has_ended.wait(_PAUSE_S):
            began_s, busy_s = time.perf_counter(), processor_s(self._server.pid)
            self._socket.sendall(_PING)
            self._read()
            self.longest_s = max(self.longest_s, time.perf_counter() - began_s)
            self.busiest_s = max(self.busiest_s, processor_s(self._server.pid) - busy_s)

    def _read(self) -> None:
        """Read one answer, whose headers and body come together or not."""
        data = b""
        while b"\r\n\r\n" not in data:
            data += self._more()
        head, _, body = data.partition(b"\r\n\r\n")
        lines = head.lower().split(b"\r\n")
        length = next(int(x.partition(b":")[2]) for x in lines if x.startswith(b"content-length:"))
        while len(body) < length:
            body += self._more()

    def _more(self) -> bytes:
        data = self._socket.recv(65_536)
        if not data:
            raise ConnectionError("the gateway has closed the heartbeat's connection")
        return data


def processor_s(pid: int) -> float:
    """Processor time of all threads of another process; 0 where the system does not say."""
    if not sys.platform.startswith("linux"):
        return 0.0
    # The kernel's way to number the clock of a process (clock_getcpuclockid).
    return time.clock_gettime((~pid << 3) | 2)


def send(server: Server, path: str, body: bytes) -> Sent:
    """Send one body while the heart beats."""
    connection = http.client.HTTPConnection(HOST, server.port, timeout=_TIMEOUT_S)
    with contextlib.closing(connection), Heartbeat(server) as heartbeat:
        began_s = time.perf_counter()
        connection.request("POST", path, body, {"content-type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        seconds = time.perf_counter() - began_s
        time.sleep(_AFTER_S)
    return Sent(
        status=answer.status,
        seconds=seconds,
        gap_s=heartbeat.longest_s,
        busy_s=heartbeat.busiest_s,
    )


# ---- rounds -----------------------------------------------------------------------------------


@contextlib.contextmanager
def gateways(wanted: str) -> Iterator[dict[str, Server]]:
    """The gateways by name, without keys and a ledger."""
    with contextlib.ExitStack() as stack:
        servers = {}
        if wanted in (_BOTH, _LOCAL):
            servers[_LOCAL] = stack.enter_context(tenant_server(_LOCAL, _OPTIONS))
        if wanted in (_BOTH, _UPSTREAM):
            mock = stack.enter_context(mock_server((), core=None))
            tier = ("--set", f"tiers.cloud.url={mock.url}", "--set", "tiers.cloud.model=mock-model")
            servers[_UPSTREAM] = stack.enter_context(tenant_server(_UPSTREAM, _OPTIONS + tier))
        yield servers


def rounds_of(
    servers: Mapping[str, Server], bodies: Mapping[str, Bodies], num_rounds: int
) -> dict[str, dict[str, list[Sent]]]:
    """By gateway and body: what was sent, once in each round. The first round is not kept."""
    results: dict[str, dict[str, list[Sent]]] = {
        name: {body: [] for body in bodies[name]} for name in servers
    }
    total = (1 + num_rounds) * sum(map(len, results.values()))
    with progress_bar("bodies", total) as advance:
        for number in range(1 + num_rounds):
            for name, server in servers.items():
                for body, (path, content) in bodies[name].items():
                    sent = send(server, path, content)
                    if number:
                        results[name][body].append(sent)
                    advance(body)
    return results


def measure(options: Options) -> Results:
    """Return each body's figures, by gateway."""
    bodies = {
        name: {n: body for n, body in largest_bodies(model).items() if options.only in n}
        for name, model in _MODELS.items()
    }
    with gateways(options.gateway) as servers:
        rounds = rounds_of(servers, bodies, options.repeats)
    return {
        name: {body: figures(bodies[name][body][1], sent) for body, sent in of_gateway.items()}
        for name, of_gateway in rounds.items()
    }


def figures(content: bytes, rounds: Sequence[Sent]) -> Results:
    """One body at one gateway: the least of its rounds' longest gaps and busiest times."""
    return {
        "num_bytes": len(content),
        "status": rounds[-1].status,
        "seconds": min(sent.seconds for sent in rounds),
        "gap_s": min(sent.gap_s for sent in rounds),
        "busy_s": min(sent.busy_s for sent in rounds),
    }


_COLUMNS: Final = (
    ("bytes", figure("num_bytes", ",.0f")),
    ("status", figure("status", ".0f")),
    ("answer ms", milliseconds("seconds")),
    ("gap ms", milliseconds("gap_s")),
    ("busy ms", milliseconds("busy_s")),
    ("goal", within("gap_s", GOAL_S)),
)


def tables(options: Options, results: Results) -> Iterator[Table]:
    """A table a gateway."""
    for name, entries in results.items():
        title = f"the longest gap, gateway: {name}"
        yield Table(title=title, columns=_COLUMNS, entries=entries, first="body")


def _variant(options: Options) -> str:
    return f"mock-{options.only}" if options.only else "mock"


BENCHMARK: Final = Benchmark(options=Options, measure=measure, tables=tables, variant=_variant)

if __name__ == "__main__":
    BENCHMARK.start()
