"""The process that compiles clients' grammars first, where taking too long ends only itself.

It compiles a grammar once to see that it can be compiled, within bounds of processor time and
memory that the kernel enforces, in C++ code too. The engine compiles the same text again in a
thread, which cannot be stopped but by then is known to end. (xgrammar can serialise a compiled
grammar; for one of 3 MB that gave 0.9 GB of JSON in 100 s.)

Messages are JSON, one at a time: a `hello` with vocabulary and bounds, answered by "ready", then
grammars, each answered by its source or an error.
"""

import json
import os
import random
import signal
import sys
import threading
import time
from dataclasses import asdict
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np

from outrider.engine.grammar.import_xgrammar import Placeholder
from outrider.engine.request import GrammarKind

if TYPE_CHECKING:
    import xgrammar

# Smaller than the stack of the threads that compile in the engine's process (8 MiB or more), so
# that recursion that is too deep for them is too deep here first.
_STACK_BYTES: Final = 4 * 2**20
_NUM_WALKED_TOKENS: Final = 16


def main() -> None:
    """Serve the connection whose file descriptor is the first argument until it is closed."""
    # Signals to the whole group are for the gateway; the end of the connection ends us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # 0.5 s and 50 MB instead of several times as much.
    os.environ["TVM_FFI_DISABLE_TORCH_C_DLPACK"] = "1"
    for name in ("torch", "transformers"):
        sys.modules[name] = Placeholder(name)
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
        import xgrammar

        import outrider.engine.grammar.source  # noqa: F401 - not within the first grammar's bounds

        info = xgrammar.TokenizerInfo(
            [text.encode("latin-1") for text in hello["vocabulary"]],
            xgrammar.VocabType.RAW,
            vocab_size=len(hello["vocabulary"]),
            stop_token_ids=hello["stop_token_ids"],
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._vocab_size = len(hello["vocabulary"])
        self._stop_token_ids: list[int] = hello["stop_token_ids"]
        self._token_cpu_s: float = hello["token_cpu_s"]
        self._compile_cpu_s: float = hello["compile_cpu_s"]
        self._max_grammar_bytes: int = hello["max_grammar_bytes"]
        self._max_source_bytes: int = hello["max_source_bytes"]
        _bound_memory(hello["compile_memory_bytes"])

    def run(self, asked: dict[str, str]) -> dict[str, str]:
        """The grammar's source, or an error that says why there is none.

        Ends the process by SIGPROF after too much processor time.
        """
        signal.setitimer(signal.ITIMER_PROF, self._compile_cpu_s)
        try:
            return self._try(asked)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)

    def _try(self, asked: dict[str, str]) -> dict[str, str]:
        from outrider.engine.grammar.grammar import InvalidGrammarError
        from outrider.engine.grammar.source import compile_source, prepare_source, reason

        try:
            source = prepare_source(cast(GrammarKind, asked["kind"]), asked["text"])
            compiled = compile_source(self._compiler, source)
            self._walk(compiled)
            size_bytes = compiled.memory_size_bytes
        except InvalidGrammarError as error:
            return {"error": str(error)}
        except MemoryError:
            return {"error": "compiling it takes too much memory; simplify it"}
        except RuntimeError as error:  # xgrammar's own
            if "bad_alloc" in str(error):
                return {"error": "compiling it takes too much memory; simplify it"}
            return {"error": reason(error)}
        except UnicodeDecodeError:  # xgrammar cut its message within a character
            return {"error": "it cannot be compiled"}
        except Exception as error:  # noqa: BLE001 - a client's text ends no more than its request
            return {"error": reason(error), "unforeseen": type(error).__name__}
        if max(size_bytes - self._max_grammar_bytes, len(source.text) - self._max_source_bytes) > 0:
            return {
                "error": f"compiled it has {max(size_bytes, len(source.text))} bytes; the limit is "
                f"{self._max_grammar_bytes}; simplify it"
            }
        return asdict(source)

    def _walk(self, compiled: "xgrammar.CompiledGrammar") -> None:
        """Follow the grammar for some tokens, as the engine's steps will.

        Raises InvalidGrammarError where a token takes too long: steps would wait for it, and with
        them every other answer.
        """
        import xgrammar

        from outrider.engine.grammar.grammar import InvalidGrammarError

        matcher = xgrammar.GrammarMatcher(compiled)
        mask = np.full(-(-self._vocab_size // 32), -1, dtype=np.int32)
        rng = random.Random(0)
        for _ in range(_NUM_WALKED_TOKENS):
            started_s = time.thread_time()
            matcher.fill_next_token_bitmask(mask)
            if time.thread_time() - started_s > self._token_cpu_s:
                raise InvalidGrammarError(
                    f"following it takes more than {1000 * self._token_cpu_s:g} ms for a token; "
                    "simplify it: fewer optional properties, fewer ways to match the same text"
                )
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little", count=self._vocab_size)
            bits[self._stop_token_ids] = 0
            allowed = np.flatnonzero(bits)
            if not len(allowed):
                return
            matcher.accept_token(int(allowed[rng.randrange(len(allowed))]))


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
