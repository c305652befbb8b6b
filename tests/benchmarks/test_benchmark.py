"""A script on the base of all benchmarks: what it reads, prints and writes."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import pytest

from benchmarks.shared import benchmark
from benchmarks.shared.benchmark import (
    Benchmark,
    Goal,
    Results,
    Table,
    count,
    figure,
    milliseconds,
    option,
    parse,
    within,
)
from benchmarks.shared.record import Summary, plain


@dataclass(frozen=True, kw_only=True)
class Options(benchmark.Options):
    """Flags of every type."""

    repeats: int = option(7, "measured rounds")
    first_rate: float = option(2.5, "requests a second")
    sizes: tuple[int, ...] = option((1, 4), "of a batch")
    at: Path | None = option(None, "a folder")
    kind: Literal["whole", "streamed"] = option("whole")
    quick: bool = option(False, "few of them")


def measure(options: Options) -> Results:
    return {str(size): {"wait_s": Summary.of([size / 1e3])} for size in options.sizes}


def tables(options: Options, results: Results) -> Iterator[Table]:
    columns = (("wait ms", milliseconds("wait_s")), ("goal", within("wait_s", 2e-3)))
    yield Table(title="waits", columns=columns, entries=results, first="batch")


def goals(results: Results) -> list[Goal]:
    wait_s = max(entry["wait_s"].median for entry in results.values() if "wait_s" in entry)
    return [Goal(words="longest wait, ms", measured=wait_s * 1e3, bound=2.0)]


def test_options_have_the_types_that_their_class_says() -> None:
    words = ["--first-rate", "3", "--sizes", "2", "8", "--at", "runs"]
    words += ["--kind", "streamed", "--quick", "--variant", "mine"]
    options = parse(Options, "Question?", words)
    assert options.first_rate == 3.0
    assert options.sizes == (2, 8)
    assert options.at == Path("runs")
    assert (options.kind, options.quick, options.variant) == ("streamed", True, "mine")
    assert parse(Options, None, []) == Options()


@pytest.mark.parametrize("words", ["--sizes two", "--kind both", "--sizes", "--wrong 1"])
def test_other_options_are_refused(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(Options, None, words.split())
    assert words.split()[0] in capsys.readouterr().err


def test_the_help_has_the_docstring_and_each_fields_words(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        parse(Options, "How long?", ["--help"])
    text = capsys.readouterr().out
    assert text.index("How long?") < text.index("requests a second")


def test_a_script_prints_its_tables_and_goals_and_writes_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = Benchmark(
        options=Options, measure=measure, tables=tables, goals=goals, variant="small"
    )
    script.main(["--sizes", "1", "3", "--results", str(tmp_path)])
    record = json.loads((tmp_path / "test_benchmark-small.json").read_text(encoding="utf-8"))
    assert record["arguments"]["sizes"] == [1, 3]
    assert record["arguments"]["repeats"] == 7
    assert record["results"]["3"]["wait_s"] == 0.003
    assert record["results"]["goals"] == [
        {"goal": "longest wait, ms", "measured": 3.0, "bound": 2.0, "met": False}
    ]
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["1", "1.00", "yes"] in rows
    assert ["3", "3.00", "no"] in rows
    assert ["longest", "wait,", "ms", "3.00", "2", "no"] in rows


def test_a_variant_is_the_command_lines_or_made_from_the_options(tmp_path: Path) -> None:
    script = Benchmark(
        options=Options, measure=measure, tables=tables, variant=lambda given: given.kind
    )
    script.main(["--results", str(tmp_path)])
    script.main(["--results", str(tmp_path), "--variant", "mine"])
    assert {file.name for file in tmp_path.iterdir()} == {
        "test_benchmark-whole.json",
        "test_benchmark-mine.json",
    }


def test_cells_read_plain_figures_parts_of_summaries_and_nothing() -> None:
    entry = {"rate": Summary.of([1.0, 2.0, 6.0]), "failed": 0, "met": True, "lag_s": None}
    assert figure("rate")(entry) == "2.00"
    assert count("rate", part="maximum")(entry) == "6"
    assert count("failed")(entry) == "0"
    assert "yes" in figure("met")(entry)
    assert milliseconds("lag_s")(entry) == figure("absent")(entry) == ""


def test_a_goal_is_at_most_or_at_least() -> None:
    assert Goal(words="", measured=2.0, bound=2.0).is_met
    assert not Goal(words="", measured=2.1, bound=2.0).is_met
    assert Goal(words="", measured=2.1, bound=2.0, at_least=True).is_met
    assert not Goal(words="", measured=1.9, bound=2.0, at_least=True).is_met


def test_a_summary_of_one_sample_is_written_as_that_sample() -> None:
    many = Summary.of([1.0, 3.0])
    assert plain({"one": Summary.of([1.5]), "many": many}) == {"one": 1.5, "many": asdict(many)}
