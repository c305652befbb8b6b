"""transformers on a GGUF file, in an environment of its own: generate(), eager attention.

Run by benchmarks/peers/gguf/servers.py with that environment's interpreter, so it imports nothing
of this repository. Jobs come as JSON lines on standard input, results leave as JSON lines on
standard output; what libraries print goes to standard error.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList


class _Arrivals(StoppingCriteria):
    """Never stops; notes when a token was there."""

    def __init__(self) -> None:
        self.noted_s: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.noted_s.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class Model:
    """The file's weights, decoded to `dtype` when they are loaded."""

    def __init__(self, *, target: str, dtype: str, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        file = Path(target)
        # What `generate` is comes by a mixin that the types do not show.
        model: Any = AutoModelForCausalLM.from_pretrained(
            str(file.parent),
            gguf_file=file.name,
            dtype=getattr(torch, dtype),
            attn_implementation="eager",
        )
        self._model = model.eval()

    @torch.inference_mode()
    def answer(self, job: dict[str, Any]) -> dict[str, Any]:
        """Answer `token_ids`, greedily at temperature 0."""
        options: dict[str, Any] = {"do_sample": bool(job["temperature"])}
        if job["temperature"]:
            torch.manual_seed(7)
            options |= {"temperature": job["temperature"], "top_k": 0, "top_p": 1.0}
        arrivals = _Arrivals()
        started_s = time.perf_counter()
        input_ids = torch.tensor([job["token_ids"]])
        answer = self._model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=job["max_tokens"],
            eos_token_id=job["stop"] or None,
            pad_token_id=job["stop"][0] if job["stop"] else 0,
            stopping_criteria=StoppingCriteriaList([arrivals]),
            **options,
        )
        return {
            "token_ids": answer[0, input_ids.shape[1] :].tolist(),
            "wall_s": time.perf_counter() - started_s,
            "decode_s": arrivals.noted_s[-1] - arrivals.noted_s[0],
        }


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    found = {name: version(name) for name in ("transformers", "torch")}
    return found | {"instructions": torch.backends.cpu.get_cpu_capability()}


def main() -> None:
    """Serve with the options as JSON."""
    results = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    model = Model(**json.loads(sys.argv[1]))
    print(json.dumps(_versions()), file=results, flush=True)
    for line in sys.stdin:
        try:
            answer = model.answer(json.loads(line))
        except Exception as error:  # noqa: BLE001 - the other side raises it
            answer = {"error": repr(error)}
        print(json.dumps(answer), file=results, flush=True)


if __name__ == "__main__":
    main()
