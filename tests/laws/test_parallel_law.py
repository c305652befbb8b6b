"""A model on several ranks says what it says on one, and the end of a rank is the engine's."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from draft.heads.protocol import HeadKind
from engine.config import EngineConfig
from engine.core import Engine
from engine.errors import RankLostError
from engine.model.quantised.formats import Rounding
from engine.parallel.collectives import TorchCollectives
from engine.parallel.runner import RankRunner
from engine.passes.pass_memory import LargestPass, measure_pass_bytes
from kernels.triton_support import use_kernels
from tests.adapters import ALL_MODULES, adapter_ref, make_adapter
from tests.engines import (
    PAIR_FOLDER,
    assert_idle,
    heldout_prompts,
    make_engine,
    make_request,
    random_prompt,
    serve,
    shipped_pair,
    texts,
    tiny_pair,
)
from tests.heads import make_head_engine, random_head_of, random_pair
from tests.laws.head_cases import accepted
from tests.laws.mixed import mixed_requests, plainly, total
from tests.laws.test_scheme_law import stored_folder
from tests.models import save_hf_model
from tests.ranks import Parted, parted

COUNTS = [2, pytest.param(4, marks=pytest.mark.slow)]
_END_S = 30.0


@pytest.fixture(scope="module", params=COUNTS)
def shipped(request: pytest.FixtureRequest) -> Iterator[Parted]:
    """The shipped large model: two key-value heads, shared out to two ranks, copied for four."""
    with parted(PAIR_FOLDER / "large", request.param, dtype="float32") as found:
        yield found


def answers(engine: Engine, *, speculation: bool = True, turn: str = "") -> dict[str, list[int]]:
    requests = [
        make_request(
            f"{turn}{number}",
            prompt,
            seed=number,
            temperature=0.9 if number % 2 else 0.0,
            speculation=speculation,
        )
        for number, prompt in enumerate(heldout_prompts(4))
    ]
    found = texts(serve(engine, requests))
    assert_idle(engine)
    return {name.removeprefix(turn): tokens for name, tokens in found.items()}


def test_ranks_say_what_one_says(shipped: Parted) -> None:
    pair = shipped_pair()
    right = answers(make_engine(pair), speculation=False)
    engine = shipped.engine(pair)
    assert answers(engine, speculation=False) == right
    assert answers(engine, turn="again") == right  # prompts come from the prefix cache
    assert engine.stats().tiers["large"].prefix_cache_hits > 0
    assert answers(shipped.engine(pair, on_device=True)) == right
    assert shipped.model.num_parameters == pair.large.num_parameters
    assert shipped.model.weight_bytes < 0.6 * pair.large.weight_bytes


@pytest.mark.parametrize("on_device", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_whole_rows_are_gathered_only_where_they_are_wanted(
    shipped: Parted, on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that looks at a row, beside what does not: alone, and in one batch."""
    sent: list[tuple[int, int]] = []  # of each exchange: rows, and bytes of each
    gather = TorchCollectives.gather

    def counted(collectives: TorchCollectives, rows: Tensor) -> list[Tensor] | None:
        sent.append((len(rows), rows.nbytes // len(rows)))
        return gather(collectives, rows)

    monkeypatch.setattr(TorchCollectives, "gather", counted)
    few_bytes = 4 * 8  # four candidates: a token and its logit each
    all_bytes = 4 * -(-shipped_pair().large.config.vocab_size // shipped.model.config.num_ranks)
    wanted = {
        "greedy": ({}, {few_bytes}),
        "sampled": ({"temperature": 0.9}, {few_bytes}),
        "truncated": ({"temperature": 0.9, "top_p": 0.8}, {all_bytes}),
        "penalised": ({"frequency_penalty": 0.5}, {all_bytes}),
        "reported": ({"temperature": 0.7, "num_logprobs": 3}, {all_bytes}),
    }
    prompt = heldout_prompts(1)[0]
    requests = {
        name: make_request(name, prompt, seed=9, max_tokens=8, **options)
        for name, (options, _) in wanted.items()
    }
    right = serve(make_engine(shipped_pair()), list(requests.values()))
    engine = shipped.engine(shipped_pair(), on_device=on_device)
    for name, (_, sizes) in wanted.items():
        sent.clear()
        assert texts(serve(engine, [requests[name]])) == {name: right[name].token_ids}
        assert {size for _, size in sent} == sizes
    sent.clear()
    together = [replace(each, request_id=f"{name}+") for name, each in requests.items()]
    said = serve(engine, together)
    assert {f"{name}+": each.token_ids for name, each in right.items()} == texts(said)
    assert {size for _, size in sent} == {few_bytes, all_bytes}
    for ours, others in zip(said["reported+"].logprobs, right["reported"].logprobs, strict=True):
        assert [token for token, _ in ours.top] == [token for token, _ in others.top]
        assert ours.logprob == pytest.approx(others.logprob, abs=1e-4)


def test_all_ranks_run_the_largest_pass(shipped: Parted) -> None:
    """For the size of the cache, before there is one; afterwards they serve as ever."""

    class Memory:
        def reset_peak(self) -> None:
            """Nothing is kept."""

        def used_bytes(self) -> int:
            return 0

        def peak_bytes(self) -> int:
            return 77

    model = shipped.model
    largest = LargestPass(max_rows=40, max_sequences=1, block_size=16, kv_dtype=model.dtype)
    measure = partial(measure_pass_bytes, model, largest, memory=Memory(), make_runner=RankRunner)
    measured, rooms = shipped.ranks.room(measure, largest)
    assert measured == 77 + 3 * 16 * model.config.vocab_size * 4
    assert rooms == []  # on a CPU all share the machine's memory
    request = make_request("a", heldout_prompts(1)[0], max_tokens=6)
    right = texts(serve(make_engine(shipped_pair()), [request]))
    assert texts(serve(shipped.engine(shipped_pair()), [request])) == right


@pytest.mark.slow
@pytest.mark.parametrize(("count", "kinds"), [(2, ("eagle3", "dflash")), (4, ("mtp", "peagle"))])
def test_a_head_on_rank_0_changes_no_text(
    count: int, kinds: tuple[HeadKind, ...], tmp_path: Path
) -> None:
    """Heads read the hidden states that all ranks have, and run on the first alone."""
    pair = random_pair()
    pair.large_reference.save_pretrained(tmp_path)
    requests = mixed_requests()[::2]
    right = plainly(pair, requests)
    with parted(tmp_path, count, dtype="float32") as found:
        for kind in kinds:
            engine = make_head_engine(
                replace(pair, large=found.model),
                random_head_of(kind, found.model),
                ranks=found.ranks,
                has_small=kind == "mtp",
                on_device=kind == "peagle",
            )
            assert texts(serve(engine, requests)) == right
            assert accepted(engine) > 0
            assert_idle(engine)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "count", "modules"),
    [
        ("qwen3", 4, ALL_MODULES),  # copied key-value heads
        ("phi3", 2, ("qkv_proj", "gate_up_proj", "down_proj")),  # fused projections
    ],
)
def test_adapters_are_shared_out(
    architecture: str, count: int, modules: tuple[str, ...], tmp_path: Path
) -> None:
    """Each rank has its part of an adapter, also of one that comes back after it was put out."""
    pair = tiny_pair(architecture)
    base = pair.large_reference
    base.save_pretrained(tmp_path / "base")
    refs = [
        adapter_ref(make_adapter(tmp_path / f"a{seed}", base, seed=seed, modules=modules))
        for seed in (1, 2)
    ]
    requests = [
        replace(
            make_request(
                f"{turn}-{number}", random_prompt(9), seed=3, max_tokens=12, temperature=heat
            ),
            adapters=() if ref is None else (ref,),
        )
        for turn, heat in enumerate((0.0, 0.8))
        for number, ref in enumerate((*refs, None, refs[0]))
    ]
    right = plainly(pair, requests)
    assert len({tuple(right[f"0-{number}"]) for number in range(3)}) == 3
    with parted(tmp_path / "base", count, dtype="float32") as found:
        engine = found.engine(pair, config=EngineConfig(max_adapters=1))
        assert texts(serve(engine, requests)) == right
        assert_idle(engine)


@pytest.mark.slow
def test_a_killed_rank_ends_the_engine_with_the_reason() -> None:
    with parted(PAIR_FOLDER / "large", 2, dtype="float32") as found:
        engine = found.engine(shipped_pair())
        engine.submit(make_request("a", random_prompt(40)))
        engine.step()
        pids = found.ranks.pids
        os.kill(pids[0], signal.SIGKILL)
        with pytest.raises(RankLostError, match=r"Rank 1 of 2 .*SIGKILL"):
            _ = [engine.step() for _ in range(100)]
        with pytest.raises(RankLostError):  # also where it is idle
            engine.step()
    assert not any(is_alive(pid) for pid in pids)


# ---- every kind of model ----------------------------------------------------------------------

KINDS: list[tuple[str, int, dict[str, Any]]] = [
    # Pre-emption, and a vocabulary of 131 tokens.
    ("llama3", 2, {"large_blocks": 38, "block_size": 4, "on_device": True}),
    ("gpt-oss", 2, {"window_blocks": 120, "on_device": True}),  # stacked experts, sinks
    ("qwen2-moe", 4, {}),  # a shared expert
    ("qwen3-tied-mqa", 4, {}),  # one key-value head
    ("llama-biases", 2, {}),
    ("phi3", 2, {"window_blocks": 120}),  # fused projections
    ("cohere2", 2, {}),  # attention and MLP side by side
]


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "count", "options"), KINDS)
def test_every_kind_of_model_says_the_same(
    architecture: str, count: int, options: dict[str, Any], tmp_path: Path
) -> None:
    pair = tiny_pair(architecture)
    right = texts(serve(make_engine(pair), mixed_requests(speculation=False)[4:]))
    pair.large_reference.save_pretrained(tmp_path)
    with parted(tmp_path, count, dtype="float32") as found:
        engine = found.engine(pair, **options)
        served = serve(engine, mixed_requests()[4:])
    assert texts(served) == right
    assert ("large_blocks" in options) == (total(served, "num_preemptions") > 0)
    assert_idle(engine)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_speculation_changes_no_answer_of_rounded_parts(scheme: str, tmp_path: Path) -> None:
    rounding = Rounding(scheme=scheme, keep_in=tmp_path)  # type: ignore[arg-type]
    said = []
    for _ in range(1 + (scheme == "int4")):  # the second time with the weights that were kept
        with parted(PAIR_FOLDER / "large", 2, rounding=rounding, deterministic=True) as found:
            assert found.model.scheme == scheme
            engine = found.engine(shipped_pair("bfloat16"))
            said.append(answers(engine, speculation=False))
            assert answers(engine, turn="drafted") == said[0]
    assert said[0] == said[-1]


@pytest.mark.slow
def test_speculation_changes_no_answer_of_rounded_experts(tmp_path: Path) -> None:
    """Each rank rounds its part of every expert, and of the one that all rows share."""
    save_hf_model(
        "qwen2-moe", tmp_path, vocab_size=131, num_hidden_layers=2, hidden_size=256,
        intermediate_size=512, moe_intermediate_size=512, shared_expert_intermediate_size=512,
    )  # fmt: skip
    rounding = Rounding(scheme="int8", keep_in=None)
    with parted(tmp_path, 2, rounding=rounding, deterministic=True) as found:
        assert found.model.scheme == "int8"
        assert found.model.weight_bytes < 1.2 * found.model.num_parameters / 2
        said = [
            texts(serve(found.engine(tiny_pair()), mixed_requests(speculation=speculation)[:6]))
            for speculation in (False, True)
        ]
    assert said[0] == said[1]


@pytest.mark.slow
def test_parts_of_stored_weights_have_the_decoded_weights_bits() -> None:
    folder, said = stored_folder("large", "stored int4"), []
    for rounding in (None, "decode"):
        options: dict[str, Any] = {"dtype": "bfloat16", "deterministic": True}
        with parted(folder, 2, rounding=rounding, **options) as found:
            said.append(answers(found.engine(shipped_pair("bfloat16"))))
    assert said[0] == said[1]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of what padding holds, interpreted
def test_a_gpus_passes_are_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans on the device and Triton's kernels, interpreted, on both ranks."""
    pair = tiny_pair(num_layers=1)
    requests = [
        make_request(str(number), random_prompt(5 + number), max_tokens=4, seed=number)
        for number in range(2)
    ]
    right = texts(serve(make_engine(pair), requests))
    pair.large_reference.save_pretrained(tmp_path)
    monkeypatch.setenv("OUTRIDER_KERNELS", "triton")  # for the other rank
    with use_kernels("triton"), parted(tmp_path, 2, dtype="float32") as found:
        assert texts(serve(found.engine(pair, on_device=True), requests)) == right


# ---- the end ----------------------------------------------------------------------------------

_RANK_0 = """
from tests.engines import *
from tests.ranks import Parted, parted

with parted(PAIR_FOLDER / "large", 2, dtype="float32") as found:
    print(found.ranks.folder, *found.ranks.pids, flush=True)
    while True:
        serve(found.engine(shipped_pair()), [make_request("a", random_prompt(40))])
        print("served", flush=True)
"""


@pytest.mark.slow
def test_no_rank_outlives_rank_0() -> None:
    command = [sys.executable, "-c", _RANK_0]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as rank_0:
        assert rank_0.stdout is not None
        folder, *numbers = rank_0.stdout.readline().split()
        pids = [int(each) for each in numbers]
        assert rank_0.stdout.readline() == "served\n"
        assert all(is_alive(pid) for pid in pids)
        rank_0.kill()
    until_s = time.monotonic() + _END_S
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < until_s, "a rank goes on without rank 0"
        time.sleep(0.01)
    assert not Path(folder).exists()


def is_alive(pid: int) -> bool:
    """True for a process that runs; one that has ended may still wait to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
