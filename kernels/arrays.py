"""Types of NumPy arrays of whole numbers, of which the host's plans are made."""

import numpy as np
from numpy.typing import NDArray

Ints32 = NDArray[np.int32]
Ints64 = NDArray[np.int64]
