"""Check that torch and transformers are of versions with which Outrider was tested."""

from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

from outrider.gateway.tools.commands.doctor.findings import Finding


def check_version(package: str, note: str = "") -> Finding:
    """Compare an installed package with the range that Outrider declares. `note`: its build."""
    found, wanted = version(package), _declared(package)
    detail = f"{found}{note}"
    if wanted is None or wanted.specifier.contains(found, prereleases=True):
        return Finding(name=package, status="ok", detail=detail)
    return Finding(
        name=package,
        status="warning",
        detail=f"{detail}, but Outrider was tested with {wanted.specifier}",
        advice=f'If something fails, run `pip install "{package}{wanted.specifier}"`.',
    )


def _declared(package: str) -> Requirement | None:
    """Return Outrider's own requirement; None for a checkout that is not installed."""
    try:
        lines = requires("outrider") or ()
    except PackageNotFoundError:
        return None
    return next((one for one in map(Requirement, lines) if one.name == package), None)
