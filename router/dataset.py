"""Labelled prompts from a CSV or JSONL file: what a router learns from and is judged by.

Columns: `prompt` (or `messages`: then the last user's text), and for each tier a label, 0 or 1
(`weak_correct`, `strong_correct`), or a score in [0, 1] (`weak_score`, `strong_score`; it goes
before a label). The small tier's are needed. For other tiers than these two: one column a model
(router/tier_labels.py). JSONL rows of `outrider router collect` say more, see
`LabelledPrompts`; other columns are ignored.
"""

import base64
import csv
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from outrider.router.encoder.sentence import EmbeddedTexts
from outrider.router.features import FloatRows
from outrider.router.tier_labels import (
    COST_COLUMN,
    TierLabels,
    TierLabelsError,
    TierTerms,
    by_cost,
)

_TRUE = frozenset({"1", "1.0", "true"})
_MAX_WIDTH_CHARS: Final = 32
_FALSE = frozenset({"0", "0.0", "false"})
# Columns with one number a row, at least 0, and the fields that they fill.
_COUNTS: Final = {
    "prompt_tokens": "num_prompt_tokens",
    "weak_tokens": "num_weak_tokens",
    "strong_tokens": "num_strong_tokens",
    "weak_s": "weak_s",
    "strong_s": "strong_s",
}


class RouterDataError(ValueError):
    """The training or evaluation data cannot be used. The message names file, row and field."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LabelledPrompts:
    """Prompts and how right each tier's answer was. What the file does not have is None.

    Scores are in [0, 1]. Scores, token counts and seconds are [num_prompts].
    """

    prompts: list[str]
    weak: FloatRows
    strong: FloatRows | None
    sha256: str
    """The file's."""
    hidden: FloatRows | None = None
    """The small model's hidden state of the last prompt token, [num_prompts, hidden_size]."""
    logprobs: list[FloatRows] | None = None
    """Those of the tokens of the small model's whole answer, for each prompt [its number of
    tokens]."""
    num_prompt_tokens: FloatRows | None = None
    num_weak_tokens: FloatRows | None = None
    num_strong_tokens: FloatRows | None = None
    weak_s: FloatRows | None = None
    """From submission to the last token."""
    strong_s: FloatRows | None = None
    """From submission to the last token."""
    pair: str | None = None
    """Fingerprints of the two models, "<small>-<large>"."""
    embeddings: EmbeddedTexts | None = None
    """Of the prompts; no file has them."""

    small_weights: str | None = None
    """The type that the small model's products computed with, such as int8."""
    tiers: TierLabels | None = None
    """Where other tiers than small and large were asked for. Then `weak` is the cheapest labelled
    tier's, `strong` the dearest's."""

    @property
    def scores(self) -> list[FloatRows]:
        """Return the labelled tiers' scores, by rising cost."""
        if self.tiers is not None:
            return self.tiers.labelled
        return [self.weak] if self.strong is None else [self.weak, self.strong]

    def for_tiers(self, tiers: TierLabels) -> "LabelledPrompts":
        """Return the same with the labels of these tiers."""
        weak, *others = tiers.labelled
        return replace(self, weak=weak, strong=others[-1] if others else None, tiers=tiers)

    @property
    def num_duplicates(self) -> int:
        """The number of rows that repeat a prompt of another row."""
        return len(self.prompts) - len(set(self.prompts))


def read_labelled_prompts(path: Path, tiers: Sequence[TierTerms] = ()) -> LabelledPrompts:
    """Read .csv, .jsonl or .ndjson (UTF-8; unknown columns are ignored).

    `tiers`: the models whose columns to read, in place of the small and the large tier's.

    Raises RouterDataError for a missing or unreadable file, an empty prompt, a value that cannot be
    what its column holds, a column that some rows have and others lack, hidden states of different
    sizes, rows of two pairs, and a file without rows.
    """
    readers = {".csv": _csv_rows, ".jsonl": _jsonl_rows, ".ndjson": _jsonl_rows}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise RouterDataError(f"{path}: must end in .csv, .jsonl or .ndjson")
    if not path.is_file():
        raise RouterDataError(f"{path}: no such file")
    columns = _TierColumns(path, tiers) if tiers else _Columns(path)
    try:
        for place, row in reader(path):
            columns.add(place, row)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise RouterDataError(f"{path}: {error}") from error
    if not columns.prompts:
        raise RouterDataError(f"{path}: holds no rows")
    return columns.whole(hashlib.sha256(path.read_bytes()).hexdigest())


class _Columns:
    """Gathers rows; every optional column is in all of them or in none."""

    def __init__(self, path: Path) -> None:
        self.prompts: list[str] = []
        self._path = path
        self._values: dict[str, list[Any]] = {}

    def add(self, place: str, row: Mapping[str, Any]) -> None:
        """Check one row and take its values; `place` names it in errors."""
        self.prompts.append(_prompt(row, place))
        self._take("weak", _score(row, "weak", place), place)
        if _score_name(row, "strong") is not None:
            self._take("strong", _score(row, "strong", place), place)
        optional: tuple[tuple[str, Callable[[Any], Any]], ...] = (
            ("hidden_state", _hidden_state),
            ("weak_logprobs", _logprobs),
            ("pair", _pair),
            ("small_weights", _width),
            *((name, _count) for name in _COUNTS),
        )
        for name, parsed in optional:
            # A CSV has empty cells where JSON has null.
            if row.get(name) in (None, ""):
                continue
            try:
                value = parsed(row[name])
            except ValueError as error:
                raise RouterDataError(f"{place}: {name} {error}") from error
            self._take(name, value, place)
        self._check_alike(place)

    def _check_whole(self) -> None:
        """Raise RouterDataError for a column that is not in each row."""
        for name, values in self._values.items():
            missing = len(self.prompts) - len(values)
            if missing:
                column = f"{name}_correct" if name == "strong" else name
                raise RouterDataError(
                    f"{self._path}: {column} is missing in {missing} rows of "
                    f"{len(self.prompts)}; give it in all rows or in none"
                )

    def whole(self, sha256: str) -> LabelledPrompts:
        """Return all rows; raises RouterDataError for a column that is not in each of them."""
        self._check_whole()
        columns = self._values
        counts: dict[str, Any] = {
            field: np.array(columns[name], dtype=np.float64)
            for name, field in _COUNTS.items()
            if name in columns
        }
        return LabelledPrompts(
            prompts=self.prompts,
            weak=np.array(columns["weak"]),
            strong=np.array(columns["strong"]) if "strong" in columns else None,
            sha256=sha256,
            hidden=np.stack(columns["hidden_state"]) if "hidden_state" in columns else None,
            logprobs=columns.get("weak_logprobs"),
            pair=columns["pair"][0] if "pair" in columns else None,
            small_weights=columns["small_weights"][0] if "small_weights" in columns else None,
            **counts,
        )

    def _take(self, name: str, value: object, place: str) -> None:
        values = self._values.setdefault(name, [])
        if len(values) != len(self.prompts) - 1:
            column = f"{name}_correct" if name == "strong" else name
            raise RouterDataError(
                f"{place}: {column} is given here but is missing in "
                f"{len(self.prompts) - 1 - len(values)} rows before; give it in all rows or in none"
            )
        values.append(value)

    def _check_alike(self, place: str) -> None:
        states, pairs = self._values.get("hidden_state", []), self._values.get("pair", [])
        if states and len(states[-1]) != len(states[0]):
            raise RouterDataError(
                f"{place}: hidden_state has {len(states[-1])} numbers, the first row's has "
                f"{len(states[0])}"
            )
        widths = self._values.get("small_weights", [])
        if widths and widths[-1] != widths[0]:
            raise RouterDataError(
                f"{place}: small_weights is {widths[-1]}, the first row's is {widths[0]}; put each "
                "width's rows into a file of their own"
            )
        if pairs and pairs[-1] != pairs[0]:
            raise RouterDataError(
                f"{place}: pair is {pairs[-1]}, the first row's is {pairs[0]}; a router serves one "
                "pair of models, so put each pair's rows into a file of their own"
            )


class _TierColumns(_Columns):
    """Gathers the columns of named tiers, and of what their answers cost."""

    def __init__(self, path: Path, tiers: Sequence[TierTerms]) -> None:
        super().__init__(path)
        self._tiers = tiers

    def add(self, place: str, row: Mapping[str, Any]) -> None:
        """Check one row and take its values; `place` names it in errors."""
        self.prompts.append(_prompt(row, place))
        for tier in self._tiers:
            columns = {tier.name: _tier_score, COST_COLUMN.format(tier.name): _count}
            for name, parsed in columns.items():
                if row.get(name) in (None, ""):
                    continue
                try:
                    self._take(name, parsed(row[name]), place)
                except ValueError as error:
                    if isinstance(error, RouterDataError):
                        raise
                    raise RouterDataError(f"{place}: {name} {error}") from error

    def whole(self, sha256: str) -> LabelledPrompts:
        """Return all rows; raises RouterDataError for tiers that cannot be ordered or learnt."""
        self._check_whole()
        found = {name: np.array(values) for name, values in self._values.items()}
        scores = {one.name: found[one.name] for one in self._tiers if one.name in found}
        columns = {one.name: COST_COLUMN.format(one.name) for one in self._tiers}
        usd = {name: found[column] for name, column in columns.items() if column in found}
        try:
            tiers = by_cost(self._tiers, scores, usd)
        except TierLabelsError as error:
            raise RouterDataError(f"{self._path}: {error}") from error
        plain = LabelledPrompts(
            prompts=self.prompts, weak=tiers.labelled[0], strong=None, sha256=sha256
        )
        return plain.for_tiers(tiers)


def _csv_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        for number, row in enumerate(csv.DictReader(file), start=1):
            yield f"{path}, row {number}", row


def _jsonl_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            place = f"{path}, line {number}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise RouterDataError(f"{place}: not JSON ({error})") from error
            if not isinstance(row, dict):
                raise RouterDataError(f"{place}: must be a JSON object")
            yield place, row


def _prompt(row: Mapping[str, Any], place: str) -> str:
    prompt = row.get("prompt")
    messages = row.get("messages")
    if prompt is None and isinstance(messages, list):
        said = [
            message.get("content")
            for message in messages
            if isinstance(message, dict) and message.get("role") == "user"
        ]
        prompt = said[-1] if said else None
    if not isinstance(prompt, str) or not prompt.strip():
        raise RouterDataError(f"{place}: prompt is missing or empty")
    return prompt


def _score_name(row: Mapping[str, Any], tier: str) -> str | None:
    """The column that holds a tier's score or label; None if there is neither."""
    names = (f"{tier}_score", f"{tier}_correct")
    return next((name for name in names if row.get(name) is not None), None)


def _score(row: Mapping[str, Any], tier: str, place: str) -> float:
    name = _score_name(row, tier)
    if name is None:
        raise RouterDataError(f"{place}: {tier}_correct is missing")
    value = row[name]
    text = str(value).strip().lower()
    if name == f"{tier}_score":
        try:
            score = float(text)
        except ValueError:
            score = math.nan
        if not 0.0 <= score <= 1.0:
            raise RouterDataError(f"{place}: {name} is {value!r}, not a number in [0, 1]")
        return score
    if text in _TRUE:
        return 1.0
    if text in _FALSE:
        return 0.0
    raise RouterDataError(
        f"{place}: {name} is {value!r}, not 0 or 1; a share in [0, 1] goes into {tier}_score"
    )


def _tier_score(value: object) -> float:
    text = str(value).strip().lower()
    if text in _TRUE | _FALSE:
        return float(text in _TRUE)
    with suppress(ValueError):
        if 0.0 <= (score := float(text)) <= 1.0:
            return score
    raise ValueError(f"is {value!r}, not 0, 1 or a share between them")


def _hidden_state(value: object) -> FloatRows:
    """[hidden_size] from base64 of little-endian float32."""
    if not isinstance(value, str):
        raise ValueError("must be a string: base64 of little-endian float32")
    try:
        content = base64.b64decode(value, validate=True)
    except ValueError as error:
        raise ValueError(f"is not base64 ({error})") from error
    if not content or len(content) % 4:
        raise ValueError(f"holds {len(content)} bytes, which are not whole float32 numbers")
    state = np.frombuffer(content, dtype="<f4").astype(np.float64)
    if not np.isfinite(state).all():
        raise ValueError("holds numbers that are not finite")
    return state


def _logprobs(value: object) -> FloatRows:
    """[num_tokens], each at most 0."""
    if not isinstance(value, list) or not all(_is_number(entry) for entry in value):
        raise ValueError("must be a list of numbers")
    logprobs = np.array(value, dtype=np.float64)
    # Rounding may lift a sure token's a little above 0.
    if not (np.isfinite(logprobs).all() and (logprobs <= 1e-3).all()):
        raise ValueError("holds numbers that are above 0 or not finite")
    return np.minimum(logprobs, 0.0)


def _pair(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f'is {value!r}, not "<fingerprint>-<fingerprint>"')
    return value.strip()


def _width(value: object) -> str:
    if not isinstance(value, str) or not 0 < len(value.strip()) <= _MAX_WIDTH_CHARS:
        raise ValueError(f"is {value!r}, not the name of a type, such as int8")
    return value.strip()


def _count(value: object) -> float:
    number = math.nan
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        with suppress(ValueError, OverflowError):
            number = float(value)
    if not (math.isfinite(number) and number >= 0.0):
        raise ValueError(f"is {value!r}, not a number of 0 or more")
    return number


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
