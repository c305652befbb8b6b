import itertools
import json
import random
import re
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.draft.training.tasks import facts as task_facts
from outrider.draft.training.tasks.families import (
    DIFFICULTIES,
    FAMILIES,
    PLAIN_FAMILIES,
    Split,
    Task,
    check,
    expected_by,
    generate,
    is_right,
    split_of,
    stream,
)
from outrider.draft.training.tasks.files import main, row_of

CELLS = list(itertools.product(FAMILIES, DIFFICULTIES))
WORKED = [family for family in PLAIN_FAMILIES if family != "chat"]


def corrupted(task: Task) -> str:
    """The answer with one character of what is compared changed."""
    compared = task.expected
    if task.kind == "tool_call":
        compared = json.loads(task.expected)["name"]
    place = task.answer.rindex(compared) + len(compared) // 2
    wrong = "7" if task.answer[place] != "7" else "8"
    return task.answer[:place] + wrong + task.answer[place + 1 :]


@pytest.mark.parametrize(("family", "difficulty"), CELLS)
def test_own_answer_passes_and_a_corrupted_one_fails(family: str, difficulty: int) -> None:
    rng = random.Random(difficulty)
    for _ in range(5 if family == "passage" else 50):
        task = generate(family, difficulty, rng)
        assert (task.family, task.difficulty) == (family, difficulty)
        assert check(task, task.answer)
        assert check(task, task.answer + "\n")
        assert not check(task, corrupted(task)), task
        assert not check(task, "")
        assert not check(task, task.prompt)


@pytest.mark.parametrize("family", WORKED)
def test_the_answer_of_another_task_fails(family: str) -> None:
    rng = random.Random(0)
    tasks = [generate(family, 4, rng) for _ in range(40)]
    for left, right in itertools.combinations(tasks, 2):
        assert check(left, right.answer) == (left.expected == right.expected)


@pytest.mark.parametrize("family", WORKED)
def test_the_last_line_counts_and_steps_are_free(family: str) -> None:
    task = generate(family, 2, random.Random(3))
    final = task.answer.splitlines()[-1]
    assert final.startswith("Answer: ")
    assert check(task, f"Answer: wrong.\nnever mind\n{final}")
    assert not check(task, f"{final}\nAnswer: wrong.")


@pytest.mark.parametrize(
    ("kind", "expected", "right", "wrong"),
    [
        ("exact", "Hello!", ["Hello!", " Hello! \n"], ["hello!", "Hello! Hi", ""]),
        ("regex", r"^Answer: 4\.5\.?$", ["Answer: 4.5.", "x\nAnswer: 4.5"], ["Answer: 4a5", "4.5"]),
        (
            "json",
            '{"a": 1, "b": [2]}',
            ['Answer: {"b":[2], "a":1}', 'so\n{"a": 1, "b": [2]}'],
            ['{"a": 1}', '{"a": true, "b": [2]}', '{"a": 1.0, "b": [2]}', '{"a": 1, "b": [2]', "["],
        ),
        (
            "tool_call",
            '{"name": "f", "arguments": {"x": 1}}',
            [
                '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>',
                'Well. <tool_call>{"arguments": {"x": 1}, "name": "f"}</tool_call>',
            ],
            [
                '{"name": "f", "arguments": {"x": 1}}',
                '<tool_call>{"name": "f", "arguments": {"x": "1"}}</tool_call>',
                '<tool_call>{"name": "g", "arguments": {"x": 1}}</tool_call>',
                2 * '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>',
                "<tool_call></tool_call>",
            ],
        ),
    ],
)
def test_kinds_of_checks(kind: Any, expected: str, right: list[str], wrong: list[str]) -> None:
    for answer in right:
        assert is_right(answer, kind, expected), answer
    for answer in wrong:
        assert not is_right(answer, kind, expected), answer


@given(answer=st.text())
def test_no_answer_breaks_a_check(answer: str) -> None:
    for family in ("addition", "chat", "json", "tool_call"):
        task = generate(family, 2, random.Random(1))
        assert not check(task, answer) or answer.strip()


def test_arithmetic_answers_are_right() -> None:
    rng = random.Random(5)
    operations: dict[str, Callable[[int, int], int]] = {
        "addition": lambda x, y: x + y,
        "subtraction": lambda x, y: abs(x - y),
        "multiplication": lambda x, y: x * y,
    }
    for family, operation in operations.items():
        for difficulty in DIFFICULTIES:
            for _ in range(50):
                task = generate(family, difficulty, rng)
                digits = "".join(c if c.isdigit() else " " for c in task.prompt)
                left, right = map(int, digits.split())
                assert task.expected == str(operation(left, right)), task.prompt


def test_difficulty_lengthens_the_answers() -> None:
    rng = random.Random(6)
    for family in ("addition", "multiplication", "sort_words", "count_letters", "word_problem"):
        lengths = [
            sum(len(generate(family, difficulty, rng).answer) for _ in range(100))
            for difficulty in DIFFICULTIES
        ]
        assert lengths == sorted(lengths), family


@pytest.mark.slow_cases
@pytest.mark.parametrize("split", ["train", "heldout"])
def test_same_seed_same_tasks(split: Split) -> None:
    def first(seed: int) -> list[Task]:
        return list(itertools.islice(stream(seed, split, FAMILIES), 100))

    assert first(1) == first(1)
    assert first(1) != first(2)


@pytest.mark.slow
def test_train_and_heldout_prompts_are_disjoint() -> None:
    train = {task.split_key for task in itertools.islice(stream(0, "train"), 5_000)}
    heldout = {task.split_key for task in itertools.islice(stream(0, "heldout"), 500)}
    assert not train & heldout
    assert all(split_of(prompt) == "train" for prompt in itertools.islice(train, 500))


def test_prompts_vary_in_wording() -> None:
    rng = random.Random(7)
    for family, difficulty in CELLS:
        number = 20 if family == "passage" else 100
        prompts = {generate(family, difficulty, rng).split_key for _ in range(number)}
        assert len(prompts) > 0.4 * number, (family, difficulty)


def test_unless_told_otherwise_a_stream_has_short_single_prompts() -> None:
    for task in itertools.islice(stream(3, "heldout"), 200):
        assert not task.history
        assert not task.tools
        assert len(task.prompt) < 1000


def test_unknown_cells_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown family 'poetry'"):
        generate("poetry", 1, random.Random(0))
    with pytest.raises(ValueError, match="difficulty must be one of"):
        generate("addition", 5, random.Random(0))


# ---- texts, chats, tools --------------------------------------------------------------------


def test_the_answer_to_a_look_up_is_quoted_from_the_text() -> None:
    rng = random.Random(8)
    for family, difficulty in itertools.product(("lookup", "passage"), DIFFICULTIES):
        for _ in range(5):
            task = generate(family, difficulty, rng)
            quote, _ = task.answer.splitlines()
            sentences = quote.removeprefix("The text says: ").split(". ")
            assert all(sentence in task.prompt for sentence in sentences)
            assert task.expected in sentences[-1]


def test_a_question_about_a_text_has_one_answer() -> None:
    rng = random.Random(9)
    for _ in range(100):
        drawn = task_facts.passage(600, rng)
        for fact in drawn.facts:
            said_of_it = fact.sentence.removeprefix(fact.person).removesuffix(f"{fact.value}.")
            assert drawn.text.count(said_of_it) == drawn.text.count(fact.sentence) == 1


def test_passages_grow_with_difficulty_up_to_thousands_of_tokens() -> None:
    rng = random.Random(10)
    lengths = [
        sorted(len(generate("passage", difficulty, rng).prompt) for _ in range(20))
        for difficulty in DIFFICULTIES
    ]
    assert all(less[-1] < more[0] for less, more in itertools.pairwise(lengths))
    assert lengths[3][-1] < 4 * 3000


def test_interviews_quote_their_text_and_ask_about_each_fact_once() -> None:
    rng = random.Random(11)
    for _ in range(50):
        messages = task_facts.interview(400, rng)
        text = messages[0]["content"]
        answers = [said["content"] for said in messages if said["role"] == "assistant"]
        assert len(answers) == len(set(answers)) > 2
        quotes = [answer.partition("\n")[0].removeprefix("The text says: ") for answer in answers]
        assert all(said in text for quote in quotes for said in quote.split(". "))


def test_a_follow_up_needs_what_was_said_before() -> None:
    rng = random.Random(12)
    for difficulty in DIFFICULTIES:
        for _ in range(50):
            task = generate("follow_up", difficulty, rng)
            assert [said["role"] for said in task.messages][-2:] == ["assistant", "user"]
            assert len(task.prompt) < 100


def test_calls_use_the_tools_as_they_are_listed() -> None:
    rng = random.Random(13)
    kinds = set()
    for difficulty in DIFFICULTIES:
        for _ in range(200):
            task = generate("tool_call", difficulty, rng)
            kinds.add((task.kind, bool(task.history)))
            listed = {tool["function"]["name"]: tool["function"] for tool in task.tools}
            assert len(listed) == len(task.tools) >= 1
            if task.kind != "tool_call":
                continue
            call = json.loads(task.expected)
            schema = listed[call["name"]]["parameters"]
            types = {"integer": int, "string": str}
            for name, value in call["arguments"].items():
                assert type(value) is types[schema["properties"][name]["type"]]
                assert str(value) in task.prompt
            assert set(schema["required"]) <= set(call["arguments"])
    assert kinds == {("tool_call", False), ("exact", False), ("exact", True)}


def test_the_toolbox_grows_and_shows_one_fitting_tool_or_none() -> None:
    rng = random.Random(14)
    means = []
    for difficulty in DIFFICULTIES:
        sizes = [len(generate("tool_call", difficulty, rng).tools) for _ in range(100)]
        means.append(sum(sizes) / len(sizes))
    assert means == sorted(means)


# ---- files ----------------------------------------------------------------------------------


def test_a_row_says_the_same_as_the_check() -> None:
    rng = random.Random(15)
    for family, difficulty in CELLS:
        for _ in range(2 if family == "passage" else 10):
            task = generate(family, difficulty, rng)
            row = json.loads(json.dumps(row_of(task)))
            others = [generate(family, difficulty, rng).answer, corrupted(task), task.answer]
            for answer in others:
                assert is_right(answer, row["check"]["kind"], row["expected"]) == check(
                    task, answer
                )
            if task.kind == "regex":
                pattern = re.compile(row["expected"])
                assert pattern.search(task.answer.splitlines()[-1])


def test_special_characters_in_an_expected_answer_are_literal() -> None:
    task = generate("compare", 4, random.Random(16))
    assert "." in task.expected
    assert not is_right(f"Answer: {task.expected.replace('.', 'x')}.", task.kind, expected_by(task))
    assert set(string.punctuation) & set(task.expected)


@pytest.mark.slow
def test_the_command_writes_distinct_rows_of_one_split(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")

    def written(name: str, *options: str) -> list[dict[str, Any]]:
        main(["--out", str(tmp_path / name), "--num-rows", "150", *options])
        assert "wrote 150 tasks" in caplog.text
        caplog.clear()
        return [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]

    rows = written("a.jsonl")
    assert written("b.jsonl") == rows
    assert written("c.jsonl", "--seed", "1") != rows
    keys = [json.dumps(row.get("prompt") or row["messages"]) for row in rows]
    assert len(set(keys)) == len(rows) == 150
    assert {row["family"] for row in rows} == set(FAMILIES)
    assert all(split_of(row["prompt"]) == "heldout" for row in rows if "prompt" in row)
    assert all(("prompt" in row) != ("messages" in row) for row in rows)
    few = written("d.jsonl", "--families", "tool_call", "--difficulties", "4", "--split", "train")
    assert {(row["family"], row["difficulty"]) for row in few} == {("tool_call", 4)}
    assert all(row["tools"] for row in few)


@pytest.mark.slow
def test_a_small_cell_ends_instead_of_searching_forever(tmp_path: Path) -> None:
    file = tmp_path / "few.jsonl"
    main(["--out", str(file), "--num-rows", "100000", "--families", "chat", "--difficulties", "1"])
    assert 100 < len(file.read_text().splitlines()) < 100_000
