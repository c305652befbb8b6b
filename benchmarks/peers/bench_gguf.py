"""How fast does a public model answer real prompts, beside llama.cpp on the same GGUF file?

Method: each server is a process of its own with the same number of threads: Outrider with the file
as it comes, plain and with repeated text as drafter (its default); plain with `--quantize exact`,
`int8` and `int4`; and llama.cpp's server (wheel `xllamacpp`, by the interpreter that
`--llama-python` names; left out, and said to be, where it has none). Each prompt is a round: every
server answers it, greedily, before the next one is asked, and another one begins each time. No
prompt is asked twice, since Outrider remembers answers. All get the same token ids. Then each gets
`--num-long` prompts of `--long-prompt` tokens, none of which begins as another does.

Reading it: `tok/s` is of decoding, from the first token to the last, as a client sees it. Ratios
are taken within a round: their median, with the least and the greatest in brackets; rounds in which
an answer has under 16 tokens are left out of them. `first token` is of the long prompts. `equal`
counts the first tokens that are llama.cpp's, and the answers that are so to their end.
The published wheels of llama.cpp are built for AVX2, which the file says in its own words.
`--instruction-set avx2` holds Outrider, oneDNN and torch to AVX2 on a processor that has more.

    python -m benchmarks.peers.bench_gguf --prompts prompts/mt_bench_question.jsonl \\
        --llama-python runs/xllamacpp-env/bin/python
"""

import hashlib
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, Final, Literal

from benchmarks.peers.gguf_servers import DRAFTING, LLAMA, PLAIN, Answer, llama_build, started
from benchmarks.shared import benchmark
from benchmarks.shared.benchmark import Benchmark, Goal, Results, Table, Text, figure, option
from benchmarks.shared.harness import console
from benchmarks.shared.prompts import Prompt, load_prompts, load_tokenizer, make_prompt
from benchmarks.shared.record import Summary, paired_ratio
from benchmarks.shared.turns import Case, Turn, Turns
from outrider.gateway.settings.public_models import PUBLIC_MODELS
from outrider.gateway.tools.commands.models.fetching import ModelFetchError, fetch_model
from outrider.gateway.tools.demo.real_prompts import REAL_PROMPTS
from outrider.gateway.wiring.checkpoints import checkpoint
from outrider.gateway.wiring.hardware import usable_physical_cores
from outrider.kernels.cpu.product_library import InstructionSet, product_support

_MODEL: Final = "smollm2-135m"
_WARM_UP: Final = ("Name a colour.", "Name three rivers of Europe, and where each of them ends.")
# A rate of fewer tokens is mostly that of the clock.
_LEAST_DECODED: Final = 15
_MOST_PROMPT: Final = 1024
_MOST_READ: Final = 1000


@dataclass(frozen=True, kw_only=True)
class Options(benchmark.Options):
    """Flags of the command line."""

    repeats: int = option(24, "prompts, each a round")
    gguf: Path | None = option(None, f"file; default: {_MODEL}, which is fetched once")
    prompts: Path | None = option(None, "JSON lines as in ../shared/data; default: the demo's ten")
    max_new: int = option(96, "longest answer, in tokens")
    long_prompt: int = option(1000, "tokens of a long prompt")
    num_long: int = option(5, "long prompts")
    threads: int | None = option(None, "of each server; default: all physical cores")
    llama_python: Path = option(Path(sys.executable), "interpreter that has xllamacpp")
    instruction_set: Literal["best", "avx2"] = option("best", "that Outrider may use")


# ---- the file and its prompts ------------------------------------------------------------------


def model_file(options: Options) -> Path:
    """The file that is measured. Raises SystemExit with a sentence where there is none."""
    if options.gguf is not None:
        if not options.gguf.is_file():
            raise SystemExit(f"--gguf {options.gguf}: no such file.")
        return options.gguf
    try:
        return fetch_model(PUBLIC_MODELS[_MODEL], lambda stage, _: console.print(stage))
    except ModelFetchError as error:
        raise SystemExit(f"{_MODEL}: {error}") from error


def chosen_prompts(tokenizer: Any, options: Options) -> list[Prompt]:
    """As many different prompts as there are rounds, or fewer; their kinds take turns."""
    if options.prompts is None:
        found = [_demo_prompt(tokenizer, one.prompt, one.kind) for one in REAL_PROMPTS]
    else:
        found = load_prompts(
            str(options.prompts), tokenizer, num_prompts=_MOST_READ, max_tokens=_MOST_PROMPT
        )
    different = {prompt.token_ids: prompt for prompt in found}.values()
    kinds: dict[str, list[Prompt]] = {}
    for prompt in different:
        kinds.setdefault(prompt.kind, []).append(prompt)
    in_turn = chain.from_iterable(zip_longest(*kinds.values()))
    return [prompt for prompt in in_turn if prompt is not None][: options.repeats]


def _demo_prompt(tokenizer: Any, text: str, kind: str) -> Prompt:
    return make_prompt(tokenizer, [{"role": "user", "content": text}], kind=kind)


def long_prompts(prompts: Sequence[Prompt], length: int, count: int) -> list[list[int]]:
    """Prompts of exactly `length` tokens, from the text of these; no two begin alike."""
    tokens = [token for prompt in prompts for token in prompt.token_ids]
    endless = tokens * (2 + length // len(tokens))
    # From the middle of a piece, so that none begins with the system's words.
    starts = [(2 * number + 1) * len(tokens) // (2 * count) for number in range(count)]
    return [endless[start : start + length] for start in starts]


# ---- measuring --------------------------------------------------------------------------------


def measure(options: Options) -> Results:
    """Return rates, times to the first token, their ratios to llama.cpp's, and what is equal."""
    file, build = model_file(options), llama_build(options.llama_python)
    if build is None:
        console.print(f"{LLAMA}: left out; {options.llama_python.name} has no xllamacpp.")
    tokenizer = load_tokenizer(Path(checkpoint(str(file))))
    prompts = chosen_prompts(tokenizer, options)
    warm_up = [_demo_prompt(tokenizer, text, "warm-up").token_ids for text in _WARM_UP]
    long = long_prompts(prompts, options.long_prompt, options.num_long + 1)
    num_threads = options.threads or usable_physical_cores()
    with started(
        file,
        num_threads=num_threads,
        is_avx2=options.instruction_set == "avx2",
        llama_python=None if build is None else options.llama_python,
    ) as answers:
        for answer in answers.values():
            for token_ids in (*warm_up, long[-1]):
                answer(token_ids, 24)
        short = [prompt.token_ids for prompt in prompts]
        turns = _take(answers, short, options.max_new, "prompts")
        first = _take(answers, long[:-1], 1, "long prompts")
    return {
        "file": {
            "name": file.name,
            "bytes": file.stat().st_size,
            "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        },
        "threads": num_threads,
        "instructions": _instructions(options),
        LLAMA: build,
        "num_prompts": len(prompts),
        "median_prompt_tokens": statistics.median(map(len, short)),
        "cases": {
            name: case_of(name, turns, prompts) | first_of(name, first, options.long_prompt)
            for name in answers
        },
        "kinds": kinds_of(turns, prompts),
    }


def _instructions(options: Options) -> str:
    best = product_support().instruction_set
    return (min(best, InstructionSet.AVX2) if options.instruction_set == "avx2" else best).name


def _take(
    answers: Mapping[str, Answer], prompts: Sequence[Sequence[int]], max_tokens: int, words: str
) -> Turns:
    def case_for(answer: Answer) -> Case:
        return lambda question: answer(prompts[question], max_tokens)

    return Turns.take(
        {name: case_for(answer) for name, answer in answers.items()},
        num_questions=len(prompts),
        num_rounds=1,
        num_warm_up=0,
        description=words,
    )


def case_of(name: str, turns: Turns, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Rates of a case and their ratios within the rounds; first tokens that are equal."""
    found = {
        **turns.report(name),
        "decode": _summary([_rate(turn) for turn in turns.all_of(name) if _is_long(turn)]),
        "over_llama": _ratio(turns, name, LLAMA),
        "over_plain": _ratio(turns, name, PLAIN),
    }
    for base, key in ((LLAMA, "llama"), (PLAIN, "plain")):
        if base in turns.by_case and base != name:
            compared = turns.compare(name, base, prompts)
            equal = [len(answer) for answer in turns.answers(base)]
            for divergence in compared.divergences:
                equal[divergence.index] = divergence.position
            found[f"first_equal_to_{key}"] = Summary.of(equal)
            found[f"whole_equal_to_{key}"] = compared.num_equal
    return found


def first_of(name: str, turns: Turns, num_tokens: int) -> dict[str, Any]:
    """Times to the first token of the long prompts, the prompts' rate, and the ratio of times."""
    times_s = [turn.wall_s for turn in turns.all_of(name)]
    over = None
    if LLAMA in turns.by_case:
        over = paired_ratio(times_s, [turn.wall_s for turn in turns.all_of(LLAMA)])
    return {
        "first_token_s": Summary.of(times_s),
        "prompt_tokens_per_s": num_tokens / statistics.median(times_s),
        "first_token_over_llama": over,
    }


def kinds_of(turns: Turns, prompts: Sequence[Prompt]) -> dict[str, dict[str, Any]]:
    """For each kind of prompt, every case's ratio to llama.cpp and its tokens a pass."""
    found: dict[str, dict[str, Any]] = {}
    for kind in dict.fromkeys(prompt.kind for prompt in prompts):
        own = [number for number, prompt in enumerate(prompts) if prompt.kind == kind]
        part = Turns(
            by_case={
                name: [rounds[number] for number in own] for name, rounds in turns.by_case.items()
            }
        )
        found[kind] = {
            "num_prompts": len(own),
            "over_llama": {name: _ratio(part, name, LLAMA) for name in part.by_case},
            "over_plain": {name: _ratio(part, name, PLAIN) for name in part.by_case},
            "tokens_per_pass": {
                name: part.report(name).get("tokens_per_pass") for name in part.by_case
            },
        }
    return found


def _rate(turn: Turn) -> float:
    return turn.num_decoded_tokens / turn.decode_s


def _is_long(turn: Turn) -> bool:
    return turn.num_decoded_tokens >= _LEAST_DECODED and turn.decode_s > 0


def _summary(samples: Sequence[float]) -> Summary | None:
    return Summary.of(samples) if samples else None


def _ratio(turns: Turns, name: str, base: str) -> Summary | None:
    if base not in turns.by_case:
        return None
    pairs = zip(turns.all_of(name), turns.all_of(base), strict=True)
    return _summary([_rate(a) / _rate(b) for a, b in pairs if _is_long(a) and _is_long(b)])


# ---- for people -------------------------------------------------------------------------------


def _bounds(key: str, part: str | None = None) -> Text:
    """Write a summary's median with its bounds; of the named part, where there are several."""

    def text(entry: Mapping[str, Any]) -> str:
        value = entry[key] if part is None else entry[key][part]
        if value is None:
            return ""
        return f"{value.median:.2f} ({value.minimum:.2f}-{value.maximum:.2f})"

    return text


def _equal(entry: Mapping[str, Any]) -> str:
    first = entry.get("first_equal_to_llama")
    if first is None:
        return ""
    return f"{first.median:.0f} ({entry['whole_equal_to_llama']} of {entry['num_answers']} whole)"


def _passes(entry: Mapping[str, Any]) -> str:
    return figure(DRAFTING)(entry["tokens_per_pass"])


def tables(options: Options, results: Results) -> Iterator[Table]:
    """A row a server, then a row a kind of prompts."""
    where = f"{results['file']['name']}, {results['threads']} threads, {results['instructions']}"
    build = results[LLAMA]
    yield Table(
        title=f"{results['num_prompts']} prompts, up to {options.max_new} tokens: {where}",
        columns=(
            ("tok/s", figure("decode", ".1f")),
            ("x llama.cpp", _bounds("over_llama")),
            ("x plain", _bounds("over_plain")),
            ("a pass", figure("tokens_per_pass")),
            ("first tokens equal", _equal),
        ),
        entries=results["cases"],
        caption="" if build is None else f"{LLAMA}: {build['instructions']}",
    )
    yield Table(
        title=f"first token of a prompt of {options.long_prompt} tokens",
        columns=(
            ("ms", benchmark.milliseconds("first_token_s", ".0f")),
            ("prompt tok/s", figure("prompt_tokens_per_s", ".0f")),
            ("time x llama.cpp's", _bounds("first_token_over_llama")),
        ),
        entries=results["cases"],
    )
    yield Table(
        title="by kind of prompt",
        columns=(
            ("prompts", benchmark.count("num_prompts")),
            ("plain x llama.cpp", _bounds("over_llama", PLAIN)),
            ("drafting x llama.cpp", _bounds("over_llama", DRAFTING)),
            ("drafting x plain", _bounds("over_plain", DRAFTING)),
            ("a pass", _passes),
        ),
        entries=results["kinds"],
    )


def goals(results: Results) -> list[Goal]:
    """Return the goals of the file as it comes; empty where llama.cpp did not run."""
    plain, drafting = results["cases"][PLAIN], results["cases"][DRAFTING]
    wanted = (
        ("plain decoding over llama.cpp's", plain["over_llama"], 1.0, True),
        ("time to a first token over llama.cpp's", plain["first_token_over_llama"], 1.0, False),
        ("drafting over plain", drafting["over_plain"], 0.99, True),
    )
    return [
        Goal(words=words, measured=ratio.median, bound=bound, at_least=at_least)
        for words, ratio, bound, at_least in wanted
        if ratio is not None
    ]


def _variant(options: Options) -> str:
    prompts = "demo" if options.prompts is None else options.prompts.name.split(".")[0]
    model = _MODEL if options.gguf is None else options.gguf.stem
    return "-".join([model, prompts, _instructions(options).lower()])


BENCHMARK: Final = Benchmark(
    options=Options, measure=measure, tables=tables, goals=goals, variant=_variant
)

if __name__ == "__main__":
    BENCHMARK.start()
