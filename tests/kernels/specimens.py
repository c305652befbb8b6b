"""Launches that are compiled ahead of time: each kernel with the shapes that serving gives it.

Loaded by tests/kernels/ahead_of_time.py only. Nothing is computed: what a launcher launches is
recorded, so memory is reserved and never touched, and contents mean nothing. A kernel is compiled
anew for other types, constants, and alignments of pointers and sizes; row counts are no constants.
"""

from tests.kernels.specimen import Specimen
from tests.kernels.specimens_of_attention import ATTENTION
from tests.kernels.specimens_of_layers import LAYERS
from tests.kernels.specimens_of_passes import AROUND_LAYERS
from tests.kernels.specimens_of_states import STATES

SPECIMENS: tuple[Specimen, ...] = (*LAYERS, *ATTENTION, *AROUND_LAYERS, *STATES)
