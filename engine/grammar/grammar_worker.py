"""The process that compiles clients' grammars first, where taking too long ends only itself.

It compiles a grammar once to see that it can be compiled, within bounds of processor time and
memory that the kernel enforces, in llguidance's code too: definitions that refer to each other a
thousand deep end it (its recursion has no bound), and comparing a thousand patterns takes minutes.
The engine compiles the same text again in a thread, which cannot be stopped but by then is known to
end.

Messages are JSON, one at a time: a `hello` with vocabulary and bounds, answered by "ready", then
grammars, each answered by its source or an error. A grammar with lenient schemas that cannot be
compiled or followed is tried again with less of them.
"""

import json
import random
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Any, Final, cast

import llguidance
import numpy as np

from outrider.engine.errors import InvalidGrammarError
from outrider.engine.grammar.grammar_parts import schema_source
from outrider.engine.grammar.json_schema import Schema
from outrider.engine.grammar.leaving_out import LeavingOut
from outrider.engine.grammar.source import prepare_source
from outrider.engine.grammar.vocabulary import LIMITS, is_stuck, reason, tokenizer_of
from outrider.engine.request import GrammarKind

# Smaller than the stack of the threads that compile in the engine's process (8 MiB or more), so
# that recursion that is too deep for them is too deep here first.
_STACK_BYTES: Final = 4 * 2**20
_NUM_WALKED_TOKENS: Final = 16


def main() -> None:
    """Serve the connection whose file descriptor is the first argument until it is closed."""
    # Signals to the whole group are for the gateway; the end of the connection ends us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection = Connection(int(sys.argv[1]))
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=_serve, args=(connection,))
    thread.start()
    thread.join()


def _serve(connection: Connection) -> None:
    try:
        hello = json.loads(connection.recv_bytes())
        trial = _Trial(hello)
        connection.send_bytes(b'"ready"')
        while True:
            answer = trial.run(json.loads(connection.recv_bytes()))
            connection.send_bytes(json.dumps(answer).encode())
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the engine is gone, or needs us no more


class _Trial:
    """Compiles for one vocabulary, within bounds."""

    def __init__(self, hello: dict[str, Any]) -> None:
        self._stop_token_ids: list[int] = hello["stop_token_ids"]
        tokens = [text.encode("latin-1") for text in hello["vocabulary"]]
        self._vocab_size = len(tokens)
        self._tokenizer = tokenizer_of(tokens, self._stop_token_ids)
        self._token_cpu_s: float = hello["token_cpu_s"]
        self._compile_cpu_s: float = hello["compile_cpu_s"]
        self._max_grammar_bytes: int = hello["max_grammar_bytes"]
        _bound_memory(hello["compile_memory_bytes"])

    def run(self, asked: dict[str, Any]) -> dict[str, Any]:
        """The grammar as llguidance takes it, or an error that says why there is none.

        `asked`: kind, text and, of a grammar whose trial has ended a process, `is_loose`. Ends the
        process by SIGPROF after too much processor time.
        """
        signal.setitimer(signal.ITIMER_PROF, self._compile_cpu_s)
        try:
            return self._try_each(asked)
        except InvalidGrammarError as error:
            return {"error": str(error)}
        except MemoryError:
            return {"error": "compiling it takes too much memory; simplify it"}
        except Exception as error:  # noqa: BLE001 - a client's text ends no more than its request
            return {"error": reason(str(error)), "unforeseen": type(error).__name__}
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)

    def _try_each(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Try the grammar, and while it fails less and less of its lenient schemas."""
        checks = [None] if asked.get("is_loose") else [self._begins, self._is_followed, None]
        while True:
            leaving_out = LeavingOut(checks.pop(0))
            try:
                return self._try(asked, leaving_out)
            except (InvalidGrammarError, MemoryError):
                if not (checks and leaving_out.has_prepared):
                    raise

    def _try(self, asked: dict[str, Any], leaving_out: LeavingOut) -> dict[str, Any]:
        before = _resident_bytes()
        source = prepare_source(cast(GrammarKind, asked["kind"]), asked["text"], leaving_out)
        self._walk(self._matcher(source.text), _NUM_WALKED_TOKENS)
        size_bytes = max(_resident_bytes() - before, len(source.text))
        if size_bytes > self._max_grammar_bytes:
            raise InvalidGrammarError(
                f"compiled it has {size_bytes} bytes; the limit is {self._max_grammar_bytes}; "
                "simplify it"
            )
        return {"source": source.text, "size_bytes": size_bytes, "left_out": source.left_out}

    def _matcher(self, source: str) -> llguidance.LLMatcher:
        return llguidance.LLMatcher(self._tokenizer, source, log_level=0, limits=LIMITS)

    def _begins(self, schema: Schema | bool) -> None:
        """Raise InvalidGrammarError for a schema that is refused, or that no text conforms to."""
        self._walk(self._matcher(schema_source(schema)), 1)

    def _is_followed(self, schema: Schema | bool) -> None:
        """Raise InvalidGrammarError also for a schema that takes too long to follow."""
        self._walk(self._matcher(schema_source(schema)), _NUM_WALKED_TOKENS)

    def _walk(self, matcher: llguidance.LLMatcher, num_tokens: int) -> None:
        """Follow the grammar for some tokens and back, as the engine's steps will.

        Raises InvalidGrammarError where it cannot be, or a token takes too long: steps would wait
        for it, and with them every other answer.
        """
        mask = np.zeros(-(-self._vocab_size // 32), dtype=np.int32)
        rng = random.Random(0)
        num_walked = 0
        while num_walked < num_tokens and not matcher.is_stopped():
            began_s = time.thread_time()
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            if time.thread_time() - began_s > self._token_cpu_s:
                raise InvalidGrammarError(
                    f"following it takes more than {1000 * self._token_cpu_s:g} ms for a token; "
                    "simplify it: fewer optional properties, fewer ways to match the same text"
                )
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little", count=self._vocab_size)
            bits[self._stop_token_ids] = 0
            allowed = np.flatnonzero(bits)
            if not len(allowed):
                break
            matcher.consume_token(int(allowed[rng.randrange(len(allowed))]))
            num_walked += 1
        is_lost = matcher.is_error() and not (num_walked and is_stuck(matcher.get_error()))
        if is_lost or not (matcher.is_error() or matcher.rollback(num_walked)):
            raise InvalidGrammarError(reason(matcher.get_error()))


def _resident_bytes() -> int:
    """The memory that this process has now; 0 where the system does not say."""
    import resource

    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


def _bound_memory(extra_bytes: int) -> None:
    """Let the process's address space grow by so much and no more, where the system can."""
    import resource

    try:
        with open("/proc/self/statm") as file:
            now_bytes = int(file.read().split()[0]) * resource.getpagesize()
    except OSError:  # no Linux: the bound on processor time has to do
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    bound = now_bytes + extra_bytes
    # A limit that the system has set already cannot be raised.
    bound = bound if hard == resource.RLIM_INFINITY else min(bound, hard)
    resource.setrlimit(resource.RLIMIT_AS, (bound, bound))
