"""What do taps cost: the hidden states that a pass yields for a drafter that reads them?

Question: how much longer is a pass of the large model that copies the hidden rows of three layers,
as an EAGLE-3 head wants them, or those behind the last norm, as a multi-token head does?

Method: the same passes without taps, with three (the layers that public EAGLE-3 heads name) and
with the last, in turn: decoding 1, 8 and 64 sequences, and a chunk of 512 tokens of a prompt whose
last row alone gets logits. One runner and one cache for all, rounds of about `--seconds` a pass,
each begun with another way.

Reading it: `cost` is the time over that without taps less 1, the median of pairs. In a prompt's
chunk the last layer's feed-forward computes one row where nothing reads the others; the last tap
wants all of them, so there it costs most of a layer.

    python -m benchmarks.speculation.bench_taps --dtype bfloat16 --expand-target 400M
"""

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import torch

from benchmarks.shared.driving import BLOCK_SIZE, load_runner
from benchmarks.shared.grown import grown_large
from benchmarks.shared.harness import (
    Summary,
    argument_parser,
    choose_threads,
    milliseconds,
    paired_ratio,
    prepare,
    show_table,
    start,
    timed,
    variant_name,
    verdict,
    write_results,
)
from outrider.engine.passes.runner import ForwardSlice, ModelRunner

_DECODING: Final = (1, 8, 64)
_CHUNK: Final = 512
_TARGET: Final = 0.01


def taps_of(num_layers: int) -> dict[str, tuple[int, ...]]:
    """Return the taps of each way."""
    return {
        "none": (),
        "three": (2, num_layers // 2, num_layers - 3),
        "last": (num_layers,),
    }


def passes_of(runner: ModelRunner, arguments: argparse.Namespace) -> dict[int, list[ForwardSlice]]:
    """Return the passes by their rows, behind texts that were computed."""
    generator = torch.Generator().manual_seed(arguments.seed)
    context = arguments.context
    tokens: list[int] = torch.randint(
        runner.vocab_size, (context + _CHUNK,), generator=generator
    ).tolist()

    def behind_text(num_rows: int) -> ForwardSlice:
        view = runner.new_view("bench-taps")
        view.reserve(context + num_rows)
        text = ForwardSlice(view=view, token_ids=tokens[:context], start_slot=0, num_logit_rows=0)
        runner.forward([text])
        return ForwardSlice(
            view=view,
            token_ids=tokens[context : context + num_rows],
            start_slot=context,
            num_logit_rows=1,
        )

    decoding = [behind_text(1) for _ in range(max(_DECODING))]
    passes = {count: decoding[:count] for count in _DECODING}
    return passes | {_CHUNK: [behind_text(_CHUNK)]}


def in_turn(names: list[str], number: int) -> list[str]:
    """Return the order of a round: another way is the first each time."""
    first = number % len(names)
    return names[first:] + names[:first]


def measure(runner: ModelRunner, arguments: argparse.Namespace) -> dict[str, Any]:
    """Time all passes; return their figures by the number of rows and the way."""
    ways = taps_of(runner.model.config.num_layers)

    def run(taps: tuple[int, ...], pieces: list[ForwardSlice]) -> float:
        runner.taps = taps
        return timed(partial(runner.forward, pieces))

    results: dict[str, Any] = {}
    for num_rows, pieces in passes_of(runner, arguments).items():
        round_s = sum(run(taps, pieces) for taps in ways.values())
        times: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(max(arguments.repeats, int(arguments.seconds / round_s))):
            for name in in_turn(list(ways), number):
                times[name].append(run(ways[name], pieces))
        results[str(num_rows)] = {
            name: {
                "seconds": Summary.of(seconds),
                "over_none": (ratio := paired_ratio(seconds, times["none"])),
                "cost": ratio.median - 1.0,
            }
            for name, seconds in times.items()
        }
    return results


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and write the results."""
    parser = argument_parser(__doc__)
    parser.add_argument("--context", type=int, default=32, help="tokens in front of the rows")
    parser.add_argument("--seconds", type=float, default=20.0, help="of rounds, for each pass")
    arguments = parser.parse_args(argv)
    prepare(arguments)
    folder = grown_large(arguments)
    choose_threads(arguments, folder)
    per_sequence = 1 + arguments.context // BLOCK_SIZE
    runner = load_runner(
        folder,
        dtype=arguments.dtype,
        device=arguments.device,
        num_blocks=(1 + max(_DECODING)) * per_sequence + _CHUNK // BLOCK_SIZE + 1,
    )
    runner.prefix_caching = False
    results = measure(runner, arguments)
    show_table(
        f"taps, {runner.model.num_parameters / 1e6:.0f} M parameters",
        ["rows", "ms without", "cost of three", f"at most {_TARGET:.0%}", "cost of the last"],
        [
            [
                num_rows,
                milliseconds(ways["none"]["seconds"].median),
                f"{ways['three']['cost']:+.2%}",
                verdict(ways["three"]["cost"] <= _TARGET),
                f"{ways['last']['cost']:+.2%}",
            ]
            for num_rows, ways in results.items()
        ],
    )
    write_results("bench_taps", variant_name(arguments), results, arguments)


if __name__ == "__main__":
    start(main)
