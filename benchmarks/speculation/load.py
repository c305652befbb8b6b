"""A closed loop of clients on one engine: each sends a request when its last one has ended.

The number of clients can change while the engine runs. Figures are taken in windows of time, in
which every client has long been served: neither the rush of all prompts at the start nor the slow
end of the last answers is in them, unless a window is opened for just that.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.shared.driving import Bench
from outrider.engine.events import Finished, TokensEmitted
from outrider.engine.request import EngineRequest

NewRequest = Callable[[int, int], EngineRequest]
"""From a client's number and how many requests it has sent to its next request."""

# A mean over fewer tokens says little about a request's pace.
_LEAST_TOKENS = 8


@dataclass(slots=True, kw_only=True)
class Window:
    """Figures between two times, over all clients.

    `token_s`: for each request, the mean time per token between its first and its last delivery in
    the window, where that is at least eight tokens. `gap_s`: between two deliveries of a request.
    """

    wall_s: float = 0.0
    num_tokens: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    token_s: list[float] = field(default_factory=list)
    gap_s: list[float] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        """Return the rate of all clients together."""
        return self.num_tokens / self.wall_s


@dataclass(slots=True)
class _Stream:
    """A client's request in flight; the times of its deliveries since the window was opened."""

    client: int
    num_tokens: int = 0  # after `first_s`
    first_s: float | None = None
    last_s: float | None = None

    def take(self, now_s: float, num_tokens: int, window: Window) -> None:
        """Book one delivery."""
        if self.first_s is None or self.last_s is None:
            self.first_s = now_s
        else:
            self.num_tokens += num_tokens
            window.gap_s.append(now_s - self.last_s)
        self.last_s = now_s

    def book(self, window: Window) -> None:
        """Add the request's pace, at its end or the window's."""
        if self.num_tokens >= _LEAST_TOKENS:
            assert self.first_s is not None
            assert self.last_s is not None
            window.token_s.append((self.last_s - self.first_s) / self.num_tokens)

    def start_anew(self) -> None:
        """A new window begins."""
        self.num_tokens = 0
        self.first_s = self.last_s = None


class ClosedLoop:
    """Clients of one engine that has no other work."""

    def __init__(
        self,
        bench: Bench,
        new_request: NewRequest,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        assert not bench.engine.has_work, "the engine is busy with something else"
        self._engine = bench.engine
        self._new_request = new_request
        self._clock = clock
        self._num_sent: dict[int, int] = {}  # of every client that there is
        self._served: set[int] = set()  # clients that have got a token
        self._streams: dict[str, _Stream] = {}

    def resize(self, num_clients: int) -> None:
        """Let clients join, or leave in the middle of their answers (the latest first)."""
        for request_id, stream in list(self._streams.items()):
            if stream.client >= num_clients:
                self._engine.abort(request_id)
                del self._streams[request_id]
        self._num_sent = {
            client: number for client, number in self._num_sent.items() if client < num_clients
        }
        self._served &= set(range(num_clients))
        for client in range(len(self._num_sent), num_clients):
            self._num_sent[client] = 0
            self._send(client)

    def settle(self) -> Window:
        """Step until every client has got a token; returns what happened meanwhile."""
        return self._window(lambda _: len(self._served) == len(self._num_sent))

    def run(self, seconds: float) -> Window:
        """Step for so long: to the end of the step in which the time is up."""
        return self._window(lambda elapsed_s: elapsed_s >= seconds)

    def stop(self) -> None:
        """All clients leave."""
        self.resize(0)
        while self._engine.has_work:
            self._engine.step()

    def _window(self, is_over: Callable[[float], bool]) -> Window:
        window = Window()
        for stream in self._streams.values():
            stream.start_anew()
        started_s = self._clock()
        while not is_over(window.wall_s):
            self._step(window)
            window.wall_s = self._clock() - started_s
        for stream in self._streams.values():
            stream.book(window)
        return window

    def _step(self, window: Window) -> None:
        events = self._engine.step()
        now_s = self._clock()
        for event in events:
            stream = self._streams.get(event.request_id)
            if stream is None:  # of a client that has left
                continue
            if isinstance(event, TokensEmitted):
                window.num_tokens += len(event.token_ids)
                window.num_drafted_tokens += event.num_drafted_tokens
                window.num_accepted_tokens += event.num_accepted_tokens
                stream.take(now_s, len(event.token_ids), window)
                self._served.add(stream.client)
            elif isinstance(event, Finished):
                stream.book(window)
                del self._streams[event.request_id]
                self._send(stream.client)

    def _send(self, client: int) -> None:
        request = self._new_request(client, self._num_sent[client])
        self._num_sent[client] += 1
        self._streams[request.request_id] = _Stream(client)
        self._engine.submit(request)
