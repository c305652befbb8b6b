"""Device rows of a pass without the padding among them, and with it."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Padding:
    """Device rows of which some are padding."""

    real: list[int]
    """The rows that are no padding; others may stand behind them."""
    total_rows: int
    """Real rows and padding."""

    def left_out(self, rows: Tensor) -> Tensor:
        """Return the real device rows and the rows behind them."""
        return rows.index_select(0, self._places(len(rows) - self.total_rows, rows.device))

    def put_in(self, rows: Tensor) -> Tensor:
        """Return the device rows at their places, zeros where there is padding; then the others."""
        num_behind = len(rows) - len(self.real)
        wide = rows.new_zeros((self.total_rows + num_behind, rows.shape[1]))
        return wide.index_copy_(0, self._places(num_behind, rows.device), rows)

    def _places(self, num_behind: int, device: torch.device) -> Tensor:
        places = [*self.real, *range(self.total_rows, self.total_rows + num_behind)]
        return torch.tensor(places, dtype=torch.int64, device=device)
