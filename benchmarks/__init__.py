"""One script a question. What they measure is this checkout's `outrider`, installed or not."""

import os
import sys
from pathlib import Path

_SOURCE = str(Path(__file__).resolve().parent.parent / ".ci" / "src")
if _SOURCE not in sys.path:
    sys.path.insert(0, _SOURCE)
    given = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (_SOURCE, given)))  # for children
