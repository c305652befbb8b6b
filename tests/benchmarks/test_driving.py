import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import driving
from benchmarks.driving import Prompt, build_bench, drive, load_prompts, make_requests
from draft.tasks import split_of
from engine.runner import ModelRunner
from tests.engines import random_prompt, serve, tiny_pair


def make_bench(*, num_blocks: int = 256) -> driving.Bench:
    pair = tiny_pair()
    return build_bench(
        {
            "large": ModelRunner(model=pair.large, num_blocks=num_blocks),
            "small": ModelRunner(model=pair.small, num_blocks=num_blocks),
        }
    )


def make_prompts(number: int) -> list[Prompt]:
    return [
        Prompt(messages=(), token_ids=random_prompt(5 + seed, seed=seed), kind="random")
        for seed in range(number)
    ]


def test_a_drive_gives_the_engines_answers_and_accounts_for_the_time() -> None:
    bench = make_bench()
    prompts = make_prompts(7)
    done = drive(bench, make_requests(prompts, tier="large", max_tokens=12), concurrency=3)
    requests = make_requests(prompts, tier="large", max_tokens=12, speculate=False)
    plain = serve(make_bench().engine, requests)
    assert done.outputs == [plain[request.request_id].token_ids for request in requests]
    assert done.num_tokens == 7 * 12
    assert max(step.num_in_flight for step in done.steps) == 3
    assert sum(step.num_emitted for step in done.steps) == done.num_tokens
    for step in done.steps:
        assert 0 < step.large_s < step.wall_s
        assert step.host_s > 0
    assert sum(step.wall_s for step in done.steps) <= done.wall_s
    assert not done.steps[-1].had_prefill
    assert done.steps[0].had_prefill


def test_the_tally_agrees_with_the_requests_own_counts() -> None:
    bench = make_bench()
    requests = make_requests(make_prompts(4), tier="large", max_tokens=20)
    done = drive(bench, requests, concurrency=4)
    tally = bench.verifier.tally
    stats = [answer.stats for answer in done.streams if answer.stats is not None]
    assert tally.num_nodes == sum(s.num_drafted_tokens for s in stats) > 0
    # Tokens that were cut off an answer's end are accepted by the verifier only.
    assert sum(tally.accepted) >= sum(s.num_accepted_tokens for s in stats) > 0
    assert tally.offered[0] == tally.num_trees
    assert all(0 <= share <= 1 for share in tally.acceptance_by_depth)
    assert sorted(tally.offered, reverse=True) == tally.offered


def test_runs_find_nothing_of_each_other_in_the_prefix_cache() -> None:
    bench = make_bench()
    prompts = [Prompt(messages=(), token_ids=random_prompt(64), kind="random")] * 2
    for _ in range(2):
        requests = make_requests(prompts, tier="large", max_tokens=2)
        done = drive(bench, requests, concurrency=1)
        assert [s.stats.num_cached_tokens for s in done.streams if s.stats] == [0, 0]


class _Words:
    """A tokenizer whose tokens are characters."""

    chat_template = "yes"

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> list[int]:
        return [ord(char) for message in messages for char in message["content"]]


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"turns": ["first", "second"], "category": "math"}, "first"),
        ({"question": "how many"}, "how many"),
        ({"prompt": "def f():"}, "def f():"),
        ({"messages": [{"role": "user", "content": "hello"}]}, "hello"),
    ],
)
def test_prompts_of_every_layout_are_read_and_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: dict[str, Any], text: str
) -> None:
    with gzip.open(tmp_path / "rows.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    monkeypatch.setenv("OUTRIDER_DATA", str(tmp_path))
    prompts = load_prompts("rows.jsonl.gz", _Words(), num_prompts=3)
    assert [bytes(prompt.token_ids).decode() for prompt in prompts] == [text] * 3
    assert prompts[0].kind == row.get("category", "rows")


def test_an_absent_file_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUTRIDER_DATA", raising=False)
    with pytest.raises(SystemExit, match=r"no such file .*OUTRIDER_DATA is not set"):
        load_prompts("nowhere.jsonl", _Words(), num_prompts=1)


def test_prompts_that_are_all_too_long_are_a_sentence(tmp_path: Path) -> None:
    file = tmp_path / "long.jsonl"
    file.write_text(json.dumps({"prompt": "x" * 100}) + "\n")
    with pytest.raises(SystemExit, match="at most 50 tokens"):
        load_prompts(str(file), _Words(), num_prompts=2, max_tokens=50)


def test_tasks_are_held_out_distinct_and_the_same_for_a_seed() -> None:
    prompts = load_prompts("tasks", _Words(), num_prompts=20, seed=3)
    texts = ["".join(map(chr, prompt.token_ids)) for prompt in prompts]
    assert len(set(texts)) == 20
    assert {split_of(text) for text in texts} == {"heldout"}
    assert prompts == load_prompts("tasks", _Words(), num_prompts=20, seed=3)
