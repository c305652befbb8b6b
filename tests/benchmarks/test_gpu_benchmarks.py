"""The parts of the GPU benchmarks that need no GPU: counts, reports, orchestration, imports."""

import json
import os
import random
import runpy
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.gpu import gpu_check, gpu_first
from benchmarks.gpu.bench_kernels import check, groups
from benchmarks.gpu.gpu_attention_cases import BLOCK_SIZE, Cache, Problem, Shape, random_tree
from benchmarks.gpu.gpu_first_figures import pauses
from benchmarks.gpu.gpu_kernel_cases import TINY, Case, Cases
from benchmarks.gpu.gpu_models import (
    QWEN3_06B,
    QWEN3_8B,
    TINY_LARGE,
    TINY_SMALL,
    RandomReader,
    bytes_per_step,
    count_parameters,
    random_model,
)
from benchmarks.gpu.gpu_paired_models import (
    Bigrams,
    PairedReader,
    agreement,
    paired_model,
    turn_head,
)
from benchmarks.gpu.gpu_report import Goal, Report, gpu_parser
from benchmarks.gpu.gpu_sections import Sections
from benchmarks.gpu.gpu_timing import Ceilings, largest_difference, measure, ratio_of
from benchmarks.gpu.gpu_variants import recorded_variants
from benchmarks.shared.record import ROOT
from outrider.engine.model.config import ModelConfig
from outrider.engine.passes.runner import ForwardSlice, ModelRunner
from outrider.kernels.triton_support import use_kernels

CPU = torch.device("cpu")
CEILINGS = Ceilings(copy_bytes_per_s=1e12, read_bytes_per_s=2e12, matmul_flops_per_s=1e14)


# ---- counts -------------------------------------------------------------------------------------


def test_attention_bytes_are_those_of_its_tensors() -> None:
    shape = Shape(num_query_heads=6, num_kv_heads=2, head_dim=16)
    problem = Problem(batch=3, context=40, nodes=5)
    kv = torch.empty(3, 45, 2, 2, 16, dtype=torch.bfloat16)
    query = torch.empty(15, 6, 16, dtype=torch.bfloat16)
    assert problem.num_bytes(shape) == kv.nbytes + 2 * query.nbytes
    # both products: each row with each key it may see
    assert problem.num_flops(shape) == 2 * (2 * 15 * 45 * 6 * 16)


def test_a_quantised_cache_counts_its_scales() -> None:
    shape = Shape(num_query_heads=4, num_kv_heads=2, head_dim=16, kv_dtype=torch.float8_e4m3fn)
    assert shape.slot_bytes == 2 * 2 * (16 + 4)


@given(st.integers(1, 256), st.integers(0, 1000))
@settings(max_examples=20)
def test_random_trees_are_trees(num_nodes: int, seed: int) -> None:
    masks = random_tree(num_nodes, random.Random(seed))
    assert len(masks) == num_nodes
    for node, mask in enumerate(masks):
        assert mask >> node == 1  # its own bit, and none of a later node
        above = mask ^ (1 << node)
        assert node == 0 or masks[above.bit_length() - 1] == above  # its parent's ancestors
        assert mask & 1


def test_random_trees_have_several_levels() -> None:
    depths = {mask.bit_count() - 1 for mask in random_tree(64, random.Random(0))}
    assert depths == set(range(max(depths) + 1))
    assert 8 <= max(depths) <= 40


def test_attention_inputs_lie_on_blocks_of_their_own() -> None:
    shape = Shape(num_query_heads=4, num_kv_heads=2, head_dim=16)
    num_bytes = 64 * BLOCK_SIZE * shape.slot_bytes
    cache = Cache(shape, num_bytes=num_bytes, device=CPU, seed=0)
    problem = Problem(batch=2, context=30, nodes=4)
    sets = cache.inputs(problem)
    assert len(sets) == 1
    blocks = [block for one in sets for table in one.batch.block_tables for block in table]
    assert len(blocks) == len(set(blocks)) == 2 * 3
    mask = cache.mask(sets[0])
    assert mask is not None
    assert mask.shape == (2, 4, 34)
    assert mask[:, :, :30].all()
    assert torch.equal(mask[:, 0, 30:], torch.tensor([[True, False, False, False]] * 2))
    with pytest.raises(ValueError, match="64 blocks"):
        cache.inputs(Problem(batch=2, context=1000, nodes=1))


def tensor_bytes(*values: object) -> int:
    return sum(value.nbytes for value in values if isinstance(value, Tensor))


def test_small_kernels_bytes_are_those_of_their_tensors() -> None:
    cases = Cases(shape=TINY, device=CPU, rows=(3,), trees=(1,))
    made = {name: make()[0] for name, make in groups(cases).items()}

    def of(name: str) -> partial[object]:
        call = made[name].make()
        assert isinstance(call, partial)
        return call

    update, residual, weight, _ = of("rms_norm").args
    read = tensor_bytes(update, residual, weight)
    assert made["rms_norm"].num_bytes == read + tensor_bytes(residual, update)
    (gate_up,) = of("gated_mul").args
    assert made["gated_mul"].num_bytes == 1.5 * gate_up.nbytes
    _, ids = of("embedding").args
    width = TINY.hidden_size * TINY.dtype.itemsize
    assert made["embedding"].num_bytes == ids.nbytes + 2 * 3 * width
    cache, sources, _ = of("compact_kv").args
    moved = cache.nbytes // (cache.shape[2] * cache.shape[3]) * len(sources)
    assert made["compact_kv"].num_bytes == 2 * moved
    (logits, _, _) = of("sample").args
    assert made["sample"].num_bytes == logits.nbytes
    x, weight = of("row_invariant_linear").args
    result = 3 * weight.shape[0] * TINY.dtype.itemsize
    assert made["row_invariant_linear"].num_bytes == tensor_bytes(x, weight) + result
    assert made["row_invariant_linear"].num_flops == 2 * 3 * weight.numel()
    heads, positions, slots, rotary, *_ = of("rope_write_kv").args
    table_row = rotary.table.nbytes // rotary.table.shape[0]
    both = 2 * heads.nbytes + tensor_bytes(positions, slots)
    assert made["rope_write_kv"].num_bytes == both + 3 * table_row


@pytest.mark.parametrize("config", [TINY_LARGE, TINY_SMALL], ids=["untied", "tied"])
def test_random_models_have_the_counted_parameters(config: ModelConfig) -> None:
    model = random_model(config, dtype=torch.float32, device=CPU)
    assert model.num_parameters == count_parameters(config)


def test_the_shapes_are_the_real_ones() -> None:
    assert count_parameters(QWEN3_8B) == 8_190_735_360
    assert count_parameters(QWEN3_06B) == 596_049_920
    table = QWEN3_8B.vocab_size * QWEN3_8B.hidden_size
    assert bytes_per_step(QWEN3_8B, torch.bfloat16) == 2 * (8_190_735_360 - table)
    assert bytes_per_step(QWEN3_06B, torch.bfloat16) == 2 * 596_049_920


def test_random_tensors_are_scaled_and_not_zero() -> None:
    reader = RandomReader(TINY_LARGE, dtype=torch.float32, device=CPU)
    assert "lm_head.weight" in reader
    norm = reader.read("model.norm.weight", (64,))
    matrix = reader.read("model.layers.0.mlp.up_proj.weight", (500, 64))
    head = reader.read("lm_head.weight", (500, 64))
    assert (norm == 1).all()
    assert float(matrix.std()) == pytest.approx(1 / 8, rel=0.1)
    assert float(head.std()) == pytest.approx(6 / 8, rel=0.1)
    assert reader.num_parameters == 64 + 2 * 500 * 64
    tied = RandomReader(TINY_SMALL, dtype=torch.float32, device=CPU)
    assert "lm_head.weight" not in tied


# ---- timing -------------------------------------------------------------------------------------


def test_cases_are_measured_in_turn() -> None:
    seen: list[str] = []
    calls = {name: [partial(seen.append, name)] * 2 for name in "ab"}
    samples = measure(calls, device=CPU)
    assert seen == ["a", "a", "b", "b"]  # a round; without a GPU there is but one
    assert {name: len(seconds) for name, seconds in samples.items()} == {"a": 1, "b": 1}
    assert ratio_of({"a": [2.0, 6.0], "b": [1.0, 2.0]}, "a", "b") == 2.5


def test_floors() -> None:
    assert CEILINGS.floor_s(1e12) == 1.0
    assert CEILINGS.floor_s(1e12, 2e14) == 2.0
    assert CEILINGS.is_memory_bound(1e12, 1e14)
    assert not CEILINGS.is_memory_bound(1e12, 2e14)


def test_a_nan_is_a_difference() -> None:
    expected = torch.tensor([1.0, -4.0])
    assert largest_difference(torch.tensor([1.0, -3.0]), expected) == 0.25
    assert not largest_difference(torch.tensor([float("nan"), -4.0]), expected) <= 1.0


def test_a_kernel_that_leaves_nan_is_found() -> None:
    def make(value: float) -> partial[object]:
        return partial(torch.full, (3,), value)

    check(Case(name="fine", make=partial(make, 1.0), num_bytes=1), CPU)
    with pytest.raises(AssertionError, match="bad: a NaN"):
        check(Case(name="bad", make=partial(make, float("nan")), num_bytes=1), CPU)


# ---- the report ---------------------------------------------------------------------------------


def a_report(folder: Path, **changes: object) -> Report:
    arguments = gpu_parser(None, budget_s=60.0).parse_args(["--results", str(folder), "--dry"])
    for name, value in changes.items():
        setattr(arguments, name, value)
    return Report(script="bench_it", arguments=arguments, device=CPU)


def failing() -> None:
    raise RuntimeError("no such kernel")


def test_a_failing_part_hides_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = a_report(tmp_path)
    assert report.section("first", lambda: {"seconds": 1.0}) == {"seconds": 1.0}
    assert report.section("second", failing) is None
    written = json.loads((tmp_path / "bench_it-dry.json").read_text())
    assert written["results"] == {"first": {"seconds": 1.0}}  # there before the end
    assert report.section("third", lambda: 3) == 3
    assert report.section("fourth", lambda: 4, needed_s=1e6) is None
    assert report.finish() == 1
    written = json.loads((tmp_path / "bench_it-dry.json").read_text())
    assert written["results"] == {"first": {"seconds": 1.0}, "third": 3}
    assert "no such kernel" in written["errors"]["second"]
    assert written["skipped"] == ["fourth"]
    assert {"commit", "device", "versions", "date"} <= written["environment"].keys()
    assert written["arguments"]["seed"] == 0
    printed = capsys.readouterr().out
    assert "skipped: fourth" in printed
    assert "failed: second" in printed


def test_a_run_without_failures_ends_well_even_where_goals_are_missed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = a_report(tmp_path, dry=False)
    report.goal("share", 0.7, at_least=0.8)
    report.goal("ratio", 1.2, at_most=1.3)
    assert report.finish() == 0
    written = json.loads((tmp_path / "bench_it-cpu.json").read_text())
    assert [goal["is_met"] for goal in written["goals"]] == [False, True]
    printed = capsys.readouterr().out
    assert "MISSED share: 0.7, at least 0.8" in printed
    assert "met    ratio: 1.2, at most 1.3" in printed


def test_time_runs_out(tmp_path: Path) -> None:
    report = a_report(tmp_path, budget_s=0.0)
    assert report.section("anything", lambda: 1) is None
    assert report.skipped == ["anything"]


def test_goals_meet_their_bounds() -> None:
    assert Goal(name="a", value=0.8, goal=0.8, is_upper=False).is_met
    assert Goal(name="a", value=0.8, goal=0.8, is_upper=True).is_met
    assert not Goal(name="a", value=float("nan"), goal=0.8, is_upper=True).is_met


# ---- the check ----------------------------------------------------------------------------------


def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "has_gpu", lambda: False)
    assert gpu_check.main([]) == 2
    assert capsys.readouterr().out.count("\n") == 1


def test_what_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "has_gpu", lambda: True)
    monkeypatch.setattr(gpu_check, "NEEDED", ("json", "no_such_package"))
    assert gpu_check.main([]) == 2
    assert "has no no_such_package, which" in capsys.readouterr().out


def test_a_missing_library_of_products_is_built_or_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    builds: list[list[str]] = []

    def run_part(
        name: str, command: list[str], *, limit_s: float, quiet: bool
    ) -> gpu_check.Outcome:
        builds.append(command)
        if len(builds) == 2:  # the first build finds no compiler
            (tmp_path / "_products.abi3.so").touch()
        return gpu_check.Outcome(name=name, seconds=1.0, problem=None)

    monkeypatch.setattr(gpu_check, "run_part", run_part)
    (without,) = gpu_check.build_products(time.monotonic() + 60.0, tmp_path)
    assert without.problem is not None
    assert "kernels/cpu/_products is missing" in capsys.readouterr().out
    (built,) = gpu_check.build_products(time.monotonic() + 60.0, tmp_path)
    assert built.problem is None
    assert builds[1][-2:] == ["build_ext", "--inplace"]
    assert gpu_check.build_products(time.monotonic() + 60.0, tmp_path) == []


def test_all_parts_are_run_and_one_failure_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commands: dict[str, list[str]] = {}

    def run_part(
        name: str, command: list[str], *, limit_s: float, quiet: bool
    ) -> gpu_check.Outcome:
        assert limit_s > 0
        commands[name] = command
        problem = (
            "exit status 1"
            if name in ("bench_kernels", "tests/kernels/layers/test_rope.py")
            else None
        )
        return gpu_check.Outcome(name=name, seconds=1.0, problem=problem, output="1 passed")

    monkeypatch.setattr(gpu_check, "run_part", run_part)
    monkeypatch.setattr(gpu_check, "has_gpu", lambda: True)
    assert gpu_check.main(["--results", str(tmp_path)]) == 1
    names = set(commands)
    assert {"gpu_first", "gpu_first, figures", "bench_kernels", "bench_paged_attention"} <= names
    assert "tests/kernels/layers/test_rope.py" in names
    assert "tests/kernels/test_ahead_of_time.py" not in names
    assert commands["gpu_first"][-2:] == ["--until", "265"]
    assert commands["gpu_first, figures"][-3:] == ["--until", "110", "--figures"]
    budget = [float(commands[one.module][4]) for one in gpu_check.BENCHMARKS]
    assert all(commands[one.module][3] == "--budget-s" for one in gpu_check.BENCHMARKS)
    assert 0 < budget[0] < gpu_check.SECOND_S
    (report,) = tmp_path.glob("gpu_check-*.json")
    parts = {part["name"]: part for part in json.loads(report.read_text())["parts"]}
    assert parts.keys() == names
    assert parts["bench_kernels"]["problem"] == "exit status 1"
    printed = capsys.readouterr().out.splitlines()
    assert printed[-3:] == [
        "tests/kernels/layers/test_rope.py: exit status 1",
        "bench_kernels: exit status 1",
        "some parts failed",
    ]


@pytest.mark.slow
def test_each_cases_seconds_are_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tests" / "laws" / "test_it.py"
    file.parent.mkdir(parents=True)
    file.write_text(
        "import pytest\n"
        "@pytest.mark.gpu\n@pytest.mark.parametrize('n', [1, 2])\ndef test_one(n): pass\n"
        "@pytest.mark.gpu\ndef test_absent(): pytest.skip()\n"
        "def test_other(): pass\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu: one\n    long: one\n")
    monkeypatch.setattr(gpu_check, "ROOT", tmp_path)
    (outcome,) = gpu_check.run_tests(time.monotonic() + 60.0, is_dry=True)
    assert outcome.problem is None, outcome.output
    assert outcome.cases.keys() == {"test_one[1]", "test_one[2]"}
    gpu_check.write_report([outcome], tmp_path, is_dry=True)
    assert "tests/laws/test_it.py::test_one[1]" in capsys.readouterr().out


def test_a_part_that_hangs_is_ended() -> None:
    command = [sys.executable, "-u", "-c", "print('begun'); import time; time.sleep(60)"]
    outcome = gpu_check.run_part("slow", command, limit_s=1.0, quiet=True)
    assert outcome.problem == "ended after 1 s"
    assert outcome.seconds < 20
    assert "begun" in outcome.output


def test_without_time_nothing_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "run_part", lambda *_, **__: pytest.fail("begun"))
    outcomes = gpu_check.run_benchmarks(0.0, is_dry=False, results=None)
    assert {outcome.problem for outcome in outcomes} == {"skipped, no time left"}
    outcomes = gpu_check.run_tests(0.0)
    assert {outcome.problem for outcome in outcomes} == {"skipped, no time left"}


@pytest.mark.parametrize(
    ("part", "names"),
    [("first", ["gpu_first"]), ("second", ["gpu_first, figures", "tests", "benchmarks"])],
)
def test_a_part_can_be_run_alone(
    part: str, names: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def well(name: str, *_: object, **__: object) -> gpu_check.Outcome:
        return gpu_check.Outcome(name=name, seconds=1.0, problem=None)

    monkeypatch.setattr(gpu_check, "has_gpu", lambda: True)
    monkeypatch.setattr(gpu_check, "run_part", well)
    monkeypatch.setattr(gpu_check, "run_tests", lambda *_, **__: [well("tests")])
    monkeypatch.setattr(gpu_check, "run_benchmarks", lambda *_, **__: [well("benchmarks")])
    assert gpu_check.main(["--part", part, "--results", str(tmp_path)]) == 0
    (report,) = tmp_path.glob("gpu_check-*.json")
    assert [one["name"] for one in json.loads(report.read_text())["parts"]] == names


def test_budgets_fit_the_parts() -> None:
    assert gpu_check._FIGURES_S + gpu_check._TESTS_S + 2 * gpu_check._LEAST_S < gpu_check.SECOND_S
    assert gpu_check._ENDING_S > gpu_check._GRACE_S
    assert sum(one.share for one in gpu_check.BENCHMARKS) == pytest.approx(1.0)


# ---- the first minutes --------------------------------------------------------------------------


def lines_of(folder: Path) -> dict[str, dict[str, object]]:
    text = (folder / "gpu_first.jsonl").read_text()
    return {line["section"]: line for line in map(json.loads, text.splitlines())}


@pytest.mark.slow
def test_the_first_run_goes_through_everything_dry(tmp_path: Path) -> None:
    assert gpu_first.main(["--dry", "--out", str(tmp_path)]) == 0
    lines = lines_of(tmp_path)
    assert {"machine", "trees", "recorded passes tiny", "passes", "answers plain"} <= lines.keys()
    assert lines["answers plain"]["tokens_per_step"] == 1.0
    assert lines["answers drafted"]["tokens_per_step"] > 1.0  # type: ignore[operator]
    assert lines["end"]["failed"] == []
    assert (
        gpu_first.main(["--dry", "--figures", "--only", "load,host", "--out", str(tmp_path)]) == 0
    )
    assert lines_of(tmp_path)["host plain"]["step_ms"] > 0  # type: ignore[operator]
    assert (tmp_path / "host-plain.txt").stat().st_size > 0


@pytest.mark.slow
def test_the_checks_run_the_kernels(tmp_path: Path) -> None:
    kernels = "attention,few rows,tokens at 0.8"
    with use_kernels("triton"):
        assert gpu_first.main(["--dry", "--only", kernels, "--out", str(tmp_path)]) == 0
    lines = lines_of(tmp_path)
    assert lines["attention tiny"]["same_bits_twice"]


def test_a_wrong_kernel_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(self: Cache, inputs: Any) -> Tensor:
        return attend(self, inputs) * 1.1

    attend = Cache.attend
    monkeypatch.setattr(Cache, "attend", wrong)
    assert gpu_first.main(["--dry", "--only", "attention", "--out", str(tmp_path)]) == 1
    line = lines_of(tmp_path)["attention tiny"]
    assert not line["ok"]
    assert "off by more than 0.01" in str(line["error"])


def test_an_illegal_address_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr("benchmarks.gpu.gpu_first_checks.top_tokens", lost)
    names = "tokens,trees,load"
    assert gpu_first.main(["--dry", "--only", names, "--out", str(tmp_path)]) == 3
    lines = lines_of(tmp_path)
    assert list(lines) == ["tokens at 0.0, 1 a row", "end"]
    assert lines["end"]["failed"] == ["tokens at 0.0, 1 a row"]


def test_a_part_without_time_is_a_line(tmp_path: Path) -> None:
    sections = Sections(tmp_path / "gpu_first.jsonl", until_s=5.0, only=("slow", "quick"))
    assert not sections.run("slow", failing, needs_s=10.0)
    assert sections.run("quick", lambda: {"value": 1})
    assert not sections.run("unwanted", failing)
    lines = lines_of(tmp_path)
    assert "10 wanted" in str(lines["slow"]["skipped"])
    assert lines["quick"]["value"] == 1
    assert lines.keys() == {"slow", "quick"}


def test_paired_models_agree_as_the_cosine_says() -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(TINY_LARGE.vocab_size, (100,), generator=generator)

    def best(config: ModelConfig, cosine: float) -> Tensor:
        bigrams = Bigrams(cosine=cosine, rank=32)
        model = paired_model(config, bigrams, dtype=torch.float32, device=CPU)
        runner = ModelRunner(model=model, num_blocks=20)
        view = runner.new_view("it")
        runner.copy_blocks(view.reserve(100))
        piece = ForwardSlice(view=view, token_ids=tokens.tolist(), start_slot=0, num_logit_rows=100)
        return runner.forward([piece]).logits.argmax(-1)

    target = best(TINY_LARGE, 1.0)
    shares = [float((best(TINY_SMALL, one) == target).float().mean()) for one in (0.5, 0.9, 1.0)]
    assert shares == sorted(shares)
    assert shares[2] == 1.0
    assert 0.0 < shares[0] < shares[1] < 1.0


def test_a_turned_head_is_the_one_that_would_be_read() -> None:
    bigrams = Bigrams(cosine=0.9, rank=8)
    head = torch.zeros(TINY_LARGE.vocab_size, TINY_LARGE.hidden_size)
    turn_head(head, TINY_LARGE, bigrams)
    reader = PairedReader(TINY_LARGE, bigrams, dtype=torch.float32, device=CPU)
    assert torch.equal(head, reader.read("lm_head.weight", head.shape))
    assert (head[:, 8:] == 0).all()


def test_agreement_grows_with_the_cosine() -> None:
    found = [
        agreement(500, Bigrams(cosine=one, rank=64), count=200, device=CPU)
        for one in (0.9, 0.97, 1.0)
    ]
    assert [one.first for one in found] == sorted(one.first for one in found)
    assert found[0].first < found[0].among_three
    assert found[-1].first == 1.0


def test_every_variant_is_recorded_once_without_a_gpu() -> None:
    with use_kernels("triton"):
        variants = recorded_variants(TINY_LARGE, TINY_SMALL)
    kernels = {launch.kernel.fn.__name__ for launch in variants.values()}
    assert {"_attend_kernel", "_split_k_kernel", "_expand_tree_kernel"} <= kernels
    assert {"_verify_tree_kernel", "_move_slots_kernel", "_chunk_top_kernel"} <= kernels
    assert len(variants) > 50


# What the project or its tests import, and a machine with torch and transformers need not have.
ABSENT = (
    *("fastapi", "starlette", "uvicorn", "uvloop", "pydantic", "pydantic_settings", "zmq", "rich"),
    *("msgspec", "typer", "sklearn", "scipy", "llguidance", "prometheus_client", "httpx", "psutil"),
    *("matplotlib", "threadpoolctl", "sqlalchemy", "alembic", "aiohttp", "tenacity", "jinja2"),
    *("redis", "psycopg", "openai", "anthropic", "gguf", "compressed_tensors", "playwright", "ray"),
    *("schemathesis", "jsonschema_rs", "opentelemetry", "botocore"),
)
# What follows grammars by llguidance; a model that answers without one runs through none of it.
GRAMMAR_MODULES = frozenset(
    f"outrider.engine.grammar.{name}"
    for name in ("grammar_parts", "grammar_worker", "llguidance_backend", "source", "vocabulary")
)
PROGRAM = f"""
import importlib, sys
sys.modules.update(dict.fromkeys({ABSENT!r}))
for name in sys.argv[1].split():
    importlib.import_module(name)
import pytest
sys.exit(pytest.main(sys.argv[2:]))
"""


def test_files_with_marked_tests_are_found_by_their_marks_alone() -> None:
    found = {file.name for file in gpu_check.gpu_marked_tests()}
    assert {"test_gpu_laws.py", "test_recorded_schemes.py", "test_device_growth.py"} <= found
    assert "test_gpu_benchmarks.py" not in found  # has marks in strings only


@pytest.mark.slow
def test_a_gpu_machine_needs_no_packages_of_the_gateway() -> None:
    """Benchmarks, tests with their conftests, and all that models run through are imported.

    The laws for a GPU are run on the CPU, with a stand-in for recording, so that none of them dies
    on its first line on a machine.
    """
    if torch.cuda.is_available():
        pytest.skip("all of this runs there")
    patterns = ("gpu_*.py", "bench_kernels.py", "bench_paged_attention.py", "bench_gpu_*.py")
    files = [file for one in patterns for file in (ROOT / "benchmarks" / "gpu").glob(one)]
    assert len(files) > 8
    tests = [*gpu_check.kernel_tests(), *gpu_check.gpu_marked_tests()]
    folders = {folder for file in tests for folder in file.parents}
    files += [folder / "conftest.py" for folder in folders if (folder / "conftest.py").exists()]
    files += tests
    for package in ("kernels", "engine", "draft", "verifier"):
        own = (ROOT / ".ci" / "src" / "outrider" / package).rglob("*.py")
        files += [file for file in own if file.name != "__init__.py"]
    paths = [file.relative_to(ROOT).with_suffix("") for file in files]
    named = {".".join(path.parts).removeprefix(".ci.src.") for path in paths}
    assert named > GRAMMAR_MODULES
    modules = sorted(named - GRAMMAR_MODULES)
    assert {"tests.conftest", "tests.kernels.conftest", "tests.laws.test_gpu_laws"} <= {*modules}
    laws = ("tests/laws/test_gpu_laws.py", "-q", "-m", "gpu", "-p", "no:cacheprovider")
    answer = subprocess.run(
        [sys.executable, "-c", PROGRAM, " ".join(modules), *laws, "-p", "pytest_timeout"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert answer.returncode == 0, answer.stdout[-4000:] + answer.stderr[-2000:]
    assert "6 passed" in answer.stdout


@pytest.mark.parametrize("module", [one.module for one in gpu_check.BENCHMARKS])
def test_without_a_gpu_a_benchmark_refuses(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.setattr(sys, "argv", [module])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "benchmarks" / "gpu" / f"{module}.py"), run_name="__main__")
    assert ended.value.code == 2
    assert capsys.readouterr().out == "There is no GPU here: only --dry can be run.\n"


@pytest.mark.long
@pytest.mark.parametrize("more", [(), ("--figures",)])
def test_the_first_run_is_dry_in_the_interpreter(more: tuple[str, ...], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu.gpu_first", "--dry", "--out", str(tmp_path)]
    answer = subprocess.run(
        [*command, *more], cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    assert answer.returncode == 0, answer.stdout[-2000:] + answer.stderr[-2000:]


@pytest.mark.long
@pytest.mark.parametrize("module", [one.module for one in gpu_check.BENCHMARKS])
def test_a_dry_run_goes_through_everything(module: str, tmp_path: Path) -> None:
    answer = subprocess.run(
        [sys.executable, "-m", f"benchmarks.gpu.{module}", "--dry", "--results", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert answer.returncode == 0, answer.stdout[-2000:] + answer.stderr[-2000:]
    (file,) = tmp_path.glob("*.json")
    written = json.loads(file.read_text())
    assert written["errors"] == {}
    assert written["skipped"] == []
    assert written["results"]["ceilings"]["copy_bytes_per_s"] > 0


def test_a_dry_run_takes_what_a_slow_machine_needs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    limits: set[float] = set()

    def run_part(
        name: str, command: list[str], *, limit_s: float, quiet: bool
    ) -> gpu_check.Outcome:
        limits.add(limit_s)
        return gpu_check.Outcome(name=name, seconds=900.0, problem=None, output="1 passed")

    monkeypatch.setattr(gpu_check, "run_part", run_part)
    assert gpu_check.main(["--dry", "--results", str(tmp_path)]) == 0
    assert limits == {float("inf")}


def test_pauses_of_a_device_are_named_by_the_kernels_around_them() -> None:
    def event(name: str, start: float, end: float) -> SimpleNamespace:
        return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start, end=end))

    events = [event("pass", 40.0, 90.0), event("copy", 0.0, 10.0), event("next", 92.0, 99.0)]
    found = pauses([*events, event("copy", 100.0, 110.0), event("pass", 140.0, 190.0)], runs=2)
    assert found == {"pauses_us": 30.0, "longest_pauses": [("copy", "pass", 1.0, 30.0)]}
