"""A newer torch than the one that Outrider was tested with."""

import pytest

from outrider.gateway.tools.commands.doctor import tested_versions
from outrider.gateway.tools.commands.doctor.tested_versions import check_version


@pytest.mark.parametrize(
    ("found", "status"),
    [("2.13.0+cpu", "ok"), ("2.11.0", "ok"), ("2.10.1", "warning"), ("2.14.0", "warning")],
)
def test_versions_outside_the_declared_range_are_named(
    found: str, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    declared = ["numpy>=2", 'torch<2.14,>=2.11; extra == "engine"']
    monkeypatch.setattr(tested_versions, "version", lambda _: found)
    monkeypatch.setattr(tested_versions, "requires", lambda _: declared)
    finding = check_version("torch", ", built for CPU")
    assert finding.status == status
    assert finding.detail.startswith(f"{found}, built for CPU")
    assert ("tested with <2.14,>=2.11" in finding.detail) == (status == "warning")


def test_outrider_declares_what_it_was_tested_with() -> None:
    for package in ("torch", "transformers"):
        found = check_version(package)
        assert (found.name, found.status) == (package, "ok")
