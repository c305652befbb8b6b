"""Tables of bench_gguf's results."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.peers.gguf.servers import DRAFTING, HEAD, PLAIN
from benchmarks.shared import benchmark
from benchmarks.shared.benchmark import Table, Text, figure
from benchmarks.shared.record import Summary


def _over(base: str) -> Text:
    """Write the median of the ratio of rates to that base."""
    median = figure(base)

    def text(entry: Mapping[str, Any]) -> str:
        return median(entry["over"])

    return text


def _bounded(base: str) -> Text:
    """Write the ratio of rates to that base with the least and the greatest."""

    def text(entry: Mapping[str, Any]) -> str:
        value: Summary | None = entry["over"].get(base)
        if value is None:
            return ""
        return f"{value.median:.2f} ({value.minimum:.2f}-{value.maximum:.2f})"

    return text


def _short(peer: str) -> str:
    return peer.removeprefix("llama.cpp ").removeprefix("OpenVINO ")


def _equal(base: str) -> Text:
    def text(entry: Mapping[str, Any]) -> str:
        found = entry["equal_to"].get(base)
        if found is None:
            return ""
        whole = f"{found['whole_answers']} of {entry['num_answers']} whole"
        return f"{found['first_tokens'].median:.0f} ({whole})"

    return text


def _first_over(base: str) -> Text:
    median = figure(base)

    def text(entry: Mapping[str, Any]) -> str:
        return median(entry["first_token_over"])

    return text


def _of(case: str, text: Text) -> Text:
    """Write a figure of that case of a domain."""

    def written(entry: Mapping[str, Any]) -> str:
        return text(entry["cases"][case])

    return written


def _depths(entry: Mapping[str, Any]) -> str:
    return " ".join(f"{share:.2f}" for share in entry["accepted_share_by_depth"][:6])


def tables_of(results: Mapping[str, Any], *, max_new: int, long_prompt: int) -> Iterator[Table]:
    """A row a server, then the long prompts, a row a domain, the differences, the perplexity."""
    where = f"{results['file']['name']}, {results['threads']} threads, {results['instructions']}"
    peers, cases = results["peers"], results["cases"]
    llamas = list(results["differences"])
    yield Table(
        title=f"{results['num_prompts'][0]} prompts, up to {max_new} tokens: {where}",
        columns=(
            ("tok/s", figure("decode", ".1f")),
            ("x plain", _bounded(PLAIN)),
            *((f"x {_short(base)}", _over(base)) for base in peers),
            ("a pass", figure("tokens_per_pass")),
            ("accepted", figure("acceptance_rate")),
            *((f"equal to {_short(base)}", _equal(base)) for base in llamas[:1]),
        ),
        entries=cases,
        caption="; ".join(f"{name}: {build}" for name, build in results["builds"].items()),
    )
    yield Table(
        title=f"first token of a prompt of {long_prompt} tokens: times and their ratios",
        columns=(
            ("ms", benchmark.milliseconds("first_token_s", ".0f")),
            ("prompt tok/s", figure("prompt_tokens_per_s", ".0f")),
            *((f"x {_short(base)}", _first_over(base)) for base in peers),
        ),
        entries=cases,
    )
    for temperature, domains in results["domains"].items():
        yield _domain_table(temperature, domains, peers)
    yield from _text_tables(results)


def _domain_table(temperature: str, domains: Mapping[str, Any], peers: Sequence[str]) -> Table:
    has_head = any(HEAD in entry["cases"] for entry in domains.values())
    return Table(
        title=f"tok/s by domain, temperature {temperature}; ratios are drafting's",
        columns=(
            ("prompts", benchmark.count("num_prompts")),
            ("plain", _of(PLAIN, figure("decode", ".1f"))),
            ("drafting", _of(DRAFTING, figure("decode", ".1f"))),
            ("x plain", _of(DRAFTING, _bounded(PLAIN))),
            *([("drafter x plain", _of(HEAD, _over(PLAIN)))] if has_head else []),
            ("a pass", _of(DRAFTING, figure("tokens_per_pass"))),
            ("accepted", _of(DRAFTING, figure("acceptance_rate"))),
            ("by depth", _depths),
            *((f"x {_short(base)}", _of(DRAFTING, _over(base))) for base in peers),
        ),
        entries=domains,
    )


def _text_tables(results: Mapping[str, Any]) -> Iterator[Table]:
    rows = {
        f"{name}, prompt {one['prompt']}": one
        for name, differences in results["differences"].items()
        for one in differences
    }
    if rows:
        yield Table(
            title="first differences to llama.cpp, greedy",
            columns=(
                ("token", benchmark.count("position")),
                ("our gap", figure("our_gap", ".3f")),
                ("its gap", figure("its_gap", ".3f")),
            ),
            entries=rows,
        )
    text = results["perplexity"]
    if text is not None:
        yield Table(
            title=f"perplexity of {text['num_tokens']} tokens; llama.cpp {text['llama.cpp']:.4f}",
            columns=(("perplexity", figure("ours", ".4f")), ("x llama.cpp's", figure("x", ".4f"))),
            entries={
                name: {"ours": value, "x": text["over_llama"][name]}
                for name, value in text["outrider"].items()
            },
        )
