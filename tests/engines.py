"""Engines for tests: the shipped pair, tiny random pairs, scripted drafters, a way to run them."""

import random
import tempfile
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from outrider.draft.budget.budget import TreeBudget
from outrider.draft.budget.calibration import EdgeCalibration
from outrider.draft.config import DraftConfig
from outrider.draft.training.tasks.families import stream
from outrider.draft.tree_drafter import TreeDrafter
from outrider.engine.cache.extent_store import ExtentStore
from outrider.engine.cache.kv_view import KVView
from outrider.engine.cache.peers import Peers
from outrider.engine.cache.recurrent_lines import RecurrentSizes
from outrider.engine.config import EngineConfig
from outrider.engine.core import Engine
from outrider.engine.events import (
    AnswerHeld,
    EngineEvent,
    Finished,
    PrefillDone,
    RequestStats,
    TierSwitched,
    TokensEmitted,
)
from outrider.engine.grammar.grammar import GrammarCompiler
from outrider.engine.model.decoder import DtypeName
from outrider.engine.model.load import load_model
from outrider.engine.model.protocol import CausalModel
from outrider.engine.model.shared_vocabulary import PickedRows
from outrider.engine.parallel.ranks import Ranks
from outrider.engine.parallel.runner import ParallelRunner
from outrider.engine.passes.device_rows import DeviceRows
from outrider.engine.passes.runner import ForwardSlice, ModelRunner, PassOutput
from outrider.engine.protocols import (
    NO_LARGE_WORK,
    Drafter,
    LargeWork,
    Proposal,
    StretchCounts,
    Trees,
)
from outrider.engine.queue.policy import QueuePolicy
from outrider.engine.request import EngineRequest, SpeculationParams
from outrider.engine.sequences.sequence import Sequence
from outrider.verifier.coupled import CoupledVerifier
from outrider.verifier.params import SamplingParams, Tier
from outrider.verifier.token_logprobs import TokenLogprobs
from outrider.verifier.token_tree import TokenTree
from outrider.verifier.verdict import Verdict
from tests import verification
from tests.models import make_hf_model

PAIR_FOLDER = Path(__file__).parents[1] / "draft" / "pair"


# ---- models ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two models and transformers' own of the same weights."""

    large: CausalModel
    small: CausalModel
    large_reference: PreTrainedModel
    small_reference: PreTrainedModel


@cache
def shipped_pair(dtype: DtypeName = "float32") -> Pair:
    large, small = str(PAIR_FOLDER / "large"), str(PAIR_FOLDER / "small")
    return Pair(
        large=load_model(large, dtype=dtype),
        small=load_model(small, dtype=dtype),
        large_reference=_reference(large, dtype),
        small_reference=_reference(small, dtype),
    )


def _reference(folder: str, dtype: DtypeName) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()


@cache
def tiny_pair(
    architecture: str = "llama3",
    *,
    vocab_size: int = 131,
    num_layers: int = 2,
    max_positions: int = 512,
    drift: float = 0.1,
) -> Pair:
    """Random weights; the small model is the large one with every weight a little off.

    `drift` is the deviation of the error relative to the weights', so it sets the acceptance:
    about one half with the default.
    """
    overrides = {
        "vocab_size": vocab_size,
        "num_hidden_layers": num_layers,
        "max_position_embeddings": max_positions,
    }
    large = make_hf_model(architecture, seed=1, **overrides)
    small = make_hf_model(architecture, seed=1, **overrides)
    with torch.no_grad():
        for parameter in small.parameters():
            parameter += drift * parameter.std() * torch.randn_like(parameter)
    return Pair(
        large=engine_model(large),
        small=engine_model(small),
        large_reference=large,
        small_reference=small,
    )


def twins() -> Pair:
    """The small model is the large one: with the same noise, every guess of it is right."""
    pair = tiny_pair()
    return replace(pair, small=pair.large, small_reference=pair.large_reference)


def engine_model(reference: PreTrainedModel, device: torch.device | str = "cpu") -> CausalModel:
    """The engine's model with the weights of a transformers one."""
    with tempfile.TemporaryDirectory() as folder:
        reference.save_pretrained(folder)
        return load_model(folder, dtype="float32", device=device)


@dataclass(frozen=True)
class FixedTimes:
    """Pass times for a budget that are what a function says."""

    seconds: Callable[[int], float]

    def __call__(self, num_rows: int, context: float = 0.0) -> float:
        return self.seconds(num_rows)

    def each(self, num_rows: int, context: float = 0.0) -> np.ndarray:
        return np.array([self.seconds(rows) for rows in range(num_rows + 1)])

    def compared(self, least_rows: int, num_rows: int, context: float = 0.0) -> np.ndarray:
        return self.each(num_rows, context)[least_rows:]


def fixed_budget(
    *,
    target: float = 1.0,
    row: float = 0.01,
    draft: float = 0.05,
    draft_row: float = 0.0,
    **options: Any,
) -> TreeBudget:
    """A budget for passes of so many seconds, the large one and small ones, and for their rows."""
    return TreeBudget(
        target_pass_s=FixedTimes(lambda rows: target + row * rows),
        draft_pass_s=FixedTimes(lambda rows: draft + draft_row * rows),
        **options,
    )


# ---- prompts --------------------------------------------------------------------------------


@cache
def shipped_tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(PAIR_FOLDER / "large")


@cache
def heldout_prompts(count: int, seed: int = 5) -> tuple[tuple[int, ...], ...]:
    """Chat prompts that the pair was not trained on, rendered and tokenised."""
    tasks = stream(seed, "heldout")
    return tuple(chat_prompt(next(tasks).prompt) for _ in range(count))


def chat_prompt(text: str) -> tuple[int, ...]:
    messages = [{"role": "user", "content": text}]
    tokenizer = shipped_tokenizer()
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return tuple(ids)


def random_prompt(length: int, *, seed: int = 0, vocab_size: int = 131) -> tuple[int, ...]:
    rng = random.Random(f"{seed}/{length}")
    return tuple(rng.randrange(3, vocab_size) for _ in range(length))


def make_request(  # noqa: PLR0913 - every field of a request, with defaults
    request_id: str,
    prompt: Iterable[int],
    *,
    tier: Tier = "large",
    max_tokens: int = 24,
    speculation: SpeculationParams | bool = True,
    group_id: str | None = None,
    cache_salt: str = "",
    return_hidden_state: bool = False,
    may_escalate: bool = False,
    **sampling: object,
) -> EngineRequest:
    if isinstance(speculation, bool):
        speculation = SpeculationParams(enabled=speculation)
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        tier=tier,
        sampling=SamplingParams(max_tokens=max_tokens, **sampling),
        speculation=speculation,
        group_id=group_id,
        cache_salt=cache_salt,
        return_hidden_state=return_hidden_state,
        may_escalate=may_escalate,
    )


# ---- engines --------------------------------------------------------------------------------


def make_engine(  # noqa: PLR0913 - one place that knows how the parts fit together
    pair: Pair,
    *,
    draft: DraftConfig | None = None,
    drafter: Drafter | None = None,
    speculates: bool = True,
    on_device: bool = False,
    budget: TreeBudget | None = None,
    large_blocks: int = 256,
    small_blocks: int = 256,
    block_size: int = 16,
    prefix_caching: bool = True,
    window_blocks: int | None = None,
    kv_dtype: torch.dtype | None = None,
    recurrent: RecurrentSizes | None = None,
    config: EngineConfig | None = None,
    verifier: CoupledVerifier | None = None,
    grammars: Mapping[Tier, GrammarCompiler] | None = None,
    calibration: EdgeCalibration | None = None,
    ranks: Ranks | None = None,
    policy: QueuePolicy | None = None,
    drafter_clock: Callable[[], float] | None = None,
    store: ExtentStore | None = None,
    peers: Peers | None = None,
) -> Engine:
    """Both tiers; drafts with the small model unless another drafter is given.

    `on_device`: trees grow without the host where they can. `window_blocks`: of each model's
    layers with a window. `recurrent`: of recurrent layers. `ranks`: of a large model in parts.
    `store`: of blocks that leave the caches. `peers`: lines to other engines. `drafter_clock`: by
    which the drafter learns how long steps take.
    """
    given = {name: value for name, value in locals().items() if name != "pair"}
    make_runner = ModelRunner if ranks is None else partial(ParallelRunner, ranks=ranks)
    large = make_runner(
        model=pair.large,
        num_blocks=large_blocks,
        block_size=block_size,
        prefix_caching=prefix_caching,
        num_window_blocks=window_blocks,
        kv_dtype=kv_dtype,
        recurrent_sizes=recurrent or RecurrentSizes(),
    )
    small = ModelRunner(
        model=pair.small,
        num_blocks=small_blocks,
        block_size=block_size,
        prefix_caching=prefix_caching,
        num_window_blocks=window_blocks,
        kv_dtype=kv_dtype,
        recurrent_sizes=recurrent or RecurrentSizes(),
    )
    if drafter is None and speculates:
        drafter = TreeDrafter(
            runner=small,
            config=draft,
            budget=budget,
            calibration=calibration,
            device_target=large if on_device else None,
            **({} if drafter_clock is None else {"clock": drafter_clock}),
        )
    engine = Engine(
        runners={"large": large, "small": small},
        verifier=verifier,
        drafter=drafter,
        config=config,
        policy=policy,
        grammars=grammars,
        store=store,
        peers=peers,
    )
    if ranks is None:  # they belong to one runner
        own = {"drafter": None, "policy": None, "calibration": None, "store": None, "peers": None}
        verification.remember(
            engine, lambda **changes: make_engine(pair, **(given | own | changes))
        )
    return engine


@dataclass(kw_only=True)
class Answer:
    """The sum of one request's events; retracted tokens are gone."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    emitted: list[TokensEmitted] = field(default_factory=list)
    prefills: list[PrefillDone] = field(default_factory=list)
    switches: list[TierSwitched] = field(default_factory=list)
    held: AnswerHeld | None = None
    finished: Finished | None = None

    @property
    def finish_reason(self) -> str:
        assert self.finished is not None, "the request has not ended"
        return self.finished.finish_reason

    @property
    def stats(self) -> RequestStats:
        assert self.finished is not None, "the request has not ended"
        return self.finished.stats


def serve(
    engine: Engine,
    requests: SequenceOf[EngineRequest],
    *,
    arrivals: Mapping[str, int] | None = None,
    on_step: Callable[[int, dict[str, Answer]], None] | None = None,
    streams: bool = False,
    max_steps: int = 20_000,
) -> dict[str, Answer]:
    """Run requests to their end; `arrivals` gives the step before which one is submitted (0).

    `streams`: take what small passes emit at once, not at the step's end.
    """
    answers: dict[str, Answer] = {}
    pending = sorted(requests, key=lambda request: (arrivals or {}).get(request.request_id, 0))
    number = 0
    while pending or engine.has_work:
        while pending and (arrivals or {}).get(pending[0].request_id, 0) <= number:
            answer = answers[pending[0].request_id] = Answer()
            if pending[0].resumed_token_ids:  # its prefill was reported by the engine before
                answer.prefills.append(None)  # type: ignore[arg-type]
            engine.submit(pending.pop(0))
        if on_step is not None:
            on_step(number, answers)
        step_once(engine, answers, streams=streams)
        number += 1
        assert number < max_steps, "the requests do not end"
    if verification.IS_ON:
        verification.verify(engine, requests, answers)
    return answers


def step_once(engine: Engine, answers: dict[str, Answer], *, streams: bool = False) -> None:
    """One step; its events go to the answers and are checked for their order."""
    early: list[EngineEvent] = []
    late = engine.step(early.extend if streams else None)
    for event in [*early, *late]:
        answer = answers.setdefault(event.request_id, Answer())
        assert answer.finished is None, f"{event} after the request's end"
        if isinstance(event, TokensEmitted):
            assert len(answer.prefills) == 1 + len(answer.switches), "tokens before the prefill"
            assert event.token_ids
            assert event.num_accepted_tokens <= event.num_drafted_tokens
            answer.token_ids.extend(event.token_ids)
            answer.logprobs.extend(event.logprobs)
            answer.emitted.append(event)
        elif isinstance(event, PrefillDone):
            answer.prefills.append(event)
        elif isinstance(event, TierSwitched):
            # A request that never got its prefill on the old tier reports one tier less.
            missing = 1 + len(answer.switches) - len(answer.prefills)
            answer.prefills.extend([None] * missing)  # type: ignore[list-item]
            if not event.keeps_answer:
                answer.token_ids.clear()
                answer.logprobs.clear()
            answer.switches.append(event)
            answer.held = None
        elif isinstance(event, AnswerHeld):
            assert answer.held is None, "an answer ended twice"
            answer.held = event
        elif isinstance(event, Finished):
            answer.finished = event


def finish(engine: Engine, answers: dict[str, Answer]) -> None:
    """Step until there is no work."""
    while engine.has_work:
        step_once(engine, answers)


def drafter_of(engine: Engine) -> TreeDrafter:
    """The engine's drafter, which grows trees."""
    assert isinstance(engine._drafter, TreeDrafter)
    return engine._drafter


def watch_small_rows(engine: Engine) -> list[int]:
    """A list that gets the number of rows of every small pass from now on."""
    runner = engine._runners["small"]
    forward = runner.forward
    rows: list[int] = []

    def counted(
        slices: SequenceOf[ForwardSlice],
        device_rows: DeviceRows | None = None,
        picked: PickedRows | None = None,
    ) -> PassOutput:
        num_rows = 0 if device_rows is None else device_rows.total_rows
        rows.append(num_rows + sum(len(piece.token_ids) for piece in slices))
        return forward(slices, device_rows, picked=picked)

    runner.forward = counted  # type: ignore[method-assign]
    return rows


def texts(answers: Mapping[str, Answer]) -> dict[str, list[int]]:
    return {request_id: answer.token_ids for request_id, answer in answers.items()}


def assert_idle(engine: Engine) -> None:
    """Nothing is held any more: no block, no sequence, no draft state."""
    assert not engine.has_work
    assert not engine.scheduler.waiting
    assert not engine.scheduler.held
    for tier, stats in engine.stats().tiers.items():
        assert (stats.num_running, stats.num_waiting) == (0, 0), tier
        assert stats.num_used_blocks == 0, tier
    drafter = engine._drafter
    if isinstance(drafter, TreeDrafter):
        assert not drafter._states
        if drafter._head_texts is not None:
            assert not drafter._head_texts._texts
            assert drafter._head_texts.runner.pool.num_used == 0


# ---- drafters that need no model ------------------------------------------------------------


class ScriptedDrafter:
    """Guesses without the small model. `tree_for` makes the tree of one sequence."""

    gives_logits = False
    features = None
    names = ()
    stretch = StretchCounts()

    def __init__(self, tree_for: Callable[[Sequence], TokenTree]) -> None:
        self._tree_for = tree_for

    def propose(
        self, sequences: SequenceOf[Sequence], *, large_work: LargeWork = NO_LARGE_WORK
    ) -> Proposal:
        yield from ()
        return Trees(host={sequence.request_id: self._tree_for(sequence) for sequence in sequences})

    def propose_from_text(
        self, sequence: Sequence, *, max_nodes: int, num_rows: int, num_beside: int
    ) -> TokenTree | None:
        return None

    def read_judged(self, sequence: Sequence, *, end: int, max_rows: int) -> ForwardSlice | None:
        return None

    def commit(
        self, sequences: SequenceOf[Sequence], verdicts: SequenceOf[Verdict]
    ) -> tuple[list[int], list[int]]:
        return [], []

    def adopt(self, sequence: Sequence, view: KVView) -> None:
        view.release()

    def release(self, sequence: Sequence) -> None:
        pass

    def reclaim(self, num_blocks: int) -> None:
        pass


def scripted_drafter(
    answers: Mapping[str, list[int]],
    *,
    chance_right: float,
    vocab_size: int = 131,
    num_levels: int = 4,
    branching: int = 3,
    seed: int = 0,
) -> ScriptedDrafter:
    """Random trees that hold the right next token of `answers` with a given chance a level.

    1.0 always has it, at a random place among wrong siblings; 0.0 never has it. Levels may reach
    beyond the end of an answer: cutting is the engine's business.
    """
    rng = random.Random(seed)

    def tree_for(sequence: Sequence) -> TokenTree:
        right = answers[sequence.request_id][sequence.num_output_tokens :]
        tokens, parents = [sequence.token_ids[-1]], [-1]
        spine: int | None = 0  # the node that ends the right path
        level = [0]
        for depth in range(num_levels):
            next_level: list[int] = []
            next_spine = None
            for node in level:
                allowed = [right[depth]] if node == spine and depth < len(right) else []
                children = rng.sample(range(vocab_size), branching)
                children = [token for token in children if token not in allowed]
                if allowed and rng.random() < chance_right:
                    children.insert(rng.randrange(len(children) + 1), allowed[0])
                for token in children:
                    if allowed and token == allowed[0]:
                        next_spine = len(tokens)
                    next_level.append(len(tokens))
                    tokens.append(token)
                    parents.append(node)
            spine = next_spine
            level = rng.sample(next_level, min(2, len(next_level)))
            if spine is not None and spine not in level:
                level.append(spine)
            level.sort()
        return TokenTree(token_ids=tokens, parent_index=parents)

    return ScriptedDrafter(tree_for)
