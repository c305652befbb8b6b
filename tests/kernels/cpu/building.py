"""Building the compiled library in a copy of what setup.py needs."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.docs.markdown import ROOT


def build(folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run the build of setup.py in a folder; the library is then in its kernels/cpu.

    Objects lie in its build/temp, which is named by a whole path, as pip does.
    """
    shutil.copytree(
        ROOT / "kernels" / "cpu",
        folder / "kernels" / "cpu",
        ignore=shutil.ignore_patterns("*.so", "__pycache__"),
    )
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, folder)
    return subprocess.run(
        [
            sys.executable,
            "setup.py",
            "build_ext",
            "--inplace",
            "--build-temp",
            str(folder / "build/temp"),
        ],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
