"""Hidden rows of the layers that a drafter reads, kept as a pass goes by."""

import ctypes

from torch import Tensor


class Taps:
    """The rows of some taps, one behind the other in a row: [num_rows, number of taps * width].

    Tap k is the residual stream in front of layer k, so tap 0 the embedding's output; the tap whose
    number is that of all layers is what the head reads, behind the last norm.
    """

    __slots__ = ("_numbers", "_width", "layers", "rows")

    def __init__(self, layers: tuple[int, ...], *, num_rows: int, like: Tensor) -> None:
        """`layers`: the taps, each once, in the order in which they stand in a row.

        `like`: [any, width], rows of whose type and place they are.
        """
        self.layers = layers
        self._width = like.shape[-1]
        self.rows = like.new_empty((num_rows, len(layers) * self._width))
        self._numbers = (ctypes.c_int64 * len(layers))(*layers)

    @property
    def layers_address(self) -> int:
        """Return where the taps stand as int64, for the compiled library."""
        return ctypes.addressof(self._numbers)

    def note(self, layer: int, stream: Tensor) -> None:
        """Keep a copy of tap `layer`, [num_rows, width], where it is asked for."""
        if layer in self.layers:
            begin = self.layers.index(layer) * self._width
            self.rows[:, begin : begin + self._width].copy_(stream)
