"""The compiled part of Outrider; all else is in pyproject.toml.

Plain C functions, loaded with ctypes: neither Python's headers nor torch's are needed. Without a
C++ compiler, or with one that cannot build them, installing goes on without them, torch's own
products are used, and `outrider doctor` says so. To build them in place after a change:
python setup.py build_ext --inplace
"""

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from setuptools import Extension, find_namespace_packages, setup
from setuptools.command.build_ext import build_ext


class BuildSideBySide(build_ext):
    """Compiles the files of an extension on all processors."""

    def build_extensions(self) -> None:
        """Build all, with a compiler that is given one file at a time."""
        compile_files = self.compiler.compile

        def compile_side_by_side(sources: list[str], **options: Any) -> list[str]:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                made = pool.map(lambda source: compile_files([source], **options), sources)
                return [file for files in made for file in files]

        self.compiler.compile = compile_side_by_side
        super().build_extensions()


PRODUCT = ("gateway", "router", "draft", "verifier", "engine", "kernels")

setup(
    packages=[
        f"outrider.{name}"
        for one in PRODUCT
        for name in find_namespace_packages(include=[one, f"{one}.*"])
    ],
    cmdclass={"build_ext": BuildSideBySide},
    # One wheel of a platform serves every Python from 3.11 on, as the extension does.
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
    ext_modules=[
        Extension(
            "outrider.kernels.cpu._products",
            sources=[
                "kernels/cpu/attention.cpp",
                "kernels/cpu/experts.cpp",
                "kernels/cpu/grouped.cpp",
                "kernels/cpu/grouped_avx2.cpp",
                "kernels/cpu/grouped_avx512.cpp",
                "kernels/cpu/layer.cpp",
                "kernels/cpu/lora.cpp",
                "kernels/cpu/pass.cpp",
                "kernels/cpu/products.cpp",
                "kernels/cpu/products_avx2.cpp",
                "kernels/cpu/products_avx512.cpp",
                "kernels/cpu/row_ops.cpp",
                "kernels/cpu/row_ops_avx2.cpp",
                "kernels/cpu/row_ops_avx512.cpp",
                "kernels/cpu/row_plan.cpp",
                "kernels/cpu/threads.cpp",
                "kernels/cpu/tree.cpp",
                "kernels/cpu/stored.cpp",
                "kernels/cpu/stored_avx2.cpp",
                "kernels/cpu/stored_avx512.cpp",
            ],
            depends=[
                "kernels/cpu/attend_tile.h",
                "kernels/cpu/calls.h",
                "kernels/cpu/experts.h",
                "kernels/cpu/grouped.h",
                "kernels/cpu/grouped_kernels.h",
                "kernels/cpu/lanes.h",
                "kernels/cpu/layer.h",
                "kernels/cpu/lora.h",
                "kernels/cpu/lora_kernels.h",
                "kernels/cpu/packing.h",
                "kernels/cpu/parallel.h",
                "kernels/cpu/pass.h",
                "kernels/cpu/products.h",
                "kernels/cpu/rounding.h",
                "kernels/cpu/row_kernels.h",
                "kernels/cpu/row_plan.h",
                "kernels/cpu/rows.h",
                "kernels/cpu/sampling_kernels.h",
                "kernels/cpu/stored.h",
                "kernels/cpu/tree.h",
            ],
            language="c++",
            # No contraction: a sum and a product fused on one processor only would change bits.
            extra_compile_args=[
                "-std=c++17",
                "-O3",
                "-ffp-contract=off",
                "-fno-exceptions",
                "-fno-rtti",
                "-fvisibility=hidden",
            ],
            optional=True,
            py_limited_api=True,  # no Python functions are called: one build serves every version
        )
    ],
)
