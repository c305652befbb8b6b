"""Sources of guesses by domain, in virtual time."""

import json
from pathlib import Path

import pytest

from benchmarks.simulate import simulate_sources


@pytest.mark.slow
def test_each_domain_is_answered_by_each_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--num-prompts", "2", "--max-new", "24", "--results", str(tmp_path)]
    simulate_sources.main(options)
    (path,) = tmp_path.glob("simulate_sources-*-avx512.json")
    domains = json.loads(path.read_text())["results"]["domains"]
    assert len(domains) >= 2
    for domain in domains.values():
        numbers = {
            side: [each["num_tokens"] for each in answers]
            for side, answers in domain["answers"].items()
        }
        assert len(numbers["plain"]) == 2
        assert all(each == numbers["plain"] for each in numbers.values()), "the text is the same"
        assert domain["ratio"]["model"]["estimate"] > 1.0
    assert "both at least" in capsys.readouterr().out
