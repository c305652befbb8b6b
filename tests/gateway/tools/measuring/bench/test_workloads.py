import gzip
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from outrider.gateway.tools.measuring.bench.arrivals import (
    ArrivalKind,
    LengthDistribution,
    arrival_times,
)
from outrider.gateway.tools.measuring.bench.fields import FieldError, merge_fields, parse_fields
from outrider.gateway.tools.measuring.bench.filler import Filler, TokenRatio
from outrider.gateway.tools.measuring.bench.prompts import load_prompts
from outrider.gateway.tools.measuring.bench.traces import (
    Trace,
    WorkloadError,
    close_gaps,
    load_trace,
)
from outrider.gateway.tools.measuring.bench.workloads import (
    Extent,
    TargetFacts,
    Workload,
    WorkloadSettings,
)

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:48.6805900,396,109
2023-11-16 18:15:47.6805900,879,0
2023-11-16 18:17:46.6805900,91,16
"""
FACTS = TargetFacts(
    body={"model": "m", "stream": True},
    ratio=TokenRatio(per_word=1.0, num_fixed=0.0, is_measured=True),
    takes_ignore_eos=True,
)


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def mooncake(*rows: tuple[int, int, int, list[int]]) -> str:
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    return "\n".join(
        msgspec.json.encode(dict(zip(names, row, strict=True))).decode() for row in rows
    )


def bodies(workload: Workload, extent: Extent, *, salt: str = "s") -> list[dict[str, Any]]:
    return [msgspec.json.decode(r.body) for r in workload.requests(extent, FACTS, salt=salt)]


def whole(num_requests: int | None = None) -> Extent:
    return Extent(rate_per_s=None, duration_s=None, num_requests=num_requests)


def text_of(body: dict[str, Any]) -> str:
    text = body["messages"][0]["content"]
    assert isinstance(text, str)
    return text


def test_an_azure_trace_is_sorted_and_says_what_was_mended(tmp_path: Path) -> None:
    trace = load_trace(written(tmp_path, "azure.csv", AZURE))
    assert [round(row.at_s, 6) for row in trace.rows] == [0.0, 1.0, 2.0, 120.0]
    assert [row.num_prompt_tokens for row in trace.rows] == [374, 879, 396, 91]
    assert [row.num_completion_tokens for row in trace.rows] == [44, 1, 109, 16]
    notes = " ".join(trace.notes)
    assert "order of time" in notes
    assert "an empty answer" in notes
    assert "118 s" in notes
    closed = close_gaps(trace, 5.0)
    assert [round(row.at_s, 6) for row in closed.rows] == [0.0, 1.0, 2.0, 7.0]
    assert "shortened" in closed.notes[-1]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("2023-11-16 18:15:46,-3,4", "-3"),
        ("2023-11-16 18:15:46,0,4", "at least one token"),
        ("2023-11-16 18:15:46,nan,4", "nan"),
        ("yesterday,3,4", "yesterday"),
        ("2023-11-16 18:15:46,3", "2 values for 3"),
        ("inf,3,4", "inf"),
    ],
)
def test_a_wrong_line_is_named_or_left_out(tmp_path: Path, line: str, said: str) -> None:
    path = written(tmp_path, "azure.csv", f"{AZURE}{line}\n")
    with pytest.raises(WorkloadError, match="line 6") as caught:
        load_trace(path)
    assert said in str(caught.value)
    trace = load_trace(path, skips_bad=True)
    assert len(trace.rows) == 4
    assert "1 lines" in trace.notes[0]


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "{}\n", '{"timestamp": true}\n', "\x00\n"])
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(WorkloadError):
        load_trace(written(tmp_path, "trace.csv", text))


def test_what_is_not_there_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="cannot be read"):
        load_trace(tmp_path / "missing.csv")
    (tmp_path / "broken.jsonl.gz").write_bytes(b"no gzip")
    with pytest.raises(WorkloadError, match="cannot be read"):
        load_prompts(tmp_path / "broken.jsonl.gz")


def test_equal_blocks_of_a_trace_are_equal_texts(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "mooncake.jsonl",
        mooncake((0, 1024, 5, [7, 8]), (500, 1300, 6, [7, 8, 9]), (900, 1024, 7, [7, 10])),
    )
    settings = WorkloadSettings(kind="trace", path=path, length_scale=0.125)
    first, second, third = bodies(Workload(settings, seed=1), whole())
    words = [text_of(body).split() for body in (first, second, third)]
    assert [len(w) for w in words] == [128, 162, 128]
    assert words[0] == words[1][:128]
    assert words[2][:64] == words[0][:64]
    assert words[2][64:] != words[0][64:]
    assert first["max_tokens"] == 1
    assert first["ignore_eos"] is True
    # Another run's texts are in no cache.
    assert text_of(bodies(Workload(settings, seed=1), whole(), salt="t")[0]) != text_of(first)
    assert bodies(Workload(settings, seed=1), whole())[0] == first


def test_a_rate_stretches_a_trace_and_keeps_its_pattern(tmp_path: Path) -> None:
    workload = Workload(
        WorkloadSettings(kind="trace", path=written(tmp_path, "a.csv", AZURE)), seed=0
    )
    extent = Extent(rate_per_s=2.0, duration_s=1.5, num_requests=None)
    planned = workload.requests(extent, FACTS, salt="")
    assert [round(r.at_s, 6) for r in planned] == [0.0, 0.5, 1.0]
    long = Extent(rate_per_s=2.0, duration_s=100.0, num_requests=None)
    assert len(workload.requests(long, FACTS, salt="")) == 4
    assert any("it ended" in note for note in workload.notes)


def test_a_rate_cannot_stretch_one_moment(tmp_path: Path) -> None:
    path = written(tmp_path, "m.jsonl", mooncake((0, 9, 5, [1]), (0, 9, 5, [2]), (9, 9, 5, [3])))
    workload = Workload(WorkloadSettings(kind="trace", path=path), seed=0)
    with pytest.raises(WorkloadError, match="same moment"):
        workload.requests(Extent(rate_per_s=2.0, duration_s=1.0, num_requests=None), FACTS, salt="")


def test_lengths_are_scaled_into_the_context(tmp_path: Path) -> None:
    rows = [(i, 1000 + i, 100, [i]) for i in range(200)]
    rows.append((300, 100_000, 100, [999]))
    path = written(tmp_path, "m.jsonl", mooncake(*rows))
    workload = Workload(WorkloadSettings(kind="trace", path=path, context_tokens=512), seed=0)
    planned = workload.requests(whole(), FACTS, salt="")
    totals = [(r.num_prompt_tokens or 0) + (r.num_completion_tokens or 0) for r in planned]
    assert max(totals) <= 512
    assert totals[0] > 350  # the one that is far too long has not made all others short
    assert any("clipped" in note for note in workload.notes)
    assert (
        len(text_of(msgspec.json.decode(planned[0].body)).split()) == planned[0].num_prompt_tokens
    )


def test_prompts_of_many_shapes_are_read(tmp_path: Path) -> None:
    lines = [
        '{"question_id": 1, "category": "qa", "turns": ["Who?", "And then?"]}',
        '{"prompt": "def f():"}',
        '{"messages": [{"role": "user", "content": "hi"}]}',
        '{"conversations": [{"from": "human", "value": "hey"}, {"from": "gpt", "value": "ho"}]}',
        '"just a text"',
    ]
    path = tmp_path / "prompts.jsonl.gz"
    path.write_bytes(gzip.compress("\n\n".join(lines).encode()))
    prompts = load_prompts(path).prompts
    assert [p.messages[0]["content"] for p in prompts] == [
        *("Who?", "def f():", "hi", "hey", "just a text")
    ]
    assert prompts[0].category == "qa"
    assert len(load_prompts(path, categories=("qa",)).prompts) == 1
    with pytest.raises(WorkloadError, match="it has qa"):
        load_prompts(path, categories=("poetry",))


@pytest.mark.parametrize(
    "line", ["{", "[1]", "{}", '{"turns": []}', '{"prompt": " "}', '{"messages": [{"role": 1}]}']
)
def test_a_wrong_prompt_is_named_or_left_out(tmp_path: Path, line: str) -> None:
    path = written(tmp_path, "p.jsonl", f'"fine"\n{line}\n')
    with pytest.raises(WorkloadError, match="line 2"):
        load_prompts(path)
    assert len(load_prompts(path, skips_bad=True).prompts) == 1


def test_prompts_without_a_file_are_never_asked_twice() -> None:
    extent = Extent(rate_per_s=5.0, duration_s=None, num_requests=300)
    workload = Workload(WorkloadSettings(max_tokens=9), seed=3)
    first = [text_of(body) for body in bodies(workload, extent, salt="a")]
    second = [text_of(body) for body in bodies(workload, extent, salt="b")]
    assert len(set(first)) == len(set(second)) == 300
    assert len(set(first) & set(second)) < 30, "only kinds with few texts meet again"
    again = Workload(WorkloadSettings(max_tokens=9), seed=3)
    assert [text_of(body) for body in bodies(again, extent, salt="a")] == first
    assert workload.num_prompts is None


def test_each_request_has_one_of_so_many_users() -> None:
    extent = Extent(rate_per_s=5.0, duration_s=None, num_requests=200)
    asked = bodies(Workload(WorkloadSettings(num_users=7), seed=3), extent)
    assert {body["user"] for body in asked} == {f"user-{number}" for number in range(7)}
    without = bodies(Workload(WorkloadSettings(), seed=3), extent)
    assert all("user" not in body for body in without)


def test_every_prompt_is_asked_before_one_is_asked_again(tmp_path: Path) -> None:
    count = 18
    path = written(tmp_path, "p.txt", "".join(f"Question {n}?\n" for n in range(count)))
    workload = Workload(WorkloadSettings(max_tokens=9, path=path), seed=3)
    asked = bodies(workload, Extent(rate_per_s=5.0, duration_s=None, num_requests=2 * count))
    texts = [text_of(body) for body in asked]
    assert len(set(texts[:count])) == count
    assert sorted(texts[:count]) == sorted(texts[count:])
    assert all(body["max_tokens"] == 9 and body["model"] == "m" for body in asked)


def test_arrivals_have_their_rate_and_their_burstiness() -> None:
    cases: list[tuple[ArrivalKind, float]] = [("poisson", 1.0), ("gamma", 3.0), ("constant", 0.0)]
    for kind, cv in cases:
        times = arrival_times(20_000, kind=kind, cv=3.0, rng=np.random.default_rng(0))
        gaps = np.diff(times)
        assert times[0] == 0.0
        assert gaps.mean() == pytest.approx(1.0, rel=0.1)
        assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.15, abs=1e-9)


def test_lengths_are_drawn_as_told() -> None:
    rng = np.random.default_rng(0)
    assert set(LengthDistribution.parse("7").draw(50, rng)) == {7}
    assert set(LengthDistribution.parse("3-5").draw(200, rng)) == {3, 4, 5}
    drawn = np.asarray(LengthDistribution.parse("200~0.5").draw(20_000, rng))
    assert drawn.mean() == pytest.approx(200, rel=0.03)
    assert drawn.std() == pytest.approx(100, rel=0.05)
    for wrong in ("", "0", "5-3", "a", "5~-1", "-4", "9~x"):
        with pytest.raises(WorkloadError):
            LengthDistribution.parse(wrong)


def test_a_longer_text_begins_as_the_shorter_one() -> None:
    filler = Filler(4)
    assert filler.words("a", 50)[:20] == filler.words("a", 20)
    assert filler.words("a", 20) != filler.words("b", 20)


def test_a_trace_of_one_request_can_be_replayed(tmp_path: Path) -> None:
    path = written(tmp_path, "m.jsonl", mooncake((5000, 20, 5, [1])))
    trace = load_trace(path)
    assert isinstance(trace, Trace)
    workload = Workload(WorkloadSettings(kind="trace", path=path), seed=0)
    extent = Extent(rate_per_s=2.0, duration_s=None, num_requests=1)
    assert [r.at_s for r in workload.requests(extent, FACTS, salt="")] == [0.0]


def test_fields_are_nested_and_merged() -> None:
    fields = parse_fields(["outrider.slo.ttft_ms=20", "outrider.tier=small", "temperature=0"])
    assert fields == {"outrider": {"slo": {"ttft_ms": 20}, "tier": "small"}, "temperature": 0}
    merged = merge_fields(fields, {"outrider": {"tier": "large"}})
    assert merged["outrider"] == {"slo": {"ttft_ms": 20}, "tier": "large"}
    for wrong in (["x"], ["a=1", "a=2"], ["a=1", "a.b=2"], ["stream=true"], [".=1"]):
        with pytest.raises(FieldError):
            parse_fields(wrong)
