"""The instruction sets that the compiled kernels are tested with, as far as the processor goes."""

import platform

import pytest

from outrider.kernels.cpu.product_library import InstructionSet, product_support

_SUPPORT = product_support()
_IS_ARM = platform.machine().lower() in ("aarch64", "arm64")

each_instruction_set = pytest.mark.parametrize(
    "instruction_set",
    [
        pytest.param(
            each,
            id=each.name,
            marks=pytest.mark.skipif(
                _SUPPORT.library is None or each not in _SUPPORT.library.instruction_sets,
                reason=f"this processor has no {each.name}",
            ),
        )
        for each in InstructionSet
        if each and (each >= InstructionSet.NEON) is _IS_ARM
    ],
)
