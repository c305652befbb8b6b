"""Rules that change a row's logits before the temperature: penalties, biases, a minimal length.

A rule looks at the text in front of a row and at nothing else. So a rule does to a node of a tree
what it does when the same token is decoded alone.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from outrider.kernels.sampling.penalties import apply_penalties
from outrider.kernels.upload import upload
from outrider.verifier.params import SamplingParams
from outrider.verifier.thinking_rule import ThinkingRule

_FIRST_CAPACITY = 64
# Below this, logits divided by it overflow float32; it already outweighs every other difference.
_LEAST_REPETITION = 1e-30


class LogitRule(Protocol):
    """One request's rule. It may keep what it learnt from `token_ids` between calls."""

    def apply(self, logits: Tensor, token_ids: list[int], paths: list[list[int]]) -> None:
        """Change rows in place: row i decides the token behind `token_ids + paths[i]`.

        `logits`: float32 [num_rows, vocab_size], vocab_size being that of the model they come from.
        `token_ids`: prompt and answer; between two calls it only grows, or the answer starts over.
        """


class MaskRule(LogitRule, ABC):
    """A rule that allows some tokens and changes nothing else."""

    @abstractmethod
    def masks(self, token_ids: list[int], paths: list[list[int]]) -> list[NDArray[np.int32] | None]:
        """Return what may follow each `token_ids + path`; None where anything may.

        Bit i % 32 of word i // 32 stands for token i; what has no bit is forbidden.
        """


def build_rules(sampling: SamplingParams, *, num_prompt_tokens: int) -> list[LogitRule]:
    """The rules that a request's sampling parameters ask for; none for the defaults."""
    rule = SamplingRule(sampling, num_prompt_tokens=num_prompt_tokens)
    rules: list[LogitRule] = [rule] if rule.is_needed else []
    if sampling.thinking is not None:
        rules.append(ThinkingRule(sampling.thinking, num_prompt_tokens=num_prompt_tokens))
    return rules


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """The same change to some columns of consecutive rows; all arrays are [num_columns]."""

    first_row: int
    num_rows: int
    columns: NDArray[np.int64]
    shifts: NDArray[np.float32]
    factors: NDArray[np.float32] | None


class LogitEdits:
    """Changes to the logits of many sequences' rows: collected on the host, made in one go.

    See `outrider.kernels.sampling.penalties.apply_penalties` for what shifts and factors do.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._blocks: list[_Block] = []
        self._cells: list[int] = []
        self._shifts: list[float] = []
        self._factors: list[float] = []
        self._is_scaling = False

    def __bool__(self) -> bool:
        """True if anything changes."""
        return bool(self._blocks or self._cells)

    def add_block(
        self,
        rows: range,
        columns: NDArray[np.int64],
        shifts: NDArray[np.float32],
        factors: NDArray[np.float32] | None,
    ) -> None:
        """Add the same change in all `rows`; columns outside the vocabulary are left out."""
        known = columns < self.vocab_size
        if not known.all():
            columns, shifts = columns[known], shifts[known]
            factors = None if factors is None else factors[known]
        self._is_scaling |= factors is not None
        self._blocks.append(
            _Block(
                first_row=rows.start,
                num_rows=len(rows),
                columns=columns,
                shifts=shifts,
                factors=factors,
            )
        )

    def add_cells(
        self, cells: SequenceOf[int], shifts: SequenceOf[float], factor: float = 1.0
    ) -> None:
        """Changes of single logits (row * vocab_size + token id), which hold instead of a block's.

        At most one a logit.
        """
        self._cells += cells
        self._shifts += shifts
        self._factors += [factor] * len(cells)
        self._is_scaling |= bool(cells) and factor != 1.0

    def apply(self, logits: Tensor) -> None:
        """Change the rows in place: float32 [num_rows, vocab_size], contiguous."""
        num_cells = sum(block.num_rows * len(block.columns) for block in self._blocks)
        total = num_cells + len(self._cells)
        cells = np.empty(total, dtype=np.int64)
        shifts = np.empty(total, dtype=np.float32)
        factors = np.ones(total, dtype=np.float32) if self._is_scaling else None
        row_starts = (np.arange(len(logits)) * self.vocab_size)[:, None]  # [num_rows, 1]
        start = 0
        for block in self._blocks:
            shape = (block.num_rows, len(block.columns))
            span = slice(start, start + shape[0] * shape[1])
            own_starts = row_starts[block.first_row : block.first_row + block.num_rows]
            np.add(own_starts, block.columns, out=cells[span].reshape(shape))
            shifts[span].reshape(shape)[:] = block.shifts
            if factors is not None and block.factors is not None:
                factors[span].reshape(shape)[:] = block.factors
            start = span.stop
        cells[num_cells:] = self._cells
        shifts[num_cells:] = self._shifts
        if factors is not None:
            factors[num_cells:] = self._factors
        device = logits.device
        apply_penalties(
            logits,
            upload(cells, device),
            upload(shifts, device),
            None if factors is None else upload(factors, device),
            num_overrides=len(self._cells),
        )


class SamplingRule:
    """One request's penalties, biases and minimal length, for the tokens that they concern.

    The tokens of the text are counted once, when they come; the paths of a tree are few and short
    and are counted anew at each call. Work and memory grow with the number of different tokens in
    the text, not with the vocabulary.
    """

    def __init__(self, sampling: SamplingParams, *, num_prompt_tokens: int) -> None:
        self._presence = sampling.presence_penalty
        self._frequency = sampling.frequency_penalty
        self._repetition = max(sampling.repetition_penalty, _LEAST_REPETITION)
        self._bias = dict(sampling.logit_bias)
        self._banned = frozenset(sampling.stop_token_ids)
        self._min_tokens = sampling.min_tokens if self._banned else 0
        self._num_prompt_tokens = num_prompt_tokens
        self._is_scaling = self._repetition != 1.0
        self._is_counting = bool(self._presence or self._frequency or self._is_scaling)
        self._num_read = 0
        self._counts: dict[int, int] = {}  # in the answer
        self._column_of_token: dict[int, int] = {}  # the column of each token that is concerned
        # Per column, [capacity]: the token, and what the text so far does to its logit.
        self._columns = np.empty(_FIRST_CAPACITY, dtype=np.int64)
        self._shifts = np.empty(_FIRST_CAPACITY, dtype=np.float32)
        self._factors = np.empty(_FIRST_CAPACITY, dtype=np.float32)

    @property
    def is_needed(self) -> bool:
        """True if the request changes any logit at all."""
        return bool(self._is_counting or self._bias or self._min_tokens)

    def apply(self, logits: Tensor, token_ids: list[int], paths: list[list[int]]) -> None:
        """Change rows in place; see `LogitRule`. `logits` must be contiguous."""
        edits = LogitEdits(logits.shape[1])
        self.collect(edits, 0, token_ids, paths)
        if edits:
            edits.apply(logits)

    def collect(
        self, edits: LogitEdits, first_row: int, token_ids: list[int], paths: list[list[int]]
    ) -> None:
        """Add what changes in the rows from `first_row` on, behind `token_ids + paths[i]`."""
        self._read(token_ids)
        num_known = len(self._column_of_token)
        if num_known:
            edits.add_block(
                range(first_row, first_row + len(paths)),
                self._columns[:num_known],
                self._shifts[:num_known],
                self._factors[:num_known] if self._is_scaling else None,
            )
        num_missing = self._min_tokens - (len(token_ids) - self._num_prompt_tokens)
        if num_missing > 0:
            self._ban(edits, first_row, [len(path) < num_missing for path in paths])
        if self._is_counting:
            self._collect_paths(edits, first_row, paths, num_missing)

    def _ban(self, edits: LogitEdits, first_row: int, is_short: list[bool]) -> None:
        """Make the answer's end impossible in rows with too few tokens in front."""
        starts = [row * edits.vocab_size for row, short in enumerate(is_short, first_row) if short]
        tokens = [token for token in self._banned if token < edits.vocab_size]
        cells = [start + token for start in starts for token in tokens]
        edits.add_cells(cells, [-math.inf] * len(cells))

    def _collect_paths(
        self, edits: LogitEdits, first_row: int, paths: list[list[int]], num_missing: int
    ) -> None:
        """The tokens on a row's own path count beside those of the text. Hot: no call is spared."""
        text_counts, bias_of, vocab_size = self._counts, self._bias, edits.vocab_size
        frequency, presence = self._frequency, self._presence
        cells: list[int] = []
        shifts: list[float] = []
        for row, path in enumerate(paths, start=first_row):
            if not path:
                continue
            start = row * vocab_size
            banned = self._banned if len(path) < num_missing else ()
            counts: dict[int, int] = {}
            for token in path:
                counts[token] = counts.get(token, 0) + 1
            for token, count in counts.items():
                if token < vocab_size and token not in banned:
                    cells.append(start + token)
                    count += text_counts.get(token, 0)
                    shifts.append(bias_of.get(token, 0.0) - (frequency * count + presence))
        edits.add_cells(cells, shifts, self._repetition)

    def _shift(self, token: int, count: int) -> float:
        """Return what is added to a token's logit when the answer has it `count` times so far."""
        bias = self._bias.get(token, 0.0)
        return bias - (self._frequency * count + self._presence) if count else bias

    def _read(self, token_ids: list[int]) -> None:
        """Count the tokens that are new since the last call."""
        if not self._num_read or len(token_ids) < self._num_read:
            self._restart(token_ids[: self._num_prompt_tokens])
        if self._is_counting:
            for token in token_ids[self._num_read :]:
                count = self._counts[token] = self._counts.get(token, 0) + 1
                column = self._column(token)
                self._shifts[column] = self._shift(token, count)
                self._factors[column] = self._repetition
        self._num_read = len(token_ids)

    def _restart(self, prompt: SequenceOf[int]) -> None:
        """Forget the answer; begin with the biases and what the prompt repeats."""
        self._num_read = len(prompt)
        self._counts, self._column_of_token = {}, {}
        for token in self._bias:
            self._column(token)
        if self._is_scaling:
            for token in set(prompt):
                column = self._column(token)
                self._factors[column] = self._repetition

    def _column(self, token: int) -> int:
        """The token's column; a new one has its bias and no more."""
        column = self._column_of_token.get(token)
        if column is not None:
            return column
        column = self._column_of_token[token] = len(self._column_of_token)
        if column == len(self._columns):
            self._columns = np.resize(self._columns, 2 * column)
            self._shifts = np.resize(self._shifts, 2 * column)
            self._factors = np.resize(self._factors, 2 * column)
        self._columns[column] = token
        self._shifts[column] = self._shift(token, 0)
        self._factors[column] = 1.0
        return column
