"""All that may vary while a text stays: the table of axes, cases that cover it, and their requests.

The law of a case: every request gets the tokens, log-probabilities and reason to end that plain
decoding of the same weights gives it, alone, with cold caches, on one thread. The bundled pair in
bfloat16 and rounded, with the compiled arithmetic, which keeps every row's bits.
"""

import atexit
import itertools
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Final, get_args

from gguf import GGMLQuantizationType
from safetensors.torch import load_file

from benchmarks.shared.gguf_files import write_gguf
from outrider.draft.config import DraftConfig
from outrider.draft.heads.protocol import HeadKind, HeadModel
from outrider.engine.config import EngineConfig
from outrider.engine.core import Engine
from outrider.engine.model.decoder import DecoderModel
from outrider.engine.model.gguf.folder import gguf_folder
from outrider.engine.model.quantised.formats import Rounding
from outrider.engine.model.read_config import read_model_config
from outrider.engine.request import AdapterRef, EngineRequest
from outrider.verifier.params import SOURCES, Source
from tests.adapters import adapter_ref, make_adapter
from tests.draft.heads.head_files import dflash_config, dflash_weights
from tests.engine.model.test_quantised_weights import quantise_projections
from tests.engines import (
    PAIR_FOLDER,
    Answer,
    FixedTimes,
    Pair,
    fixed_budget,
    heldout_prompts,
    make_engine,
    make_request,
    random_prompt,
    serve,
    shipped_pair,
)
from tests.grammars import schema_spec, shipped_compiler
from tests.heads import make_head_engine, read_written
from tests.kernels.layers.bits import torch_threads
from tests.laws.mixed import SAMPLINGS
from tests.laws.same_answers import exactly, few_blocks, plain_answers, resumed, total, undrafted
from tests.stores import opened_store, settle, slow_down
from tests.trained_heads import taught_head

# ---- the table ----------------------------------------------------------------------------------

AXES: Final[Mapping[str, tuple[str, ...]]] = {
    "drafter": ("model", "none", "eagle3", "mtp", "peagle", "dflash", "text", "mixed"),
    "weights": ("bfloat16", "int8", "int4", "gguf", "awq"),
    "resumed": ("never", "first", "middle", "last"),
    "batch": ("1", "8", "32"),
    "prefix": ("cold", "warm", "restored"),
    "chunk": ("whole", "24", "7"),
    "sampling": ("greedy", "sampled", "both"),
    "threads": ("1", "2"),
    "blocks": ("enough", "few"),
    "grammar": ("none", "schema"),
    "choices": ("1", "3"),
    "adapter": ("none", "lora"),
}
"""Each axis with its values. "resumed": behind how many of its tokens the answer fails over."""

Case = Mapping[str, str]


def is_possible(case: Case) -> bool:
    """Return whether a part of a case can be: one request alone is never pre-empted."""
    return not (case.get("batch") == "1" and case.get("blocks") == "few")


def pairwise(axes: Mapping[str, SequenceOf[str]], seed: int = 0) -> list[Case]:
    """Return cases in which any two values of two axes meet, few of them; the same each time."""
    rng = random.Random(seed)
    left = {
        pair
        for one, two in itertools.combinations(axes, 2)
        for pair in itertools.product(((one, v) for v in axes[one]), ((two, v) for v in axes[two]))
        if is_possible(dict(pair))
    }
    cases: list[Case] = []
    while left:
        tries = [_grown(axes, left, rng) for _ in range(30)]
        best = max(tries, key=lambda case: sum(pair in left for pair in _pairs(case)))
        left.difference_update(_pairs(best))
        cases.append(best)
    return cases


def _grown(axes: Mapping[str, SequenceOf[str]], left: set[Any], rng: random.Random) -> Case:
    """Return a case around a pair that has not met, its other values those that meet most."""
    case: dict[str, str] = dict(rng.choice(sorted(left)))
    for axis in rng.sample(sorted(axes), len(axes)):
        values = [value for value in axes[axis] if is_possible(case | {axis: value})]
        case.setdefault(
            axis,
            max(
                values,
                key=lambda value: sum(pair in left for pair in _pairs({**case, axis: value})),
            ),
        )
    return {axis: case[axis] for axis in axes}


def _pairs(case: Case) -> Iterator[tuple[tuple[str, str], tuple[str, str]]]:
    ordered = sorted(case.items(), key=lambda each: [*AXES].index(each[0]))
    return itertools.combinations(ordered, 2)


def any_case(rng: random.Random) -> Case:
    """Draw a value of each axis."""
    while not is_possible(case := {axis: rng.choice(values) for axis, values in AXES.items()}):
        pass
    return case


def any_cases(rng: random.Random, num_requests: int) -> Iterator[Case]:
    """Draw cases until they have so many requests."""
    while num_requests > 0:
        yield (case := any_case(rng))
        num_requests -= int(case["batch"])


# ---- models ---------------------------------------------------------------------------------


@cache
def _folder() -> Path:
    """A folder that goes when the tests end."""
    folder = Path(tempfile.mkdtemp(prefix="outrider-matrix-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@cache
def _stored_gguf() -> Path:
    """The large model's weights in a GGUF file of 4 bits."""
    plain, file = PAIR_FOLDER / "large", _folder() / "large.gguf"
    weights = load_file(plain / "model.safetensors")
    config = read_model_config(plain)
    write_gguf(file, weights, config, family="llama", kind=GGMLQuantizationType.Q4_0)
    return gguf_folder(file, _folder() / "read", add_tokenizer=lambda *_: None)


@cache
def _stored_awq() -> Path:
    folder = _folder() / "awq"
    shutil.copytree(PAIR_FOLDER / "large", folder)
    quantise_projections(folder, "awq")
    return folder


@cache
def pair_of(weights: str) -> Pair:
    """The bundled pair whose large model has weights of this kind."""
    plain = shipped_pair("bfloat16")
    if weights == "bfloat16":
        return plain
    folders = {"gguf": _stored_gguf, "awq": _stored_awq}
    if weights in folders:
        large = DecoderModel.load(str(folders[weights]()), dtype="bfloat16", deterministic=True)
        assert large.scheme.startswith("stored"), large.scheme
    else:
        rounding = Rounding(scheme="int8" if weights == "int8" else "int4")
        large = DecoderModel.load(str(PAIR_FOLDER / "large"), deterministic=True, rounding=rounding)
    return replace(plain, large=large)


@cache
def _head(kind: HeadKind) -> HeadModel:
    """A taught head; DFlash's is random."""
    if kind != "dflash":
        return taught_head(kind, "bfloat16").head
    large = shipped_pair("bfloat16").large
    weights = dflash_weights(width=large.config.hidden_size)
    sizes = {"vocab_size": 2048, "max_position_embeddings": 512, "num_target_layers": 8}
    return read_written(weights, dflash_config(weights, **sizes), large)


@cache
def _adapter() -> AdapterRef:
    base = shipped_pair("bfloat16").large_reference
    return adapter_ref(make_adapter(_folder() / "lora", base, seed=1))


def _head_of(case: Case) -> HeadModel | None:
    kinds: dict[str, HeadKind] = {"mixed": "eagle3"} | {kind: kind for kind in get_args(HeadKind)}
    kind = kinds.get(case["drafter"])
    return None if kind is None else _head(kind)


# ---- requests -------------------------------------------------------------------------------

# Random prompts after which two tokens are often so close that a last bit decides.
_HESITANT: Final = (17, 22, 37, 42)
_SCHEMA: Final = schema_spec(
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
)
_NUM_TEXTS: Final = 8


@cache
def _prompts() -> list[tuple[int, ...]]:
    """Tasks that the heads were taught, and longer random texts that begin alike."""
    begun = sum(heldout_prompts(8)[6:], ())
    hesitant = [(*begun, *random_prompt(9, seed=seed, vocab_size=2000)) for seed in _HESITANT]
    return [each for both in zip(heldout_prompts(4), hesitant, strict=True) for each in both]


def requests_of(case: Case) -> list[EngineRequest]:
    """The batch of a case; what a case has, every second request has, each in its own turn."""
    return [_request(case, number) for number in range(int(case["batch"]))]


def _request(case: Case, number: int) -> EngineRequest:
    num_choices, text = int(case["choices"]), number % _NUM_TEXTS
    is_sampled = {"greedy": False, "sampled": True, "both": bool(number & 1)}[case["sampling"]]
    options = SAMPLINGS[1 + text % (len(SAMPLINGS) - 1)] if is_sampled else {}
    if num_choices > 1:
        options = {**options, "choice_index": text % num_choices}
    request = make_request(
        str(number),
        _prompts()[text // num_choices],
        max_tokens=20,
        seed=text // num_choices,
        num_logprobs=2 if text % 4 == 3 else None,
        group_id=f"group {number // num_choices}" if num_choices > 1 else None,
        **options,
    )
    has_grammar = case["grammar"] != "none" and text % 4 < 2
    has_adapter = case["adapter"] != "none" and text % 3 != 1
    return replace(
        request,
        grammar=_SCHEMA if has_grammar else None,
        adapters=(_adapter(),) if has_adapter else (),
        prediction_token_ids=request.prompt_token_ids[-12:] if case["drafter"] == "mixed" else (),
    )


# ---- serving --------------------------------------------------------------------------------

Watch = Callable[[Engine], None]
"""Gets an engine before its first request."""

_DRAFTED: Final[Mapping[str, tuple[Source, ...]]] = {
    "model": ("model",),
    "text": ("suffix",),
    "mixed": SOURCES,
}
# Others are right too seldom, and are left out for it.
_GUESSING: Final = ("model", "eagle3", "peagle", "mixed")
_PLACES: Final[Mapping[str, Callable[[int], int]]] = {
    "first": lambda length: min(1, length),
    "middle": lambda length: length // 2,
    "last": lambda length: max(length - 1, 0),
}


def _engine(case: Case, of: Pair, requests: SequenceOf[EngineRequest], **options: Any) -> Engine:
    """An engine for a case; the budget's times are given, so that guesses are always made.

    To read a prompt takes a while, so several are read by both models at once.
    """
    drafter, size = case["drafter"], case["chunk"]
    config = {} if size == "whole" else {"max_tokens_per_step": int(size), "min_prefill_tokens": 1}
    fewest = few_blocks(requests).engine["large_blocks"]
    num_blocks = fewest + 12 if case["blocks"] == "few" else 1500
    shared = {
        "config": EngineConfig(**config),
        "draft": DraftConfig(sources=_DRAFTED.get(drafter, ("head",)), min_path_prob=0.005),
        "block_size": 4,
        "prefix_caching": case["prefix"] != "cold",
        "grammars": {"large": shipped_compiler(), "small": shipped_compiler()},
        **options,
    }
    head = _head_of(case)
    if head is None:
        blocks = {"large_blocks": num_blocks, "small_blocks": 1500}
        budget = fixed_budget(draft=0.04, draft_row=0.01)
        return make_engine(of, budget=budget, drafter_clock=lambda: 0.0, **blocks, **shared)
    budget = fixed_budget(head_pass_s=FixedTimes(lambda rows: 0.05))
    return make_head_engine(
        of,
        head,
        has_small=drafter == "mixed",
        num_blocks=num_blocks,
        head_blocks=1500,
        budget=budget,
        clock=lambda: 0.0,
        **shared,
    )


def serve_case(
    case: Case, requests: SequenceOf[EngineRequest], of: Pair, watch: Watch
) -> list[dict[str, Answer]]:
    """Serve a case's requests; the answers of each turn that counts."""
    asked = requests if case["drafter"] != "none" else undrafted(requests)
    _head_of(case)  # is trained on one thread
    with ExitStack() as stack:
        stack.enter_context(torch_threads(int(case["threads"])))
        if case["prefix"] != "restored":
            engine = _engine(case, of, asked)
            watch(engine)
            return [serve(engine, asked) for _ in range(1 if case["prefix"] == "cold" else 2)]
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        with opened_store(place) as store:
            writing = _engine(case, of, asked, store=store)
            serve(writing, asked)
            settle(writing, store)
        engine = _engine(case, of, asked, store=stack.enter_context(opened_store(place)))
        slow_down(engine)
        watch(engine)
        return [serve(engine, asked)]


def no_watch(engine: Engine) -> None:
    """Leave an engine as it is."""


def differences(
    case: Case,
    *,
    watch: Watch = no_watch,
    of: Callable[[str], Pair] = pair_of,
) -> list[str]:
    """Return what of a case is not as the law has it: requests, and what should have happened.

    `watch` gets the engine, and `of` gives the pair that serves, where it is to be another one.
    """
    whole = plain_answers(pair_of(case["weights"]), requests := requests_of(case))
    place = _PLACES.get(case["resumed"])
    if place is not None:
        requests = resumed(requests, whole, lambda _, length: place(length))
    turns = serve_case(case, requests, of(case["weights"]), watch)
    found = [
        f"request {request.request_id} of turn {turn}"
        for turn, answers in enumerate(turns)
        for request in requests
        if not _is_right(answers[request.request_id], whole[request.request_id], request)
    ]
    return found + _missing(case, turns[-1])


def _is_right(answer: Answer, whole: Answer, request: EngineRequest) -> bool:
    behind = len(request.resumed_token_ids or ())
    expected = replace(whole, token_ids=whole.token_ids[behind:], logprobs=whole.logprobs[behind:])
    try:
        exactly(request.request_id, answer, expected)
    except AssertionError:
        return False
    return True


def _missing(case: Case, answers: Mapping[str, Answer]) -> list[str]:
    """Return what the last turn's numbers should show and do not.

    Of an answer that lacks one token, nothing is guessed, so that a head has read nothing of it.
    Answers end before others begin where prompts are cut into few tokens, and in part read first.
    """
    is_cut = case["chunk"] == "7" or (case["chunk"] == "24" and case["prefix"] == "restored")
    is_crowded = case["batch"] == "32" and not is_cut
    is_due = {
        "num_cached_tokens": case["prefix"] != "cold" and case["resumed"] != "last",
        "num_preemptions": case["blocks"] == "few" and case["resumed"] == "never" and is_crowded,
        "num_drafted_tokens": case["resumed"] == "never" and case["drafter"] in _GUESSING,
    }
    return [f"no {name}" for name in is_due if is_due[name] and not total(answers, name)]
