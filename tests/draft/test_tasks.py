import itertools
import random
from collections.abc import Callable

import pytest

from draft.tasks import DIFFICULTIES, FAMILIES, Task, check, generate, split_of, stream

CELLS = list(itertools.product(FAMILIES, DIFFICULTIES))


def corrupted(task: Task) -> str:
    """The answer with one character of its final line changed."""
    place = len(task.answer) - len(task.expected) // 2 - 2
    wrong = "7" if task.answer[place] != "7" else "8"
    return task.answer[:place] + wrong + task.answer[place + 1 :]


@pytest.mark.parametrize(("family", "difficulty"), CELLS)
def test_own_answer_passes_and_a_corrupted_one_fails(family: str, difficulty: int) -> None:
    rng = random.Random(difficulty)
    for _ in range(50):
        task = generate(family, difficulty, rng)
        assert (task.family, task.difficulty) == (family, difficulty)
        assert check(task, task.answer)
        assert check(task, task.answer + "\n")
        assert not check(task, corrupted(task)), task
        assert not check(task, "")
        assert not check(task, task.prompt)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "chat"])
def test_the_answer_of_another_task_fails(family: str) -> None:
    rng = random.Random(0)
    tasks = [generate(family, 4, rng) for _ in range(40)]
    for left, right in itertools.combinations(tasks, 2):
        assert check(left, right.answer) == (left.expected == right.expected)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "chat"])
def test_only_the_last_answer_line_counts_and_steps_are_free(family: str) -> None:
    task = generate(family, 2, random.Random(3))
    final = task.answer.splitlines()[-1]
    assert final.startswith("Answer: ")
    assert check(task, f"Answer: wrong.\nnever mind\n{final}")
    assert not check(task, f"{final}\nAnswer: wrong.")


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


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_same_seed_same_tasks(split: str) -> None:
    def first(seed: int) -> list[Task]:
        return list(itertools.islice(stream(seed, split), 200))  # type: ignore[arg-type]

    assert first(1) == first(1)
    assert first(1) != first(2)


def test_train_and_heldout_prompts_are_disjoint() -> None:
    train = {task.prompt for task in itertools.islice(stream(0, "train"), 5_000)}
    heldout = {task.prompt for task in itertools.islice(stream(0, "heldout"), 500)}
    assert not train & heldout
    assert all(split_of(prompt) == "train" for prompt in itertools.islice(train, 500))


def test_prompts_vary_in_wording() -> None:
    rng = random.Random(7)
    for family, difficulty in CELLS:
        prompts = {generate(family, difficulty, rng).prompt for _ in range(100)}
        assert len(prompts) > 40, (family, difficulty)


def test_unknown_cells_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown family 'poetry'"):
        generate("poetry", 1, random.Random(0))
    with pytest.raises(ValueError, match="difficulty must be one of"):
        generate("addition", 5, random.Random(0))
