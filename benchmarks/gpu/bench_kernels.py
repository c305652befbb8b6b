"""How near is each small kernel to the time that its bytes take?

Method: each kernel at the shapes of Qwen3-8B in bfloat16 with 1, 64 and 2,048 rows, replayed as a
CUDA graph with inputs that the L2 cache cannot hold (where a few hundred sets can do that), and
compared with what must be read and written once at the bandwidth of a device copy of the same run.
Products also have a floor by their operations, and cuBLAS beside them, in turn. Before it is timed,
each kernel runs once on memory full of NaN, and a result with a NaN is a failure.

Reading it: `floor` is the least time, `share` floor over time. Below some 5 µs a launch is all that
one sees: in a graph, a kernel that does nothing takes 1 to 2 µs ("nothing").

    python3 -m benchmarks.gpu.bench_kernels
"""

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.gpu_kernel_cases import TINY, Case, Cases, ModelShape
from benchmarks.gpu.gpu_report import (
    Report,
    chosen_device,
    gpu_parser,
    microseconds,
    show_rows,
    start,
)
from benchmarks.gpu.gpu_timing import (
    Ceilings,
    measure,
    measure_ceilings,
    num_input_sets,
    poison,
    ratio_of,
)
from benchmarks.gpu.gpu_token_cases import growing, tokens, verification
from benchmarks.shared.record import Summary


def tensors_of(result: object) -> list[Tensor]:
    """The tensors of what a launcher returns."""
    if isinstance(result, Tensor):
        return [result]
    if is_dataclass(result) and not isinstance(result, type):
        return [
            value
            for one in fields(result)
            if isinstance(value := getattr(result, one.name), Tensor)
        ]
    return []


def check(case: Case, device: torch.device) -> None:
    """Run once on poisoned memory; raises where a NaN comes out."""
    call = case.make()
    poison(device)
    for tensor in tensors_of(call()):
        if tensor.is_floating_point() and bool(tensor.isnan().any()):
            raise AssertionError(f"{case.name}: a NaN came out of finite numbers")


def run_case(case: Case, ceilings: Ceilings, report: Report) -> dict[str, Any]:
    """Figures of one case, and of its peer in turn."""
    device = report.device
    check(case, device)
    cases = {"ours": case.calls(device)}
    if case.peer is not None:
        cases["torch"] = case.calls(device, of_peer=True)
    samples = measure(
        cases,
        device=device,
        rounds=report.arguments.rounds,
        uncaptured=("ours",) if case.has_host_part else (),
    )
    time = Summary.of(samples["ours"])
    floor_s = ceilings.floor_s(case.num_bytes, case.num_flops)
    figures: dict[str, Any] = {
        "case": case.name,
        "seconds": time,
        "bytes": case.num_bytes,
        "flops": case.num_flops,
        "floor_s": floor_s,
        "share_of_floor": floor_s / time.median,
        "is_captured": not case.has_host_part,
        "input_bytes": case.num_bytes * num_input_sets(case.num_bytes, device),
    }
    if "torch" in samples:
        figures["torch_seconds"] = Summary.of(samples["torch"])
        figures["torch_over_ours"] = ratio_of(samples, "torch", "ours")
    return figures


def run_group(cases: Sequence[Case], ceilings: Ceilings, report: Report) -> list[dict[str, Any]]:
    """All cases of a file; one that fails is reported, and the others go on."""
    figures = []
    for case in cases:
        if report.has_time(case.name, 0.5):
            found = report.part(case.name, partial(run_case, case, ceilings, report))
            figures += [] if found is None else [found]
    show_rows(
        "",
        ["kernel", "µs", "p99", "floor", "share", "torch/ours"],
        [
            [
                one["case"],
                microseconds(one["seconds"].median),
                microseconds(one["seconds"].p99),
                microseconds(one["floor_s"]),
                f"{one['share_of_floor']:.2f}",
                f"{one['torch_over_ours']:.2f}" if "torch_over_ours" in one else "",
            ]
            for one in figures
        ],
    )
    return figures


def run_made(
    make: Callable[[], list[Case]], ceilings: Ceilings, report: Report
) -> list[dict[str, Any]]:
    """As `run_group`; cases are made within the section, for that may fail as well."""
    return run_group(make(), ceilings, report)


def groups(cases: Cases) -> dict[str, Callable[[], list[Case]]]:
    """By file of kernels/, in the order in which they are measured."""
    return {
        "rms_norm": cases.norms,
        "rope_write_kv": cases.rotations,
        "gated_mul": cases.gates,
        "embedding": cases.embedding,
        "compact_kv": cases.moves,
        "sample": partial(tokens, cases),
        "verify_tree": partial(verification, cases),
        "build_tree": partial(growing, cases),
        "row_invariant_linear": cases.products,
        "split_k_linear": cases.few_row_products,
        "integer_linear": cases.integer_products,
    }


def launch_time(device: torch.device, rounds: int) -> Summary:
    """Measure the launch time of a kernel that does next to nothing, within a graph."""
    one = torch.randn(1, device=device)
    return Summary.of(measure({"nothing": [one.neg_]}, device=device, rounds=rounds)["nothing"])


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what the time allows and write the results."""
    arguments = gpu_parser(__doc__, budget_s=70.0).parse_args(argv)
    device = chosen_device(arguments)
    report = Report(script="bench_kernels", arguments=arguments, device=device)
    ceilings = report.section("ceilings", lambda: measure_ceilings(device))
    if ceilings is None:
        return report.finish()
    report.section("nothing", lambda: launch_time(device, arguments.rounds))
    if arguments.dry:
        cases = Cases(shape=TINY, device=device, rows=(1, 3), trees=(1,))
    else:
        cases = Cases(shape=ModelShape(), device=device)
    for name, make in groups(cases).items():
        report.section(name, partial(run_made, make, ceilings, report), needed_s=3.0)
    return report.finish()


if __name__ == "__main__":
    start(main)
