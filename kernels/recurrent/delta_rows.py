"""The gated delta rule for rows of chunks and token trees, from a state and earlier rows.

With S the state in front of all of a row's ancestors, and a decay of exp(G) from there to the row,

    delta_i = beta_i (v_i - exp(G_i) S^T k_i - sum of exp(G_i - G_j) (k_j k_i) delta_j)
    o_i = exp(G_i) S^T q_i + sum of exp(G_i - G_j) (k_j q_i) delta_j

where the first sum goes over the row's ancestors j, the second over them and the row itself.

A row's delta depends on its ancestors alone, so it is kept with the row's key and decay: whatever
follows reads it, as attention reads a value. That is the chunked form of the rule (Yang et al.,
Gated Delta Networks: Improving Mamba2 with Delta Rule, 2024, section 3.3) with a mask of ancestors
in the place of the causal one. Rows of one pass solve a triangular system.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.kernels.triton_support import (
    dot,
    jit,
    launch,
    next_power_of_2,
    tl,
    triton,
    uses_triton,
)

_VALUE_BLOCK = 16  # columns of the state that a program has
_KEY_BLOCK = 16  # features at a time: products in float32 are unrolled over them
_PRIOR_BLOCK = 16
_MANY_ROWS = 64
_LEAST_ROWS = 16  # of a product on tensor cores


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaInputs:
    """A pass's rows, float32."""

    query: Tensor
    """[n, num_key_heads, key_dim], scaled already."""
    key: Tensor
    """[n, num_key_heads, key_dim], scaled already."""
    value: Tensor
    """[n, num_value_heads, value_dim]."""
    beta: Tensor
    """[n, num_value_heads]."""
    log_decay: Tensor
    """[n, num_value_heads], at most 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowContributions:
    """What rows behind a state add to it, float32, by row of the cache; the last row is waste."""

    keys: Tensor
    """[rows + 1, num_key_heads, key_dim]."""
    deltas: Tensor
    """[rows + 1, num_value_heads, value_dim]."""
    decays: Tensor
    """[rows + 1, num_value_heads], G: the logarithms' sum since the state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaBatch:
    """Rows of p sequences, at most r of each, behind at most c cached rows of each."""

    rows: Tensor
    """int64 [p, r], rows of the pass, parents before children. Where there is none: their number
    n."""
    writes: Tensor
    """int64 [p, r], where the rows are cached. Where there is none: waste."""
    prior: Tensor
    """int64 [p, c], cached rows. Where there is none: the waste row."""
    parent: Tensor
    """int64 [p, r], the last of `prior` among a row's ancestors; -1 for none."""
    sees_prior: Tensor
    """bool [p, r, c]."""
    sees_own: Tensor
    """bool [p, r, r], the ancestors without the row itself."""
    states: Tensor
    """int64 [p]."""


def delta_rows_reference(
    inputs: DeltaInputs, rows: RowContributions, states: Tensor, batch: DeltaBatch, output: Tensor
) -> None:
    """`delta_rows` in torch."""
    num_groups = inputs.key.shape[1]
    ratio = inputs.value.shape[1] // num_groups
    num_rows = batch.rows.shape[1]
    num_prior = batch.prior.shape[1]
    own = batch.rows.clamp(max=len(inputs.key) - 1)
    key = inputs.key[own].transpose(1, 2)  # [p, groups, r, key_dim]
    both = torch.cat((key, inputs.query[own].transpose(1, 2)), 2)  # [p, groups, 2 r, key_dim]
    value = inputs.value[own].transpose(1, 2)  # [p, heads, r, value_dim]
    beta = inputs.beta[own].transpose(1, 2).unsqueeze(-1)  # [p, heads, r, 1]
    # ---- decays
    is_self = torch.eye(num_rows, dtype=torch.bool, device=own.device)
    path = (batch.sees_own | is_self).float()  # [p, r, r]
    prior_decays = rows.decays[batch.prior]  # [p, c, heads]
    decays = torch.matmul(path, inputs.log_decay[own])  # [p, r, heads]
    if num_prior:
        parents = batch.parent.clamp(min=0)[..., None].expand(-1, -1, prior_decays.shape[2])
        before = prior_decays.gather(1, parents)
        decays = decays + before.where(batch.parent[..., None] >= 0, 0.0)
    ends = torch.cat((prior_decays, decays), 1).transpose(1, 2)  # [p, heads, c + r]
    begins = decays.transpose(1, 2)  # [p, heads, r]
    sees = torch.cat((batch.sees_prior, batch.sees_own | is_self), 2)[:, None]  # [p, 1, r, c + r]
    spans = begins[..., None] - ends[:, :, None]  # [p, heads, r, c + r]
    weights = spans.masked_fill(~sees, -torch.inf).exp_()
    # ---- what the state and cached rows say
    state = states[batch.states]  # [p, heads, key_dim, value_dim]
    by_group = torch.unflatten(state, 1, (num_groups, ratio))
    recalled = torch.matmul(both.unsqueeze(2), by_group).flatten(1, 2)  # [p, heads, 2 r, value_dim]
    recalled = torch.unflatten(recalled, 2, (2, num_rows)) * begins.exp()[:, :, None, :, None]
    keys = torch.cat(
        (rows.keys[batch.prior].transpose(1, 2), key), 2
    )  # [p, groups, c + r, key_dim]
    scores = torch.unflatten(torch.matmul(both, keys.mT), 2, (2, num_rows))
    scores = scores[:, :, None].expand(-1, -1, ratio, -1, -1, -1).flatten(1, 2)
    scores = scores * weights[:, :, None]  # [p, heads, 2, r, c + r]
    if num_prior:
        prior_deltas = rows.deltas[batch.prior].transpose(1, 2)[:, :, None]
        recalled = recalled + torch.matmul(scores[..., :num_prior], prior_deltas)
    # ---- the rows among themselves
    deltas = beta * (value - recalled[:, :, 0])
    among = scores[..., num_prior:]  # [p, heads, 2, r, r]
    if num_rows > 1:
        system = beta * among[:, :, 0].tril(-1)
        deltas = torch.linalg.solve_triangular(system, deltas, upper=False, unitriangular=True)
    result = recalled[:, :, 1] + torch.matmul(among[:, :, 1], deltas)
    # ---- kept
    writes = batch.writes.reshape(-1)
    rows.keys.index_copy_(0, writes, key.transpose(1, 2).flatten(0, 1))
    rows.deltas.index_copy_(0, writes, deltas.transpose(1, 2).flatten(0, 1))
    rows.decays.index_copy_(0, writes, decays.flatten(0, 1))
    output.index_copy_(0, batch.rows.reshape(-1), result.transpose(1, 2).flatten(0, 1))


@jit
def _delta_rows_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913 - a kernel
    query,
    key,
    value,
    beta,
    log_decay,
    keys,
    deltas,
    decays,
    states,
    batch_rows,
    batch_writes,
    batch_prior,
    batch_parent,
    sees_prior,
    sees_own,
    batch_states,
    output,
    num_tokens,
    num_rows,
    num_slots,
    RATIO: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    PRIOR_BLOCK: tl.constexpr,
):
    """Program (i, h, j): sequence i, value head h, columns j * VALUE_BLOCK and so on.

    `num_tokens`: n; `num_rows`: r; `num_slots`: c.
    """
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    part = tl.program_id(2)
    num_heads = tl.num_programs(1)
    group = head // RATIO
    num_groups = num_heads // RATIO
    row = tl.arange(0, ROW_BLOCK)
    columns = part * VALUE_BLOCK + tl.arange(0, VALUE_BLOCK)
    in_value = columns < VALUE_DIM
    in_batch = row < num_rows
    token = tl.load(batch_rows + sequence * num_rows + row, mask=in_batch, other=num_tokens)
    is_row = token < num_tokens
    own_keys = (token * num_groups + group) * KEY_DIM  # where a row's key and query begin
    value_places = (token * num_heads + head)[:, None] * VALUE_DIM + columns[None, :]
    is_value = is_row[:, None] & in_value[None, :]
    v = tl.load(value + value_places, mask=is_value, other=0.0)
    strength = tl.load(beta + token * num_heads + head, mask=is_row, other=0.0)
    # ---- decays since the state
    own_places = (sequence * num_rows + row)[:, None] * num_rows + row[None, :]
    is_pair = in_batch[:, None] & in_batch[None, :]
    is_before = tl.load(sees_own + own_places, mask=is_pair, other=0) != 0
    is_on_path = is_before | (row[:, None] == row[None, :])
    step = tl.load(log_decay + token * num_heads + head, mask=is_row, other=0.0)
    decay = tl.sum(tl.where(is_on_path, step[None, :], 0.0), 1)  # [ROW_BLOCK]
    parent = tl.load(batch_parent + sequence * num_rows + row, mask=in_batch, other=-1)
    has_parent = parent >= 0
    parent_row = tl.load(batch_prior + sequence * num_slots + parent, mask=has_parent, other=0)
    decay += tl.load(decays + parent_row * num_heads + head, mask=has_parent, other=0.0)
    # ---- what the state says, and what the rows' keys and queries have in common
    state = tl.load(batch_states + sequence)
    state_places = (state * num_heads + head) * KEY_DIM * VALUE_DIM
    target = tl.load(batch_writes + sequence * num_rows + row, mask=in_batch, other=0)
    # One program of a row's group keeps its key; the sum is a mask of the rows' shape.
    keeps_key = is_row & (row * 0 + part + head % RATIO == 0)
    of_key = tl.zeros((ROW_BLOCK, VALUE_BLOCK), tl.float32)
    of_query = tl.zeros((ROW_BLOCK, VALUE_BLOCK), tl.float32)
    key_key = tl.zeros((ROW_BLOCK, ROW_BLOCK), tl.float32)
    query_key = tl.zeros((ROW_BLOCK, ROW_BLOCK), tl.float32)
    for first in range(0, KEY_DIM, KEY_BLOCK):
        features = first + tl.arange(0, KEY_BLOCK)
        in_key = features < KEY_DIM
        is_key = is_row[:, None] & in_key[None, :]
        k = tl.load(key + own_keys[:, None] + features[None, :], mask=is_key, other=0.0)
        q = tl.load(query + own_keys[:, None] + features[None, :], mask=is_key, other=0.0)
        s = tl.load(
            states + state_places + features[:, None] * VALUE_DIM + columns[None, :],
            mask=in_key[:, None] & in_value[None, :],
            other=0.0,
        )
        of_key = dot(k, s, of_key)
        of_query = dot(q, s, of_query)
        key_key = dot(k, tl.trans(k), key_key)
        query_key = dot(q, tl.trans(k), query_key)
        kept_places = (target * num_groups + group)[:, None] * KEY_DIM + features[None, :]
        tl.store(keys + kept_places, k, mask=keeps_key[:, None] & in_key[None, :])
    share = tl.exp(decay)[:, None]
    of_key = of_key * share
    of_query = of_query * share
    # ---- what cached rows say
    for first in range(0, num_slots, PRIOR_BLOCK):
        slot = first + tl.arange(0, PRIOR_BLOCK)
        is_slot = slot < num_slots
        cached = tl.load(batch_prior + sequence * num_slots + slot, mask=is_slot, other=0)
        seen_places = (sequence * num_rows + row)[:, None] * num_slots + slot[None, :]
        is_seen_place = in_batch[:, None] & is_slot[None, :]
        is_seen = tl.load(sees_prior + seen_places, mask=is_seen_place, other=0) != 0
        cached_decay = tl.load(decays + cached * num_heads + head, mask=is_slot, other=0.0)
        cached_deltas = tl.load(
            deltas + (cached * num_heads + head)[:, None] * VALUE_DIM + columns[None, :],
            mask=is_slot[:, None] & in_value[None, :],
            other=0.0,
        )
        span = tl.where(is_seen, decay[:, None] - cached_decay[None, :], -float("inf"))
        weight = tl.exp(span)
        by_key = tl.zeros((ROW_BLOCK, PRIOR_BLOCK), tl.float32)
        by_query = tl.zeros((ROW_BLOCK, PRIOR_BLOCK), tl.float32)
        for start in range(0, KEY_DIM, KEY_BLOCK):
            features = start + tl.arange(0, KEY_BLOCK)
            in_key = features < KEY_DIM
            is_key = is_row[:, None] & in_key[None, :]
            k = tl.load(key + own_keys[:, None] + features[None, :], mask=is_key, other=0.0)
            q = tl.load(query + own_keys[:, None] + features[None, :], mask=is_key, other=0.0)
            cached_keys = tl.load(
                keys + (cached * num_groups + group)[None, :] * KEY_DIM + features[:, None],
                mask=in_key[:, None] & is_slot[None, :],
                other=0.0,
            )  # [KEY_BLOCK, PRIOR_BLOCK]
            by_key = dot(k, cached_keys, by_key)
            by_query = dot(q, cached_keys, by_query)
        of_key = dot(by_key * weight, cached_deltas, of_key)
        of_query = dot(by_query * weight, cached_deltas, of_query)
    # ---- the rows among themselves
    span = tl.where(is_on_path, decay[:, None] - decay[None, :], -float("inf"))
    weight = tl.exp(span)
    system = tl.where(is_before, key_key * weight, 0.0) * strength[:, None]
    delta = (v - of_key) * strength[:, None]
    for number in range(1, num_rows):
        is_this = row == number
        factors = tl.sum(tl.where(is_this[:, None], system, 0.0), 0)  # [ROW_BLOCK]
        earlier = tl.sum(factors[:, None] * delta, 0)  # [VALUE_BLOCK]
        delta -= tl.where(is_this[:, None], earlier[None, :], 0.0)
    result = of_query
    by_row = query_key * weight
    for number in range(0, num_rows):
        factors = tl.sum(tl.where(row[None, :] == number, by_row, 0.0), 1)  # [ROW_BLOCK]
        this = tl.sum(tl.where(row[:, None] == number, delta, 0.0), 0)  # [VALUE_BLOCK]
        result += factors[:, None] * this[None, :]
    tl.store(output + value_places, result, mask=is_value)
    # ---- kept
    delta_places = (target * num_heads + head)[:, None] * VALUE_DIM + columns[None, :]
    tl.store(deltas + delta_places, delta, mask=is_value)
    if part == 0:
        tl.store(decays + target * num_heads + head, decay, mask=is_row)


def delta_rows(
    inputs: DeltaInputs, rows: RowContributions, states: Tensor, batch: DeltaBatch, output: Tensor
) -> None:
    """Compute a batch's rows and keep what they contribute.

    `states`: float32 [any, num_value_heads, key_dim, value_dim]; `output`: float32
    [n + 1, num_value_heads, value_dim], of which the batch's rows are written (the last is waste).
    No row of `rows` is both read and written by one batch.
    """
    if not uses_triton(states):
        delta_rows_reference(inputs, rows, states, batch, output)
        return
    num_sequences, num_rows = batch.rows.shape
    _, num_heads, key_dim, value_dim = states.shape
    value_block = min(_VALUE_BLOCK, max(next_power_of_2(value_dim), _LEAST_ROWS))
    row_block = max(next_power_of_2(num_rows), _LEAST_ROWS)
    launch(
        _delta_rows_kernel,
        (num_sequences, num_heads, triton.cdiv(value_dim, value_block)),
        inputs.query,
        inputs.key,
        inputs.value,
        inputs.beta,
        inputs.log_decay,
        rows.keys,
        rows.deltas,
        rows.decays,
        states,
        batch.rows,
        batch.writes,
        batch.prior,
        batch.parent,
        batch.sees_prior,
        batch.sees_own,
        batch.states,
        output,
        len(inputs.key),
        num_rows,
        batch.prior.shape[1],
        num_warps=4 if row_block < _MANY_ROWS else 8,
        num_stages=1,
        RATIO=num_heads // inputs.key.shape[1],
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        KEY_BLOCK=_KEY_BLOCK,
        VALUE_BLOCK=value_block,
        ROW_BLOCK=row_block,
        PRIOR_BLOCK=_PRIOR_BLOCK,
    )
