"""Packages that Outrider cannot share an environment with."""

from importlib.metadata import PackageNotFoundError, version

from gateway.settings.tree import SettingsError

UNINSTALL = (
    "Run `python -m pip uninstall kernels`, or install Outrider into an environment of its own."
)


def kernels_conflict() -> str | None:
    """Hugging Face's `kernels` in this environment, in a sentence; None when it is not there."""
    try:
        found = version("kernels")
    except PackageNotFoundError:
        return None
    return (
        f"The Hugging Face package kernels {found} is installed in this environment. It and "
        "Outrider's own folder kernels/ have one name, and transformers would take ours for it."
    )


def refuse_conflicts() -> None:
    """Raise SettingsError with what to do when this environment cannot work."""
    if conflict := kernels_conflict():
        raise SettingsError(f"{conflict} {UNINSTALL}")
