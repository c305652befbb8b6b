"""What does a token tree cost on a model with recurrent layers, against chains and plain decoding?

Question: a tree's paths can be run as chains, each with a recurrent state of its own. Here the rows
of a tree share the state at the last block boundary. What does each way cost?

Method: a model of random weights in the shape of a small Qwen 3.5 (9 of 12 layers recurrent; 0.14 G
parameters, bfloat16), and passes of the engine's runner behind a text, in turn:

- plain: one row, a decoded token
- chain: 16 rows that follow each other
- tree: 16 nodes on 4 levels, 8 of them leaves
- paths: the tree's 16 paths as chains of 16 sequences, each behind a copy of the text

Reading it: `x plain` is the time over that of plain decoding, the median of pairs.

    python -m benchmarks.speculation.bench_recurrent
"""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

from benchmarks.shared import benchmark
from benchmarks.shared.benchmark import (
    Benchmark,
    Results,
    Table,
    count,
    figure,
    milliseconds,
    option,
)
from benchmarks.shared.harness import measure_in_turn, timed
from benchmarks.shared.record import Summary, paired_ratio
from outrider.engine.cache.kv_view import KVView
from outrider.engine.cache.recurrent_lines import RecurrentSizes
from outrider.engine.model.load import load_model
from outrider.engine.passes.runner import ForwardSlice, ModelRunner
from outrider.verifier.token_tree import TokenTree

_PARENTS: Final = [-1, 0, 0, 0, 1, 1, 2, 2, 3, 4, 4, 5, 6, 7, 9, 10]
_BLOCK_SIZE: Final = 16


@dataclass(frozen=True, kw_only=True)
class Options(benchmark.Options):
    """Flags of the command line."""

    context: int = option(200, "tokens of the text")
    vocab: int = option(32768)
    repeats: int = option(40, "measured rounds")
    threads: int = option(2)
    seed: int = option(0)


def make_config(vocab_size: int) -> Qwen3_5TextConfig:
    """Return a small Qwen 3.5."""
    return Qwen3_5TextConfig(
        vocab_size=vocab_size,
        hidden_size=768,
        intermediate_size=2304,
        num_hidden_layers=12,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=128,
        linear_num_key_heads=6,
        linear_num_value_heads=12,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )


def make_runner(options: Options) -> ModelRunner:
    """Return a runner of the model, with room for each path's own sequence."""
    torch.manual_seed(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        factory: Any = AutoModelForCausalLM  # without types
        model = factory.from_config(make_config(options.vocab))
        model.bfloat16().save_pretrained(folder)
        loaded = load_model(folder, dtype="bfloat16")
    num_blocks = (len(_PARENTS) + 2) * (options.context + 2 * len(_PARENTS)) // _BLOCK_SIZE + 64
    sizes = RecurrentSizes(num_lines=len(_PARENTS) + 2, num_checkpoints=1)
    return ModelRunner(
        model=loaded, num_blocks=num_blocks, block_size=_BLOCK_SIZE, recurrent_sizes=sizes
    )


def text_view(runner: ModelRunner, token_ids: list[int]) -> KVView:
    """Return a view of a text that was computed, with room for a tree."""
    view = runner.new_view("bench-recurrent")
    view.reserve(len(token_ids) + len(_PARENTS))
    runner.forward([ForwardSlice(view=view, token_ids=token_ids, start_slot=0, num_logit_rows=1)])
    return view


def cases_of(runner: ModelRunner, options: Options) -> dict[str, tuple[int, Callable[[], float]]]:
    """Return the passes to time, and their numbers of rows."""
    generator = torch.Generator().manual_seed(options.seed)
    tokens: list[int] = torch.randint(
        options.vocab, (options.context + len(_PARENTS),), generator=generator
    ).tolist()
    text, nodes = tokens[: options.context], tokens[options.context :]
    root = len(text)
    tree = TokenTree(token_ids=nodes, parent_index=_PARENTS)
    view = text_view(runner, text)
    paths = [
        [node for node in range(len(nodes)) if mask >> node & 1] for mask in tree.ancestor_mask
    ]

    def rows(view: KVView, token_ids: list[int]) -> ForwardSlice:
        return ForwardSlice(
            view=view, token_ids=token_ids, start_slot=root, num_logit_rows=len(token_ids)
        )

    judged = rows(view, tree.token_ids)
    judged.positions = [root + depth for depth in tree.depth]
    judged.tree_start, judged.ancestor_masks = root, tree.ancestor_mask
    slices = {
        "plain": [rows(view, nodes[:1])],
        "chain": [rows(view, nodes)],
        "tree": [judged],
        "paths": [rows(text_view(runner, text), [nodes[node] for node in path]) for path in paths],
    }
    return {
        name: (
            sum(len(piece.token_ids) for piece in pieces),
            partial(timed, partial(runner.forward, pieces)),
        )
        for name, pieces in slices.items()
    }


def measure(options: Options) -> Results:
    """Time all passes; return their figures by name."""
    torch.set_num_threads(options.threads)
    runner = make_runner(options)
    cases = cases_of(runner, options)
    times = measure_in_turn(
        {name: run for name, (_, run) in cases.items()}, repeats=options.repeats
    )
    return {
        "num_parameters": runner.model.num_parameters,
        "passes": {
            name: {
                "num_rows": num_rows,
                "seconds": Summary.of(times[name]),
                "over_plain": paired_ratio(times[name], times["plain"]),
            }
            for name, (num_rows, _) in cases.items()
        },
    }


def tables(options: Options, results: Results) -> Iterator[Table]:
    """A row a pass."""
    columns = (
        ("rows", count("num_rows")),
        ("ms", milliseconds("seconds")),
        ("x plain", figure("over_plain")),
    )
    title = f"recurrent, {results['num_parameters'] / 1e9:.2f} G parameters"
    yield Table(title=title, columns=columns, entries=results["passes"], first="pass")


def _variant(options: Options) -> str:
    return f"bfloat16-{options.threads}-threads"


BENCHMARK: Final = Benchmark(options=Options, measure=measure, tables=tables, variant=_variant)

if __name__ == "__main__":
    BENCHMARK.start()
