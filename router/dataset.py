"""Labelled prompts from a CSV or JSONL file: prompt, weak_correct and, if known, strong_correct."""

import csv
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from router.features import Floats

_TRUE = frozenset({"1", "1.0", "true"})
_FALSE = frozenset({"0", "0.0", "false"})


class RouterDataError(ValueError):
    """The training or evaluation data cannot be used. The message names file, row and field."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LabelledPrompts:
    """Prompts and whether each tier answered them right: 0.0 or 1.0, both [num_prompts].

    `strong` is None if the file has no such column. `sha256` is the file's.
    """

    prompts: list[str]
    weak: Floats
    strong: Floats | None
    sha256: str

    @property
    def num_duplicates(self) -> int:
        """How many rows repeat a prompt of another row."""
        return len(self.prompts) - len(set(self.prompts))


def read_labelled_prompts(path: Path) -> LabelledPrompts:
    """Read .csv, .jsonl or .ndjson (UTF-8; other columns are ignored).

    Raises RouterDataError for a missing or unreadable file, an empty prompt, a label that is not
    0 or 1, `strong_correct` in some rows only, and a file without rows.
    """
    readers = {".csv": _csv_rows, ".jsonl": _jsonl_rows, ".ndjson": _jsonl_rows}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise RouterDataError(f"{path}: must end in .csv, .jsonl or .ndjson")
    if not path.is_file():
        raise RouterDataError(f"{path}: no such file")
    prompts: list[str] = []
    weak: list[float] = []
    strong: list[float] = []
    try:
        for place, row in reader(path):
            prompt = row.get("prompt")
            if not isinstance(prompt, str) or not prompt.strip():
                raise RouterDataError(f"{place}: prompt is missing or empty")
            prompts.append(prompt)
            weak.append(_label(row, "weak_correct", place))
            if row.get("strong_correct") is not None:
                strong.append(_label(row, "strong_correct", place))
    except (UnicodeDecodeError, csv.Error) as error:
        raise RouterDataError(f"{path}: {error}") from error
    if not prompts:
        raise RouterDataError(f"{path}: holds no rows")
    if strong and len(strong) != len(prompts):
        missing = len(prompts) - len(strong)
        raise RouterDataError(f"{path}: strong_correct is missing in {missing} rows")
    return LabelledPrompts(
        prompts=prompts,
        weak=np.array(weak),
        strong=np.array(strong) if strong else None,
        sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
    )


def _csv_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        for number, row in enumerate(csv.DictReader(file), start=1):
            yield f"{path}, row {number}", row


def _jsonl_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            place = f"{path}, line {number}"
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise RouterDataError(f"{place}: not JSON ({error})") from error
            if not isinstance(row, dict):
                raise RouterDataError(f"{place}: must be a JSON object")
            yield place, row


def _label(row: Mapping[str, Any], name: str, place: str) -> float:
    if row.get(name) is None:
        raise RouterDataError(f"{place}: {name} is missing")
    text = str(row[name]).strip().lower()
    if text in _TRUE:
        return 1.0
    if text in _FALSE:
        return 0.0
    raise RouterDataError(f"{place}: {name} is {row[name]!r}, not 0 or 1")
