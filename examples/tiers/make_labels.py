"""Writes labels of three tiers, as a file of yours would have them: one column a model.

The questions are sums. Here dice decide whether a model is right: the small one up to two digits,
the large one up to four, the cloud's nearly always.
"""

import csv
import random
import sys
from pathlib import Path

KNOWN_DIGITS = {"small": 2, "large": 4, "cloud": 6}


def write_labels(path: Path, num_rows: int = 400, seed: int = 0) -> None:
    """Write a CSV file with the columns prompt, small, large and cloud."""
    rng = random.Random(seed)
    with path.open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["prompt", *KNOWN_DIGITS])
        for _ in range(num_rows):
            digits = rng.randint(1, 6)
            left, right = (rng.randrange(10 ** (digits - 1), 10**digits) for _ in range(2))
            is_right = [
                int(rng.random() < (0.96 if digits <= known else 0.1))
                for known in KNOWN_DIGITS.values()
            ]
            rows.writerow([f"What is {left} + {right}?", *is_right])


if __name__ == "__main__":
    write_labels(Path(sys.argv[1]))
