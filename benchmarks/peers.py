"""transformers on the same weights: plain, assisted and with prompt lookup."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

from benchmarks.compare import NextLogits
from benchmarks.driving import Prompt

# Tokens looked up at a time; SpS-style papers and the figures in ANCHORS use about this many.
LOOKUP_TOKENS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRun:
    """A finished run. `decode_s`, `num_decoded_tokens`: after each answer's first delivery."""

    wall_s: float
    outputs: list[list[int]]
    decode_s: float
    num_decoded_tokens: int

    @property
    def num_tokens(self) -> int:
        """Tokens emitted."""
        return sum(len(answer) for answer in self.outputs)

    @property
    def tokens_per_s(self) -> float:
        """Prompts included in the time."""
        return self.num_tokens / self.wall_s


class _Arrivals(StoppingCriteria):
    """Never stops; notes when a forward pass of the target was done."""

    def __init__(self) -> None:
        self.first: tuple[float, int] | None = None
        self.last: tuple[float, int] | None = None

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.last = (time.perf_counter(), input_ids.shape[1])
        self.first = self.first or self.last
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def load_peer(folder: Path, *, dtype: torch.dtype, device: str) -> Any:
    """The checkpoint as transformers runs it; `generate` comes by a mixin its types do not show."""
    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype)
    return model.to(device).eval()


@torch.inference_mode()
def generate(
    model: Any,
    prompts: Sequence[Prompt],
    *,
    max_tokens: int,
    stop: tuple[int, ...],
    **options: Any,
) -> PeerRun:
    """Greedy answers one at a time, without padding. `options` go to transformers' generate."""
    outputs = []
    decode_s, num_decoded = 0.0, 0
    started_s = time.perf_counter()
    for prompt in prompts:
        input_ids = torch.tensor([prompt.token_ids], device=model.device)
        arrivals = _Arrivals()
        answer = model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=list(stop) or None,
            pad_token_id=stop[0] if stop else 0,
            stopping_criteria=StoppingCriteriaList([arrivals]),
            **options,
        )[0, len(prompt.token_ids) :].tolist()
        outputs.append(answer)
        if arrivals.first is not None and arrivals.last is not None:
            decode_s += arrivals.last[0] - arrivals.first[0]
            num_decoded += arrivals.last[1] - arrivals.first[1]
    return PeerRun(
        wall_s=time.perf_counter() - started_s,
        outputs=outputs,
        decode_s=decode_s,
        num_decoded_tokens=num_decoded,
    )


@torch.inference_mode()
def generate_padded(
    model: Any,
    prompts: Sequence[Prompt],
    *,
    batch_size: int,
    max_tokens: int,
    stop: tuple[int, ...],
) -> PeerRun:
    """Greedy answers in batches padded on the left; a batch lasts as long as its longest answer."""
    outputs: list[list[int]] = []
    pad = stop[0] if stop else 0
    started_s = time.perf_counter()
    for start in range(0, len(prompts), batch_size):
        group = prompts[start : start + batch_size]
        width = max(len(prompt.token_ids) for prompt in group)
        missing = [width - len(prompt.token_ids) for prompt in group]
        input_ids = torch.tensor(
            [
                [pad] * gap + list(prompt.token_ids)
                for gap, prompt in zip(missing, group, strict=True)
            ],
            device=model.device,
        )
        mask = torch.tensor([[0] * gap + [1] * (width - gap) for gap in missing])
        answers = model.generate(
            input_ids,
            attention_mask=mask.to(model.device),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=list(stop) or None,
            pad_token_id=pad,
        )[:, width:].tolist()
        outputs.extend(_cut(answer, stop) for answer in answers)
    wall_s = time.perf_counter() - started_s
    return PeerRun(wall_s=wall_s, outputs=outputs, decode_s=0.0, num_decoded_tokens=0)


def _cut(answer: list[int], stop: tuple[int, ...]) -> list[int]:
    """The answer up to its first stop token, that one included."""
    for index, token_id in enumerate(answer):
        if token_id in stop:
            return answer[: index + 1]
    return answer


def peer_logits(model: Any) -> NextLogits:
    """Teacher forcing through transformers."""

    @torch.inference_mode()
    def next_logits(token_ids: Sequence[int]) -> torch.Tensor:
        logits: torch.Tensor = model(torch.tensor([token_ids], device=model.device)).logits
        return logits[0, -1].float()

    return next_logits
