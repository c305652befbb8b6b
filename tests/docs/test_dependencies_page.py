"""docs/dependencies.md has a row for each declared package, and for no other."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| ([\w.-]+) \| ([a-z, -]+) \| ([^|]+) \| ([^|]+) \|$", re.M)
OWN = re.compile(r"\(`((?:gateway|engine|kernels)/[\w/.]+)`\)")


def declared() -> dict[str, set[str]]:
    """Return the lists of pyproject.toml that name each package; the product itself is none."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found: dict[str, set[str]] = {}
    for name, lines in {
        "base": project["dependencies"],
        **project["optional-dependencies"],
    }.items():
        for line in lines:
            found.setdefault(re.split(r"[^\w.-]", line)[0], set()).add(name)
    found.pop("outrider")
    return found


def test_the_page_lists_what_is_declared() -> None:
    page = (ROOT / "docs/dependencies.md").read_text()
    rows = {
        name: set(extras.split(", ")) for name, extras, *_ in ROW.findall(page) if name != "package"
    }
    assert rows == declared()


def test_what_is_our_own_is_there() -> None:
    places = OWN.findall((ROOT / "docs/dependencies.md").read_text())
    assert len(places) >= 5
    assert all((ROOT / place).exists() for place in places)
