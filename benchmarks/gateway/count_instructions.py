"""How many instructions does a request take on the gateway's event loop, before a change and after?

Method: gateways as in bench_gateway_time, one request after the other. The processor counts the
instructions (user mode) of each gateway's main thread, on which its event loop runs, by Linux's
perf_event_open. With `--baseline`, gateways of two checkouts have their turns within the run.

Reading it: other programs on the machine change times, and processor times too, by what they leave
of caches and clock; they do not change instructions. So a per cent can be seen on a busy machine.
What system calls, other threads (the ledger's) and waiting take is not in it: for that there is
bench_gateway_time. Requests of a stream have 64 chunks.

    python -m benchmarks.gateway.count_instructions --baseline ../before
"""

import contextlib
import ctypes
import os
import platform
import socket
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks.gateway.bench_gateway_time import BASELINE, LOCAL, PASSED, Bed, Gateway, test_bed
from benchmarks.shared import benchmark
from benchmarks.shared.benchmark import Benchmark, Results, Table, figure, option
from benchmarks.shared.harness import measure_in_turn
from benchmarks.shared.record import Summary
from benchmarks.shared.upstream_load import http_request
from benchmarks.shared.upstream_servers import HOST

_SYSTEM_CALL: Final = {"x86_64": 298, "aarch64": 241}
"""Numbers of perf_event_open; the C library has no function for it."""
_ATTRIBUTES_BYTES: Final = 128
_FLAGS_OFFSET: Final = 40
_INSTRUCTIONS: Final = 1
_WITHOUT_KERNEL: Final = (1 << 5) | (1 << 6)
_LAST_CHUNK: Final = b"0\r\n\r\n"
_KINDS: Final[Mapping[str, tuple[str, bool]]] = {
    "everything on": (LOCAL, False),
    "everything on, a stream": (LOCAL, True),
    "passed on": (PASSED, False),
    "passed on, a stream": (PASSED, True),
}


@dataclass(frozen=True, kw_only=True)
class Options(benchmark.Options):
    """Flags of the command line."""

    baseline: Path | None = option(None, "another checkout")
    requests: int = option(50, "of a window")


@dataclass(frozen=True, slots=True)
class InstructionCounter:
    """Counts the instructions of one thread, named by its id, in user mode."""

    descriptor: int

    @classmethod
    @contextlib.contextmanager
    def of(cls, thread_id: int) -> Iterator["InstructionCounter"]:
        """Count from now on. Raises SystemExit where the machine does not let us."""
        attributes = bytearray(_ATTRIBUTES_BYTES)
        struct.pack_into("IIQ", attributes, 0, 0, _ATTRIBUTES_BYTES, _INSTRUCTIONS)
        struct.pack_into("Q", attributes, _FLAGS_OFFSET, _WITHOUT_KERNEL)
        libc = ctypes.CDLL(None, use_errno=True)
        buffer = (ctypes.c_char * _ATTRIBUTES_BYTES).from_buffer(attributes)
        number = _SYSTEM_CALL.get(platform.machine())
        found = -1 if number is None else libc.syscall(number, buffer, thread_id, -1, -1, 0)
        if found < 0:
            reason = os.strerror(ctypes.get_errno())
            raise SystemExit(f"the processor's instructions cannot be counted here: {reason}")
        try:
            yield cls(found)
        finally:
            os.close(found)

    def read(self) -> int:
        """Return the instructions so far."""
        (count,) = struct.unpack("Q", os.read(self.descriptor, 8))
        return int(count)


class Client:
    """One connection; one request at a time."""

    def __init__(self, gateway: Gateway, *, is_streamed: bool) -> None:
        document: dict[str, Any] = {
            "model": gateway.model,
            "messages": [
                {"role": "system", "content": "You are a helpful assistant. Answer in short."},
                {"role": "user", "content": "Tell me about trees. " * 3},
            ],
            "temperature": 0,
            "max_tokens": gateway.num_tokens,
        }
        if is_streamed:
            document["stream"] = True
        self._request = http_request(document, key=gateway.way.key)
        self._socket = socket.create_connection((HOST, gateway.way.server.port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self) -> None:
        """Send the request and read its answer. Raises SystemExit for one that is no answer."""
        self._socket.sendall(self._request)
        answer = bytearray()
        while not _is_whole(answer):
            part = self._socket.recv(65_536)
            if not part:
                raise SystemExit("the gateway hung up")
            answer += part
        if not answer.startswith(b"HTTP/1.1 200 "):
            raise SystemExit(f"the gateway refused the request: {bytes(answer[:500])!r}")

    def close(self) -> None:
        """Hang up."""
        self._socket.close()


def _is_whole(answer: bytes | bytearray) -> bool:
    head, end, body = answer.partition(b"\r\n\r\n")
    if not end:
        return False
    _, has_length, rest = head.lower().partition(b"content-length: ")
    if has_length:
        return len(body) >= int(rest.partition(b"\r\n")[0])
    return body.endswith(_LAST_CHUNK)


def count(gateway: Gateway, num_requests: int, *, is_streamed: bool) -> list[float]:
    """Return the instructions that each request took."""
    counts: list[float] = []
    client = Client(gateway, is_streamed=is_streamed)
    with (
        contextlib.closing(client),
        InstructionCounter.of(gateway.way.server.pid) as counter,
    ):
        for _ in range(num_requests):
            before = counter.read()
            client.ask()
            counts.append(counter.read() - before)
    return counts


def measure(options: Options) -> Results:
    """Return the instructions of a request by kind and checkout."""
    with test_bed(options.baseline) as bed:
        return {kind: _of_kind(bed, *which, options) for kind, which in _KINDS.items()}


def _of_kind(bed: Bed, server: str, is_streamed: bool, options: Options) -> dict[str, Summary]:
    gateways = {name: g for (of, name), g in bed.gateways.items() if of == server}
    rounds = measure_in_turn(
        {
            name: partial(count, gateway, options.requests, is_streamed=is_streamed)
            for name, gateway in gateways.items()
        },
        repeats=options.repeats,
        warm_up={
            name: partial(count, gateway, 2 * options.requests, is_streamed=is_streamed)
            for name, gateway in gateways.items()
        },
    )
    return {name: Summary.of([n for counts in rounds[name] for n in counts]) for name in gateways}


def tables(options: Options, results: Results) -> Iterator[Table]:
    """A row a kind and checkout."""
    entries = {
        f"{kind}, {name}": {"found": found, "ratio": found.median / before.median}
        for kind, of_kind in results.items()
        for name, found in of_kind.items()
        for before in (of_kind.get(BASELINE, found),)
    }
    columns = (
        ("median", figure("found", ",.0f", scale=1e-3)),
        ("p99", figure("found", ",.0f", part="p99", scale=1e-3)),
        ("ratio", figure("ratio", ".3f")),
    )
    yield Table(title="instructions of a request, thousands", columns=columns, entries=entries)


BENCHMARK: Final = Benchmark(options=Options, measure=measure, tables=tables, variant="mock")

if __name__ == "__main__":
    BENCHMARK.start()
