"""Popular models without the hub: their sizes are those that their makers publish."""

import huggingface_hub.constants
import pytest
from typer.testing import CliRunner

from outrider.gateway.cli import app
from outrider.gateway.tools.measuring.plan.popular import popular_model
from outrider.gateway.tools.measuring.plan.shapes import ModelSizes


@pytest.mark.parametrize(
    ("model_id", "billions", "kv_bytes"),
    [
        ("Qwen/Qwen3-0.6B", 0.596, 2 * 28 * 8 * 128 * 2),
        ("Qwen/Qwen3-30B-A3B", 30.53, 2 * 48 * 4 * 128 * 2),
        ("meta-llama/Llama-3.1-8B-Instruct", 8.03, 2 * 32 * 8 * 128 * 2),
        ("meta-llama/Llama-3.2-1B", 1.236, 2 * 16 * 8 * 64 * 2),
        ("meta-llama/Llama-3.3-70B-Instruct", 70.55, 2 * 80 * 8 * 128 * 2),
        ("mistralai/Mistral-7B-Instruct-v0.3", 7.248, 2 * 32 * 8 * 128 * 2),
        ("google/gemma-3-27b-it", 27.01, 2 * 62 * 16 * 128 * 2),
        ("microsoft/phi-4", 14.66, 2 * 40 * 10 * 128 * 2),
        ("openai/gpt-oss-20b", 20.91, 2 * 24 * 8 * 64 * 2),
    ],
)
def test_sizes_add_up_to_what_is_published(model_id: str, billions: float, kv_bytes: int) -> None:
    config = popular_model(model_id)
    assert config is not None
    sizes = ModelSizes.of(config)
    assert sizes.num_parameters / 1e9 == pytest.approx(billions, rel=1e-3)
    assert sizes.kv_bytes_per_token == kv_bytes
    assert sizes.name == model_id.rpartition("/")[2]


@pytest.mark.slow
def test_a_plan_without_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    # The larger context is another model's.
    for model_id, code, words in (
        ("google/gemma-3-4b-it", 0, "gemma-3-4b-it: sizes from Outrider's own table"),
        ("Qwen/Qwen3-4B-Instruct-2507", 2, "HF_HUB_OFFLINE"),
    ):
        outcome = CliRunner().invoke(
            app, ["plan", "--device", "h100", "--large", model_id, "--prompt-tokens", "20"]
        )
        assert outcome.exit_code == code, outcome.output
        assert words in " ".join(outcome.output.split())
