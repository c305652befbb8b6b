"""Conversations that return in five ways, and how many of their answers are not the right ones."""

import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Thread
from typing import Any, Final

from benchmarks.shared.harness import progress_bar
from benchmarks.shared.prompts import load_prompts, load_tokenizer
from outrider.draft.tree_drafter import TreeDrafter
from outrider.engine.cache.extent_folder import ExtentFolder
from outrider.engine.cache.extent_store import ExtentStore
from outrider.engine.cache.peers import Peers
from outrider.engine.cache.sealing import Seal
from outrider.engine.core import Engine
from outrider.engine.events import Failed, Finished, TokensEmitted
from outrider.engine.model.load import load_model
from outrider.engine.model.protocol import CausalModel
from outrider.engine.passes.runner import ModelRunner
from outrider.engine.request import BlockSource, EngineRequest, SpeculationParams
from outrider.gateway.engines.backends.connected_gateway import ListenerBounds
from outrider.gateway.engines.backends.engine_listener import EngineListener
from outrider.gateway.engines.backends.peer_lines import PeerLines
from outrider.gateway.engines.backends.step_loop import serve_loaded
from outrider.gateway.settings.tree import bundled_pair
from outrider.kernels.cpu.product_library import product_support
from outrider.verifier.params import SamplingParams, Tier

WAYS: Final = ("cold", "warm", "disk", "restart", "peer")
_AT_ONCE: Final = 25
"""Conversations that are answered side by side; of more than 32 an engine pulls no blocks."""
_GROUP: Final = 5
"""Of those, in an engine with little memory."""
_MOST_TOKENS: Final = 1024
_NUM_BLOCKS: Final = _AT_ONCE * _MOST_TOKENS // 16
_WAIT_S: Final = 300.0
_KEY: Final = bytes(32)


@dataclass(slots=True)
class _Answer:
    """What a reader gets: tokens, and logarithms to the last bit."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    num_cached: int = 0


@dataclass(kw_only=True)
class _Tally:
    """What came of one way."""

    answers: int = 0
    different: int = 0
    moved_tokens: int = 0

    def add(self, right: dict[str, _Answer], found: dict[str, _Answer], moved_tokens: int) -> None:
        """Compare the answers to the same requests."""
        for request_id, answer in found.items():
            wanted = right[request_id]
            self.answers += 1
            self.different += (answer.token_ids, answer.logprobs) != (
                wanted.token_ids,
                wanted.logprobs,
            )
        self.moved_tokens += moved_tokens


class _Models:
    """The pair, and engines of it."""

    def __init__(self) -> None:
        self.models: dict[Tier, CausalModel] = {
            "large": load_model(str(bundled_pair() / "large"), dtype="bfloat16"),
            "small": load_model(str(bundled_pair() / "small"), dtype="bfloat16"),
        }

    def engine(
        self,
        *,
        num_blocks: int,
        drafts: bool = True,
        store: ExtentStore | None = None,
        peers: Peers | None = None,
    ) -> Engine:
        """An engine with empty caches that takes its models for slow."""
        runners = {
            tier: ModelRunner(model=model, num_blocks=num_blocks)
            for tier, model in self.models.items()
        }
        drafter = TreeDrafter(runner=runners["small"]) if drafts else None
        engine = Engine(runners=runners, drafter=drafter, store=store, peers=peers)
        for tier in runners:
            engine.scheduler.note_pass(tier, num_rows=100, elapsed_s=1000.0)
        return engine


def _serve(engine: Engine, requests: Sequence[EngineRequest]) -> dict[str, _Answer]:
    """Return the answers, by request. Raises RuntimeError for one that failed."""
    answers = {each.request_id: _Answer() for each in requests}
    for each in requests:
        engine.submit(each)
    num_open = len(requests)
    while num_open:
        for event in engine.step():
            if isinstance(event, TokensEmitted):
                answer = answers[event.request_id]
                answer.token_ids += event.token_ids
                answer.logprobs += event.logprobs
            elif isinstance(event, Finished):
                answers[event.request_id].num_cached = event.stats.num_cached_tokens
                num_open -= 1
            elif isinstance(event, Failed):
                raise RuntimeError(event.message)
    return answers


def _few_blocks(requests: Sequence[EngineRequest]) -> int:
    """Return twice the blocks that a group needs: the other groups' have to leave."""
    lengths = sorted(len(each.prompt_token_ids) + each.sampling.max_tokens for each in requests)
    return 2 * sum(length // 16 + 1 for length in lengths[-_GROUP:])


def _in_groups(
    engine: Engine, requests: Sequence[EngineRequest], store: ExtentStore
) -> dict[str, _Answer]:
    """Return the answers of few requests at a time; the next ones have their blocks."""
    answers: dict[str, _Answer] = {}
    for first in range(0, len(requests), _GROUP):
        answers |= _serve(engine, requests[first : first + _GROUP])
        _settle(engine, store)
    return answers


@contextmanager
def _store(place: Path) -> Iterator[ExtentStore]:
    folder = ExtentFolder(place, seal=Seal(_KEY), budget_bytes=2**33, ttl_s=1e6)
    with closing(ExtentStore(folder, most_queued_bytes=2**30)) as store:
        yield store


def _settle(engine: Engine, store: ExtentStore) -> None:
    """Have all written that was answered."""
    while engine.has_work:
        engine.step()
    store.flush()


@contextmanager
def _listening(engine: Engine) -> Iterator[str]:
    """Serve other engines in a thread; yield the address."""
    with closing(EngineListener("tcp://127.0.0.1:0", None, ListenerBounds())) as listener:
        listener.open(engine.info(), {})
        thread = Thread(target=serve_loaded, args=(engine, listener))
        thread.start()
        try:
            yield listener.endpoint
        finally:
            listener.drain(0.0)
            thread.join()


def _requests(
    num_conversations: int, *, num_questions: int, max_tokens: int, seed: int
) -> list[EngineRequest]:
    """Return the conversations, each of which finds only its own blocks."""
    prompts = load_prompts(
        "tasks",
        load_tokenizer(bundled_pair() / "large"),
        num_prompts=num_conversations * num_questions,
        seed=seed,
        max_tokens=(_MOST_TOKENS - max_tokens) // num_questions,
    )
    return [
        EngineRequest(
            request_id=str(number),
            prompt_token_ids=sum(
                (each.token_ids for each in prompts[number::num_conversations]), ()
            ),
            tier="large",
            sampling=SamplingParams(
                max_tokens=max_tokens, temperature=0.9, seed=seed + number, num_logprobs=3
            ),
            cache_salt=str(number),
        )
        for number in range(num_conversations)
    ]


def _ways(
    models: _Models, requests: list[EngineRequest], place: Path
) -> Iterator[tuple[str, dict[str, _Answer], int]]:
    """Yield the answers of each way, and the prompt tokens that were not computed for them."""
    with _store(place / "ample") as store:
        engine = models.engine(num_blocks=_NUM_BLOCKS, store=store)
        yield "cold", _serve(engine, requests), 0
        _settle(engine, store)
        warm = _serve(engine, requests)
        yield "warm", warm, sum(each.num_cached for each in warm.values())
        with _listening(engine) as endpoint, closing(PeerLines(None)) as lines:
            other = models.engine(num_blocks=_NUM_BLOCKS, peers=lines)
            found = _serve(other, [_from(each, endpoint) for each in requests])
            yield "peer", found, other.stats().peers.num_pulled_tokens
    with _store(place / "ample") as store:
        engine = models.engine(num_blocks=_NUM_BLOCKS, store=store)
        yield "restart", _serve(engine, requests), engine.stats().store.num_restored_tokens
    with _store(place / "small") as store:
        engine = models.engine(num_blocks=_few_blocks(requests), store=store)
        _in_groups(engine, requests, store)
        yield "disk", _in_groups(engine, requests, store), engine.stats().store.num_restored_tokens


def _from(request: EngineRequest, endpoint: str) -> EngineRequest:
    num_tokens = len(request.prompt_token_ids)
    source = BlockSource(endpoint=endpoint, num_tokens=num_tokens, wait_s=_WAIT_S)
    return replace(request, source=source)


def compare_ways(
    num_conversations: int,
    *,
    num_questions: int,
    max_tokens: int,
    seed: int,
    most_s: float = math.inf,
) -> dict[str, Any]:
    """Return by way how many answers there were, and how many were not the right ones.

    `num_questions`: that a prompt is made of. `most_s`: no more are asked after so many seconds.
    Raises SystemExit without the compiled products: with torch's a row's bits depend on others.
    """
    if product_support().library is None:
        raise SystemExit(f"nothing can be compared: {product_support().detail}")
    until_s = time.monotonic() + most_s
    models = _Models()
    modes = {"with guesses": True, "without": False}
    tallies = {f"{way}, {mode}": _Tally() for way in WAYS for mode in modes}
    requests = _requests(
        num_conversations, num_questions=num_questions, max_tokens=max_tokens, seed=seed
    )
    asked_tokens = 0
    with progress_bar("conversations", num_conversations) as advance:
        for first in range(0, num_conversations, _AT_ONCE):
            if time.monotonic() > until_s:
                break
            some = requests[first : first + _AT_ONCE]
            asked_tokens += sum(len(each.prompt_token_ids) for each in some)
            right = _serve(models.engine(num_blocks=_NUM_BLOCKS, drafts=False), some)
            for mode, guesses in modes.items():
                speculation = SpeculationParams(enabled=guesses)
                asked = [replace(each, speculation=speculation) for each in some]
                with tempfile.TemporaryDirectory() as place:
                    for way, found, num_moved in _ways(models, asked, Path(place)):
                        tallies[f"{way}, {mode}"].add(right, found, num_moved)
            for each in some:
                advance(each.request_id)
    return {
        "ways": {name: vars(tally) for name, tally in tallies.items()},
        "prompt_tokens": asked_tokens,
        "products": product_support().detail.split(" in ")[0],
        "numerics": {tier: model.numerics for tier, model in models.models.items()},
    }
