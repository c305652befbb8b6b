"""llama.cpp's server as the small tier, end to end: the example, with the bundled pair as GGUF.

Needs the wheels `xllamacpp` and `gguf`.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from outrider.gateway.settings.sections import bundled_pair

ROOT = Path(__file__).parents[3]
RUN = ROOT / "examples" / "device_and_cloud" / "run.py"

pytest.importorskip("xllamacpp", reason="pip install xllamacpp: llama.cpp's server is not here")
pytest.importorskip("gguf", reason="pip install gguf: the pair cannot be written as GGUF")


@pytest.mark.slow
def test_the_example_of_a_device_and_a_cloud(tmp_path: Path) -> None:
    writer, model = Path(__file__).with_name("write_gguf.py"), tmp_path / "small.gguf"
    subprocess.run([sys.executable, writer, bundled_pair() / "small", model], check=True)
    done = subprocess.run(
        [sys.executable, RUN, model],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = [line.strip() for line in done.stdout.splitlines() if not line.startswith(" ")]
    tiers = {line[:18].strip(): line[19:].split() for line in said}
    assert tiers["easy"] == ["device", "Answer:", "85."]
    assert tiers["hard"][0] == "cloud"
    assert tiers["private"][0] == "device"
    assert tiers["cut in mid-answer"][0] == "-"
    assert "broke off: upstream_reset" in done.stdout
    assert tiers["asked again"][0] == "device"
