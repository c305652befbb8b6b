"""The compiled part of Outrider; all else is in pyproject.toml.

Plain C functions, loaded with ctypes: neither Python's headers nor torch's are needed. Without a
C++ compiler, or with one that cannot build them, installing goes on without them, torch's own
products are used, and `outrider doctor` says so. To build them in place after a change:
python setup.py build_ext --inplace
"""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setuptools import Extension, find_namespace_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

# The flags of instruction sets, by the ends of the names of files (instruction_sets.h).
AVX2 = ("-mavx2", "-mfma", "-mf16c")
VNNI = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni")
# GCC would load all weights of a step first, and keep sums in memory for that.
NEON = ("-fno-schedule-insns",)
FLAGS = {
    "_avx2": AVX2,
    "_vnni_vex": (*AVX2, "-mavxvnni"),
    "_vnni_evex": (*AVX2, *VNNI),
    "_avx512": (*AVX2, *VNNI, "-mavx512bf16"),
    "_neon": NEON,
    "_neon_dot": (*NEON, "-march=armv8.2-a+dotprod"),
    "_neon_bf16": (*NEON, "-march=armv8.2-a+dotprod+bf16"),
}


class BuildSideBySide(build_ext):
    """Compiles the files of an extension on all processors, each with its set's flags."""

    def build_extensions(self) -> None:
        """Build all, with a compiler that is given one file at a time."""
        compile_files = self.compiler.compile
        own_flags = {name: flags for name, flags in FLAGS.items() if self._knows(flags)}

        def compile_one(source: str, options: dict[str, Any]) -> list[str]:
            stem = Path(source).stem
            own = (flags for name, flags in own_flags.items() if stem.endswith(name))
            flags = [*options.pop("extra_postargs"), *next(own, ())]
            return compile_files([source], extra_postargs=flags, **options)

        def compile_side_by_side(sources: list[str], **options: Any) -> list[str]:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                made = pool.map(lambda source: compile_one(source, dict(options)), sources)
                return [file for files in made for file in files]

        self.compiler.compile = compile_side_by_side
        super().build_extensions()

    def _knows(self, flags: tuple[str, ...]) -> bool:
        """True if the compiler takes flags: an old one does not, nor one for other processors."""
        probe = Path(self.build_temp) / "probe.cpp"
        probe.parent.mkdir(parents=True, exist_ok=True)
        probe.write_text("// Nothing.\n", encoding="utf-8")
        try:
            self.compiler.compile(
                [str(probe)], output_dir=self.build_temp, extra_postargs=list(flags)
            )
        except CompileError:
            return False
        return True


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
            sources=sorted(map(str, Path("kernels/cpu").glob("*.cpp"))),
            depends=sorted(map(str, Path("kernels/cpu").glob("*.h"))),
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
