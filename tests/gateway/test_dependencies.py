"""Check that pyproject.toml declares what the product imports."""

import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).parents[2]
OWN = ("draft", "engine", "gateway", "kernels", "router", "verifier")
IMPORT = re.compile(r"^ *(?:from (\w+)[\w.]* import |import (\w+)[\w.]*(?: as \w+)?$)", re.M)
TYPES_ALONE = {"", "_typeshed"}
# Of these a machine may lack the distribution; elsewhere the name of the package says it.
NAMES = {
    "azure": "azure-identity",
    "google": "google-auth",
    "ray": "ray",
    "helm": "helm-python-sdk",
}


def imported() -> set[str]:
    """Return the top-level names of all import statements of the product, lazy ones too."""
    files = (path for folder in OWN for path in (ROOT / folder).rglob("*.py"))
    return {name for path in files for pair in IMPORT.findall(path.read_text()) for name in pair}


def declared() -> set[str]:
    """Return the names of all requirements, those of extras too."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    words = (re.split(r"[^A-Za-z0-9_.-]", line, maxsplit=1)[0] for lines in lists for line in lines)
    return {word.lower().replace("_", "-") for word in words}


def test_every_import_is_of_a_declared_distribution() -> None:
    foreign = imported() - set(sys.stdlib_module_names) - TYPES_ALONE - {"outrider"}
    known, providers = declared(), packages_distributions()
    for name in sorted(foreign):
        names = providers.get(name, [NAMES.get(name, name)])
        assert known & {one.lower().replace("_", "-") for one in names}, f"{name} is not declared"
