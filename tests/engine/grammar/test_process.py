"""Compiling where it can be stopped: the compiling process, tenants' turns, caches kept apart."""

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

import outrider.engine.grammar.grammar_parts as grammar_parts
import outrider.engine.grammar.process as grammar_process
from outrider.engine.errors import InvalidGrammarError, QueueFullError
from outrider.engine.events import Failed
from outrider.engine.grammar.cache import GrammarCache
from outrider.engine.grammar.fair_threads import FairThreads, TooManyJobsError
from outrider.engine.grammar.grammar import TokenGrammar
from outrider.engine.grammar.grammar_worker import _bound_memory, _Trial
from outrider.engine.grammar.llguidance_backend import LLGuidanceCompiler
from outrider.engine.grammar.process import CompileBounds, GrammarProcess, UnfinishedGrammarError
from outrider.engine.queue.grammar_queue import GrammarQueue
from outrider.engine.request import GrammarSpec
from outrider.engine.sequences.sequence import Sequence
from tests.engines import make_engine, make_request, tiny_pair
from tests.grammars import schema_spec

VOCABULARY = [b"\xff", *(bytes([byte]) for byte in range(32, 127))]
SIMPLE = GrammarSpec(kind="regex", text="[a-z]{1,5}")
SLOW = schema_spec({"type": "object", "properties": {f"p{i}": {} for i in range(3000)}})  # 1 s

# llguidance 1.9.1 recurses without end: in the engine this would end every answer in it.
CRASHING = GrammarSpec(
    kind="grammar",
    text="start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(4000)) + 'r4000: "a"\n',
)


def compiler(bounds: CompileBounds) -> LLGuidanceCompiler:
    return LLGuidanceCompiler(
        VOCABULARY, vocab_size=len(VOCABULARY), stop_token_ids=[0], bounds=bounds
    )


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The compiling processes that a test starts."""
    started: list[subprocess.Popen[bytes]] = []
    spawn = grammar_process._spawn

    def recorded() -> "tuple[subprocess.Popen[bytes], Connection]":
        process, connection = spawn()
        started.append(process)
        return process, connection

    monkeypatch.setattr(grammar_process, "_spawn", recorded)
    yield started
    for process in started:
        process.kill()
        process.wait()


# ---- the compiling process ------------------------------------------------------------------


def test_a_slow_or_crashing_grammar_ends_its_process_and_nothing_else(
    processes: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = compiler(CompileBounds(compile_cpu_s=0.3))

    def forbidden(*_: object) -> None:
        raise AssertionError("a client's text is read in the process that runs the steps")

    monkeypatch.setattr(grammar_parts, "source_of", forbidden)
    with pytest.raises(InvalidGrammarError, match=r"more than 0\.3 s of processor time"):
        own.compile(SLOW).result(60)
    assert processes[0].returncode == -signal.SIGPROF
    assert own.compile(SIMPLE).result(60).vocab_size == len(VOCABULARY)
    with pytest.raises(InvalidGrammarError, match="the compiler failed on it"):
        own.compile(CRASHING).result(60)
    assert processes[1].returncode == -signal.SIGSEGV
    assert own.compile(replace(SIMPLE, text="[a-z]{3}")).result(60)
    slow = own.compile(SLOW)
    assert isinstance(slow.exception(0), InvalidGrammarError)  # kept: not tried again

    os.kill(processes[2].pid, signal.SIGKILL)  # as a system without memory does
    processes[2].wait()
    other = replace(SIMPLE, text="[a-z]{2}")
    with pytest.raises(UnfinishedGrammarError):
        own.compile(other).result(60)
    assert own.compile(other).result(60)  # not its own fault: tried again
    assert len(processes) == 4

    own.close()
    assert processes[3].returncode == -signal.SIGKILL


def test_the_process_has_a_bound_on_memory() -> None:
    code = (
        "from outrider.engine.grammar.grammar_worker import _bound_memory\n"
        "_bound_memory(2**27)\n"
        "small = bytearray(2**20)\n"
        "try: bytearray(2**28)\n"
        "except MemoryError: print('refused')"
    )
    if sys.platform == "linux":
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert ran.stdout == "refused\n", ran.stderr


def test_a_grammar_that_is_too_large_when_compiled_is_refused() -> None:
    own = GrammarProcess(VOCABULARY, [0], CompileBounds(max_grammar_bytes=3000))
    try:
        with pytest.raises(InvalidGrammarError, match=r"compiled it has \d+ bytes; .* 3000"):
            own.prepare(SIMPLE)
    finally:
        own.close()


def test_a_grammar_that_is_slow_to_follow_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.engine.grammar.grammar_worker._bound_memory", lambda _: None)
    bounds = CompileBounds(token_cpu_s=1e-9)
    trial = _Trial(json.loads(GrammarProcess(VOCABULARY, [0], bounds)._hello))
    assert "ms for a token" in trial.run({"kind": SIMPLE.kind, "text": SIMPLE.text})["error"]


def test_the_process_is_told_no_secrets_and_ends_with_its_compiler(
    processes: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_KEYS__ADMIN_TOKEN", "secret")
    own = compiler(CompileBounds())
    assert own.compile(SIMPLE).result(60)
    if sys.platform.startswith("linux"):
        folder = Path(f"/proc/{processes[0].pid}")
        assert b"secret" not in (folder / "environ").read_bytes()
        assert sorted(int(link.name) for link in (folder / "fd").iterdir())[:3] == [0, 1, 2]
        links = [os.readlink(link) for link in (folder / "fd").iterdir()]
        assert sum(link.startswith("socket:") for link in links) == 1, "it has other descriptors"
    del own
    gc.collect()
    assert processes[0].wait(20) == -signal.SIGKILL


def test_a_process_that_could_not_be_started_once_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """JSON mode has one entry for all tenants: it would be refused until the next restart."""

    def refused() -> "tuple[subprocess.Popen[bytes], Connection]":
        raise BlockingIOError("Resource temporarily unavailable")

    own = compiler(CompileBounds())
    with monkeypatch.context() as patch:
        patch.setattr(grammar_process, "_spawn", refused)
        with pytest.raises(UnfinishedGrammarError, match="try again later"):
            own.compile(GrammarSpec(kind="json")).result(60)
    assert own.compile(GrammarSpec(kind="json")).result(60)


def test_a_limit_on_memory_that_is_there_already_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource")
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (10**9, 10**9))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: asked.append(limits))
    _bound_memory(2**60)
    assert asked in ([], [(10**9, 10**9)])  # none where there is no /proc


# ---- tenants take turns ---------------------------------------------------------------------


def test_one_tenants_slow_jobs_do_not_keep_anothers_waiting() -> None:
    threads: FairThreads[str, str] = FairThreads(("one", "two"), max_waiting_each=3, name="test")
    begun, release, order = threading.Event(), threading.Event(), list[str]()

    def slow(_: str) -> str:
        order.append("slow")
        begun.set()
        assert release.wait(20)
        return "slow"

    def quick(_: str) -> str:
        order.append("quick")
        return "quick"

    try:
        first = threads.submit("hostile", slow)
        assert begun.wait(20)
        waiting = [threads.submit("hostile", slow) for _ in range(3)]
        for _ in range(5):
            assert threads.submit("other", quick).result(20) == "quick"
        assert order.count("slow") <= 1  # the second thread is not for the same tenant
        with pytest.raises(TooManyJobsError):
            threads.submit("hostile", slow)
        assert waiting[1].cancel()
        threads.submit("hostile", slow)  # in the place of the one that was cancelled
        release.set()
        assert first.result(20) == waiting[2].result(20) == "slow"
    finally:
        release.set()
        threads.close()


def test_the_next_job_is_of_the_tenant_whose_turn_was_longest_ago() -> None:
    threads: FairThreads[str, None] = FairThreads(("only",), max_waiting_each=9, name="test")
    release, order = threading.Event(), list[str]()
    try:
        threads.submit("z", lambda _: assert_set(release))
        jobs = [
            threads.submit(tenant, lambda _, tenant=tenant: order.append(tenant))  # type: ignore[misc]
            for tenant in ("a", "a", "a", "b", "c", "b")
        ]
        release.set()
        for job in jobs:
            job.result(20)
        assert order == ["a", "b", "c", "a", "b", "a"]
    finally:
        release.set()
        threads.close()


def assert_set(event: threading.Event) -> None:
    assert event.wait(20)


class Listening:
    """A compiler that records the tenants of its jobs, or is full."""

    def __init__(self, *, is_full: bool = False) -> None:
        self.asked: list[tuple[str, str]] = []
        self.is_full = is_full

    def compile(
        self, spec: GrammarSpec, *, salt: str = "", tenant: str = ""
    ) -> "Future[TokenGrammar]":
        if self.is_full:
            raise QueueFullError(num_waiting=128, retry_after_s=1.0)
        self.asked.append((salt, tenant))
        return Future()


def test_a_request_is_compiled_for_its_tenant_and_salt() -> None:
    listening = Listening()
    engine = make_engine(tiny_pair(), grammars={"large": listening})
    request = replace(make_request("a", [3, 4]), grammar=SIMPLE, tenant="t", cache_salt="s")
    engine.submit(request)
    assert listening.asked == [("s", "t")]
    listening.is_full = True
    with pytest.raises(QueueFullError):
        engine.submit(replace(request, request_id="b"))
    engine.abort("a")
    assert [event.request_id for event in engine.step()] == ["a"]
    assert not engine.has_work


def test_a_grammar_is_given_up_only_when_no_request_waits_for_it() -> None:
    future: Future[TokenGrammar] = Future()

    class Sharing(Listening):
        def compile(
            self, spec: GrammarSpec, *, salt: str = "", tenant: str = ""
        ) -> "Future[TokenGrammar]":
            return future

    engine = make_engine(tiny_pair(), grammars={"large": Sharing()})
    for name in ("a", "b"):
        engine.submit(replace(make_request(name, [3, 4]), grammar=SIMPLE))
    assert isinstance(engine._preparation.grammars, GrammarQueue)
    engine.abort("a")
    assert not future.cancelled()
    engine.abort("b")
    assert future.cancelled()


def test_a_failure_that_is_kept_keeps_nothing_of_the_requests_that_it_ended() -> None:
    """The same invalid grammar again and again held every prompt that came with it."""
    failed: Future[TokenGrammar] = Future()
    failed.set_exception(InvalidGrammarError("no"))

    class Cached:
        def compile(
            self, spec: GrammarSpec, *, salt: str = "", tenant: str = ""
        ) -> "Future[TokenGrammar]":
            return failed

    engine = make_engine(tiny_pair(), grammars={"large": Cached()})
    sequences: list[weakref.ref[Sequence]] = []
    for number in range(3):
        engine.submit(replace(make_request(f"{number}", [3, 4]), grammar=SIMPLE))
        sequences += [weakref.ref(sequence) for sequence in engine._sequences.values()]
        (event,) = engine.step()
        assert isinstance(event, Failed)
    gc.collect()
    assert [sequence() for sequence in sequences] == [None] * 3


def test_a_job_that_failed_keeps_nothing_of_what_it_had() -> None:
    """A compiled grammar may have 64 MiB, and failures weigh nothing in the cache."""
    threads: FairThreads[str, str] = FairThreads(("one",), max_waiting_each=3, name="test")
    held: list[weakref.ref[Sized]] = []

    def failing(_: str) -> str:
        large = Sized(64 * 2**20)
        held.append(weakref.ref(large))
        try:
            raise RuntimeError("of the compiler")
        except RuntimeError as error:
            raise InvalidGrammarError("no text conforms to it") from error

    future = threads.submit("a", failing)
    threads.submit("a", lambda _: "next").result(20)  # the thread has let go of the first
    assert isinstance(future.exception(20), InvalidGrammarError)
    gc.collect()
    assert held[0]() is None
    threads.close()


# ---- the cache ------------------------------------------------------------------------------


class Sized:
    """A compiled grammar of a size."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes


def done(size_bytes: int) -> "Future[TokenGrammar]":
    future: Future[TokenGrammar] = Future()
    future.set_result(Sized(size_bytes))  # type: ignore[arg-type]
    return future


def regex(number: int) -> GrammarSpec:
    return GrammarSpec(kind="regex", text=f"a{{{number}}}")


def test_the_grammar_cache_tells_tenants_apart_by_salt() -> None:
    """Another tenant's entry would answer sooner: a tenant could learn which schemas others use."""
    cache = GrammarCache(max_entries=8, max_bytes=1000)
    cache.put(SIMPLE, "a", done(1))
    assert cache.get(SIMPLE, "a") is not None
    assert cache.get(SIMPLE, "b") is None
    cache.put(GrammarSpec(kind="json"), "a", done(1))  # no client wrote it
    assert cache.get(GrammarSpec(kind="json"), "b") is not None


@pytest.mark.parametrize("size_bytes", [1, 300])
def test_a_tenant_cannot_flush_anothers_grammars(size_bytes: int) -> None:
    cache = GrammarCache(max_entries=8, max_bytes=1000)
    cache.put(GrammarSpec(kind="json"), "own", done(10))
    for number in range(2):
        cache.put(regex(number), "own", done(10))
    for number in range(50):
        cache.put(regex(number), "hostile", done(size_bytes))
    assert len(cache) <= 8
    assert all(cache.get(regex(number), "own") for number in range(2))
    assert cache.get(regex(49), "hostile")
    assert cache.get(regex(0), "hostile") is None
    assert cache.get(GrammarSpec(kind="json"), "own")


def test_a_grammar_in_compilation_stays_in_the_cache() -> None:
    cache = GrammarCache(max_entries=2, max_bytes=1000)
    for number in range(5):
        cache.put(regex(number), "a", Future())
    assert len(cache) == 5
    cache.put(regex(5), "b", done(1))
    assert cache.get(regex(0), "a")
