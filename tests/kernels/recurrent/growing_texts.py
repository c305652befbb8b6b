"""Texts with trees behind them, and the recurrence of the gated delta rule token by token."""

from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from outrider.kernels.recurrent.delta_rows import (
    DeltaBatch,
    DeltaInputs,
    RowContributions,
    delta_rows,
)
from outrider.kernels.recurrent.fold_states import StateFolds, fold_states


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """The sizes of a layer."""

    num_groups: int
    ratio: int
    key_dim: int
    value_dim: int


def random_inputs(count: int, heads: Heads, *, seed: int) -> DeltaInputs:
    """Rows as a layer makes them: keys of length 1, decays from slow to fast."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    num_heads = heads.num_groups * heads.ratio
    keys = normal(2, count, heads.num_groups, heads.key_dim)
    query, key = keys / keys.norm(dim=-1, keepdim=True)
    return DeltaInputs(
        query=query * heads.key_dim**-0.5,
        key=key,
        value=normal(count, num_heads, heads.value_dim),
        beta=normal(count, num_heads).sigmoid(),
        log_decay=-torch.exp(normal(count, num_heads) - 2.0),
    )


def recurrence(inputs: DeltaInputs, path: list[int]) -> tuple[Tensor, Tensor]:
    """The output of the last row of a path, and the state behind it, in float64."""
    ratio = inputs.value.shape[1] // inputs.key.shape[1]
    size = (inputs.value.shape[1], inputs.key.shape[2], inputs.value.shape[2])
    state = torch.zeros(size, dtype=torch.float64)
    output = torch.zeros(size[0], size[2], dtype=torch.float64)
    for row in path:
        key = inputs.key[row].double().repeat_interleave(ratio, 0)  # [heads, key_dim]
        query = inputs.query[row].double().repeat_interleave(ratio, 0)
        state = state * inputs.log_decay[row].double().exp()[:, None, None]
        recalled = torch.einsum("hkv,hk->hv", state, key)
        delta = inputs.beta[row].double()[:, None] * (inputs.value[row].double() - recalled)
        state = state + key[:, :, None] * delta[:, None]
        output = torch.einsum("hkv,hk->hv", state, query)
    return output, state


Parts = TypeVar("Parts", DeltaInputs, DeltaBatch)


def _moved(parts: Parts, device: torch.device) -> Parts:
    return replace(
        parts, **{one.name: getattr(parts, one.name).to(device) for one in fields(parts)}
    )


@dataclass(slots=True, kw_only=True)
class Cached:
    """A cache of rows and states on a device; row i of a text is cached in row i."""

    inputs: DeltaInputs
    num_rows: int
    device: torch.device
    rows: RowContributions = field(init=False)
    states: Tensor = field(init=False)
    output: Tensor = field(init=False)

    def __post_init__(self) -> None:
        count, num_heads, value_dim = self.inputs.value.shape
        groups, key_dim = self.inputs.key.shape[1:]
        waste = self.num_rows + 1
        zeros = partial(torch.zeros, device=self.device)
        self.rows = RowContributions(
            keys=zeros(waste, groups, key_dim),
            deltas=zeros(waste, num_heads, value_dim),
            decays=zeros(waste, num_heads),
        )
        self.states = zeros(2, num_heads, key_dim, value_dim)
        self.output = zeros(count + 1, num_heads, value_dim)

    def run(self, paths: list[list[list[int]]], *, state: int = 0, base: int = 0) -> None:
        """Compute, for each of some texts, the rows that its paths end in.

        A path begins with the row behind the state, number `base`; rows of one text only read its
        earlier ones and each other.
        """
        count = len(self.inputs.key)
        num_rows = max(len(text) for text in paths)
        own = [[path[-1] for path in text] for text in paths]
        prior = [
            sorted({row for path in text for row in path if row >= base} - set(new))
            for text, new in zip(paths, own, strict=True)
        ]
        num_prior = max(len(each) for each in prior)
        rows = torch.full((len(paths), num_rows), count)
        writes = torch.full((len(paths), num_rows), self.num_rows)
        cached = torch.full((len(paths), num_prior), self.num_rows)
        parent = torch.full((len(paths), num_rows), -1)
        sees_prior = torch.zeros(len(paths), num_rows, num_prior, dtype=torch.bool)
        sees_own = torch.zeros(len(paths), num_rows, num_rows, dtype=torch.bool)
        for text, (new, old) in enumerate(zip(own, prior, strict=True)):
            rows[text, : len(new)] = writes[text, : len(new)] = torch.tensor(new)
            cached[text, : len(old)] = torch.tensor(old, dtype=torch.int64)
            for number, path in enumerate(paths[text]):
                seen = [old.index(row) for row in path if row in old]
                sees_prior[text, number, seen] = True
                sees_own[text, number, [new.index(row) for row in path[:-1] if row in new]] = True
                parent[text, number] = max(seen, default=-1)
        batch = DeltaBatch(
            rows=rows,
            writes=writes,
            prior=cached,
            parent=parent,
            sees_prior=sees_prior,
            sees_own=sees_own,
            states=torch.full((len(paths),), state),
        )
        inputs = _moved(self.inputs, self.device)
        delta_rows(inputs, self.rows, self.states, _moved(batch, self.device), self.output)

    def fold(self, rows: list[int], behind: list[int]) -> None:
        """Make state 1 of state 0 and some rows."""
        fold_states(
            self.rows,
            self.states,
            StateFolds(
                sources=torch.tensor([0], device=self.device),
                targets=torch.tensor([1], device=self.device),
                rows=torch.tensor([rows], device=self.device),
                behind=(
                    torch.tensor(behind, dtype=torch.int64, device=self.device),
                    torch.zeros(len(behind), dtype=torch.int64, device=self.device),
                ),
            ),
        )
