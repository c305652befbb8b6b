"""lm-evaluation-harness scores answers by /v1/completions as transformers does."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from outrider.gateway.settings.tree import bundled_pair
from tests.gateway.clients.conftest import Run
from tests.gateway.clients.report import Report

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]

LM_EVAL: Final = "0.4.13"
LARGE: Final = bundled_pair() / "large"


def test_loglikelihoods_are_those_of_transformers(
    pair_url: str, pip: Callable[[str], Path], programs: Path, run: Run, report: Report
) -> None:
    python = pip(f"lm-eval=={LM_EVAL} aiohttp tenacity") / "python"
    ran = run(python, programs / "use_lm_eval.py", env={"OUTRIDER_URL": pair_url})
    assert ran.status == 0, ran.text
    scores = ran.last_json["scores"]
    assert len(scores) == 16
    model = AutoModelForCausalLM.from_pretrained(LARGE, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(LARGE)
    for score in scores:
        expected = loglikelihood(model, tokenizer, score["context"], score["choice"])
        assert (pytest.approx(expected[0], abs=1e-3), expected[1]) == (
            score["loglikelihood"],
            score["is_greedy"],
        )
    report.add("lm-eval", LM_EVAL, "log-likelihoods of choices, equal to transformers'")


def loglikelihood(model: Any, tokenizer: Any, context: str, choice: str) -> tuple[float, bool]:
    """Return the sum over the choice's tokens, and whether each was the likeliest."""
    whole = tokenizer.encode(context + choice, add_special_tokens=False)
    start = len(tokenizer.encode(context, add_special_tokens=False))
    with torch.no_grad():
        logprobs = model(torch.tensor([whole])).logits[0].log_softmax(-1)
    rows = logprobs[start - 1 : -1]
    target = torch.tensor(whole[start:])
    total = rows.gather(1, target[:, None]).sum().item()
    return total, bool((rows.argmax(-1) == target).all())
