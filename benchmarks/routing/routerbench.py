"""RouterBench's zero-shot labels as a router reads them: one column a model, and what it cost.

The files are those under `datasets/routerbench_zs` of github.com/shuhao02/RouterDC (commit
0e63989), RouterBench's rows (Hu et al., 2024) parted into train and test. They are read from
$OUTRIDER_DATA/routerbench_zs. Rows without a label of each model are left out, and so are the
solved examples before a question, which are the same for all.
"""

import ast
import csv
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

SETS: Final = ("arc_challenge", "mbpp", "winograde")
PARTS: Final = ("train", "test")
FOLDER: Final = "routerbench_zs"


def write_labels(folder: Path, part: str, models: Sequence[str], out: Path) -> Path:
    """Write the rows of all sets as JSON lines; `part` is train or test.

    Raises SystemExit where a file is absent.
    """
    rows = (row for name in SETS for row in _rows(folder / FOLDER / f"{name}_{part}.csv", models))
    out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return out


def _rows(path: Path, models: Sequence[str]) -> Iterator[dict[str, str | float]]:
    if not path.is_file():
        raise SystemExit(f"{FOLDER}/{path.name} is not under $OUTRIDER_DATA.")
    csv.field_size_limit(sys.maxsize)
    columns = [column for model in models for column in (model, f"{model}|total_cost")]
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if all(row[column] for column in columns):
                question = ast.literal_eval(row["prompt"])[0].split("\n\n")[-1]
                yield {"prompt": question} | {column: float(row[column]) for column in columns}
