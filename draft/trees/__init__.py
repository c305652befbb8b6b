"""Trees of guesses: their nodes, their growth on the host, their batches.

A tree's growth is implemented four times. The first is the reference: a change begins there, and
the tests tell whether the others follow.

| implementation | when it runs | the test that holds it to the reference |
|---|---|---|
| draft/trees/growing_tree.py | on the host, library not built | is the reference |
| kernels/cpu/tree.cpp | on the host, library built | tests/draft/trees/test_compiled_tree.py |
| kernels/trees/expand_tree.py | on a device, by torch | tests/kernels/trees/test_expand_tree.py |
| kernels/trees/expand_tree.py | on CUDA, by Triton | tests/kernels/trees/test_expand_tree.py |

tests/draft/device/test_device_growth.py compares whole trees of host and device.
"""
