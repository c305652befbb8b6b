"""Writes tasks with their checks as JSON lines: prompts of known difficulty for `router collect`.

A row: {"prompt": ...} or {"messages": [...]} (chats of several turns), "tools" where the task has
some, "family", "difficulty", "expected" and "check": {"kind": ...}. What the kinds mean says
outrider.draft.training.tasks.families.is_right.
"""

import argparse
import json
import logging
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from tqdm import tqdm

from outrider.draft.training.tasks.families import (
    DIFFICULTIES,
    FAMILIES,
    Split,
    Task,
    expected_by,
    stream,
)


def row_of(task: Task) -> dict[str, Any]:
    """The task as a row; `is_right(answer, row["check"]["kind"], row["expected"])` judges it."""
    row: dict[str, Any] = {"messages": task.messages} if task.history else {"prompt": task.prompt}
    if task.tools:
        row["tools"] = task.tools
    return {
        **row,
        "family": task.family,
        "difficulty": task.difficulty,
        "expected": expected_by(task),
        "check": {"kind": task.kind},
    }


def distinct_tasks(
    seed: int,
    split: Split,
    families: Sequence[str] = FAMILIES,
    difficulties: Sequence[int] = DIFFICULTIES,
) -> Iterator[Task]:
    """Tasks of one split, none asked twice; ends where new ones become hard to find."""
    seen: set[str] = set()
    num_repeats = 0
    for task in stream(seed, split, families, difficulties):
        if task.split_key not in seen:
            seen.add(task.split_key)
            num_repeats = 0
            yield task
        elif (num_repeats := num_repeats + 1) > 10_000:
            return


def write_tasks(
    destination: Path,
    *,
    num_rows: int,
    seed: int,
    split: Split = "heldout",
    families: Sequence[str] = FAMILIES,
    difficulties: Sequence[int] = DIFFICULTIES,
) -> int:
    """Write at most num_rows rows, replacing the file in one step; returns how many there were."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    partial = destination.with_name(destination.name + ".partial")
    tasks = islice(distinct_tasks(seed, split, families, difficulties), num_rows)
    num_written = 0
    with partial.open("w", encoding="utf-8") as file:
        for task in tqdm(tasks, total=num_rows, desc="tasks", unit="row", leave=False):
            file.write(json.dumps(row_of(task), ensure_ascii=False) + "\n")
            num_written += 1
    partial.replace(destination)
    return num_written


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line of `python -m outrider.draft.training.tasks.files`."""
    parser = argparse.ArgumentParser(
        prog="python -m outrider.draft.training.tasks.files", description=__doc__
    )
    parser.add_argument("--out", type=Path, required=True, help="the file to write")
    parser.add_argument("--num-rows", type=_positive, default=3000, help="how many rows (3000)")
    parser.add_argument("--seed", type=int, default=0, help="other seeds, other tasks (0)")
    parser.add_argument(
        "--split",
        choices=("heldout", "train"),
        default="heldout",
        help="tasks that the pair has not been trained on, or such as it has (heldout)",
    )
    parser.add_argument(
        "--families", nargs="+", choices=FAMILIES, default=FAMILIES, help="which families (all)"
    )
    parser.add_argument(
        "--difficulties", nargs="+", type=int, choices=DIFFICULTIES, default=DIFFICULTIES
    )
    return parser.parse_args(argv)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("at least 1 row")
    return number


def main(argv: Sequence[str] | None = None) -> None:
    """Write the file and say how many rows it has."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    arguments = parse_arguments(argv)
    num_written = write_tasks(
        arguments.out,
        num_rows=arguments.num_rows,
        seed=arguments.seed,
        split=arguments.split,
        families=arguments.families,
        difficulties=arguments.difficulties,
    )
    logging.info("wrote %d tasks to %s", num_written, arguments.out)


if __name__ == "__main__":
    main()
