"""Files of data, which may lie in the folder that $OUTRIDER_DATA names."""

import os
from pathlib import Path
from typing import Final

DATA_VARIABLE: Final = "OUTRIDER_DATA"


def found_data(path: Path, folder: str = "") -> Path:
    """Return a path; where there is no such file, one below $OUTRIDER_DATA or its `folder`."""
    root = os.environ.get(DATA_VARIABLE)
    if root and not path.exists():
        for place in (Path(root) / path, Path(root) / folder / path):
            if place.exists():
                return place
    return path
