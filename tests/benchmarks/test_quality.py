"""Perplexity, right answers and their change: the parts of bench_quality."""

import gzip
import json
import math
from pathlib import Path

import pytest

from benchmarks.models.bench_quality import change
from benchmarks.models.quality import Answers, Text, file_texts, nats, perplexity
from benchmarks.shared.harness import DEMO_PAIR
from benchmarks.shared.prompts import load_tokenizer
from outrider.engine.passes.runner import ModelRunner
from tests.engines import tiny_pair


def answers(*is_right: bool) -> Answers:
    ids = [[int(right)] for right in is_right]
    return Answers(is_right=is_right, token_ids=ids, num_drafted=0, num_accepted=0, num_passes=1)


def test_a_text_costs_what_its_tokens_cost_one_after_the_other() -> None:
    runner = ModelRunner(model=tiny_pair().large, num_blocks=64)
    whole = Text(token_ids=[3, 5, 7, 9, 4], start=2, num_bytes=6)
    parts = [Text(token_ids=whole.token_ids[:end], start=end - 1, num_bytes=2) for end in (3, 4, 5)]
    assert nats(runner, whole) == pytest.approx(sum(nats(runner, part) for part in parts), rel=1e-5)
    found = perplexity(runner, [whole])
    assert found["perplexity"] == pytest.approx(math.exp(nats(runner, whole) / 3))
    assert found["bits_per_byte"] == pytest.approx(nats(runner, whole) / math.log(2) / 6)


def test_a_change_counts_answers_that_became_right_or_wrong() -> None:
    found = change(answers(True, True, False, True), answers(True, False, True, False), seed=0)
    assert found["accuracy_change"] == -0.25
    low, high = found["accuracy_change_interval"]
    assert low < -0.25 < high
    assert found["same_answers"] == 0.25


def test_the_beginning_of_json_lines_is_read_packed_or_not(tmp_path: Path) -> None:
    rows = [{"question": f"What is {n}?", "answer": str(n), "id": n} for n in range(500)]
    text = "\n".join(json.dumps(row) for row in rows)
    (tmp_path / "a.jsonl").write_text(text)
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write(text)
    tokenizer = load_tokenizer(DEMO_PAIR / "small")
    plain, packed = (
        file_texts(tokenizer, tmp_path / name, num_bytes=600, piece_tokens=64)
        for name in ("a.jsonl", "a.jsonl.gz")
    )
    assert plain == packed
    assert tokenizer.decode(plain[0].token_ids).startswith("What is 0?\n0")
    assert 580 < sum(piece.num_bytes for piece in plain) <= 600
