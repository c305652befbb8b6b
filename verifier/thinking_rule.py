"""Ends thinking when its budget is used up: from then on only the closing mark is possible.

The rule reads the answer's tokens in front of a row and nothing else, so every node of a tree is
judged by its own path.
"""

import math
from collections.abc import Sequence as SequenceOf
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from outrider.kernels.upload import upload
from outrider.verifier.params import ThinkingBudget

_Stage = Literal["start", "thinking", "over"]


class ThinkingRule:
    """One request's budget of thinking: a `LogitRule`. It has the last word but for `-inf`.

    A token that an earlier rule has forbidden is not forced: the row stays as it is.
    """

    def __init__(self, budget: ThinkingBudget, *, num_prompt_tokens: int) -> None:
        self._budget = budget
        self._num_prompt_tokens = num_prompt_tokens
        self._num_kept = max(map(len, budget.closes))
        self._num_opening = max(map(len, budget.opens), default=0)
        self._restart()

    def _restart(self) -> None:
        self._num_read = 0  # of the answer
        self._stage: _Stage = "start" if self._budget.opens else "thinking"
        self._begin = 0  # of the thinking, in the answer

    def apply(self, logits: Tensor, token_ids: list[int], paths: list[list[int]]) -> None:
        """Leave one token possible in rows whose thinking has used its budget; see `LogitRule`."""
        self._read(token_ids)
        rows: list[int] = []
        tokens: list[int] = []
        if self._may_act(token_ids, paths):
            for row, path in enumerate(paths):
                token = self._forced(token_ids, path)
                if token is not None and token < logits.shape[1]:
                    rows.append(row)
                    tokens.append(token)
        if rows:
            _leave_one(logits, rows, tokens)

    def _may_act(self, token_ids: list[int], paths: list[list[int]]) -> bool:
        """False where no path is long enough to use the budget up."""
        if self._stage == "over":
            return False
        length = len(token_ids) - self._num_prompt_tokens + max(map(len, paths), default=0)
        return length - self._begin >= self._budget.max_tokens

    def _read(self, token_ids: list[int]) -> None:
        """Follow the answer's new tokens, each of which may begin or end the thinking."""
        num_prompt = self._num_prompt_tokens
        length = len(token_ids) - num_prompt
        if length < self._num_read:
            self._restart()
        for place in range(self._num_read, length):
            if self._stage == "over":
                break
            first = num_prompt + max(self._begin, place + 1 - self._window)
            self._stage, self._begin = self._next(
                self._stage, self._begin, place + 1, token_ids[first : num_prompt + place + 1]
            )
        self._num_read = length

    @property
    def _window(self) -> int:
        """The most tokens that tell whether thinking begins or ends."""
        return max(self._num_kept, self._num_opening + 1)

    def _next(
        self, stage: _Stage, begin: int, length: int, last: SequenceOf[int]
    ) -> tuple[_Stage, int]:
        """Return stage and begin of an answer with one more token. `last`: its last tokens.

        At the start they are all of its tokens.
        """
        if stage == "start":
            if tuple(last) in self._budget.opens:
                return "thinking", length
            return ("start", 0) if length < self._num_opening else ("over", 0)
        if stage == "thinking" and any(_ends_with(last, mark) for mark in self._budget.closes):
            return "over", begin
        return stage, begin

    def _forced(self, token_ids: list[int], path: list[int]) -> int | None:
        """Return the one token that may follow a path; None where all may."""
        num_prompt, window = self._num_prompt_tokens, self._window
        stage, begin = self._stage, self._begin
        length = self._num_read
        last = token_ids[num_prompt + max(begin, length - window) :]
        for token in path:
            length += 1
            last = [*last, token][-window:]
            stage, before = self._next(stage, begin, length, last)
            if before != begin:
                begin, last = before, []
        if stage != "thinking" or length - begin < self._budget.max_tokens:
            return None
        return self._continued(last)

    def _continued(self, last: SequenceOf[int]) -> int:
        """Return the next token of the closing mark of which most is written already."""
        best, most = self._budget.closes[0], 0
        for mark in self._budget.closes:
            for count in range(len(mark) - 1, most, -1):
                if _ends_with(last, mark[:count]):
                    best, most = mark, count
                    break
        return best[most]


def _ends_with(tokens: SequenceOf[int], mark: SequenceOf[int]) -> bool:
    return len(tokens) >= len(mark) and tuple(tokens[len(tokens) - len(mark) :]) == tuple(mark)


def _leave_one(logits: Tensor, rows: list[int], tokens: list[int]) -> None:
    """Set all but one token of these rows to -inf, unless that one is -inf itself; in place."""
    device = logits.device
    index = upload(np.array(rows, dtype=np.int64), device)
    columns = upload(np.array(tokens, dtype=np.int64), device)[:, None]
    chosen = logits[index]  # [num_rows, vocab_size]
    kept = chosen.gather(1, columns)
    only = torch.full_like(chosen, -math.inf).scatter(1, columns, kept)
    logits.index_copy_(0, index, only.where(kept > -math.inf, chosen))
