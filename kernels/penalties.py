"""Changes to single logits: penalties, biases and bans, for rows of many sequences at once."""

from torch import Tensor


def apply_penalties(
    logits: Tensor,
    cells: Tensor,
    shifts: Tensor,
    factors: Tensor | None = None,
    *,
    num_overrides: int = 0,
) -> None:
    """Change logits in place at `cells`: scale by the repetition factor, then add the shift.

    logits: float32 [num_rows, vocab_size], contiguous. cells: int64 [num_cells], counted row by row
    (row * vocab_size + token id). shifts: float32 [num_cells], -inf bans a token. factors: float32
    [num_cells], positive; a logit above 0 is divided by it, one below 0 multiplied (Keskar et al.,
    "CTRL", 2019, as transformers and vLLM do); None: 1 everywhere.

    The last `num_overrides` cells hold instead of earlier ones that are the same; but for that,
    cells differ. What a cell gets does not depend on the other cells of the call.
    """
    flat = logits.view(-1)
    values = flat.index_select(0, cells)
    if factors is not None:
        # torch.where takes five times as long; exact, since one of the two terms is always 0.
        values = values.clamp(min=0).div_(factors).add_(values.clamp_(max=0).mul_(factors))
    values.add_(shifts)
    num_first = len(cells) - num_overrides
    flat.scatter_(0, cells[:num_first], values[:num_first])
    flat.scatter_(0, cells[num_first:], values[num_first:])
