"""Answers one prompt with the bundled pair, in this process and on its own library or another.

    python answer.py LIBRARY PROMPT [NUMERICS [SCHEME]]

LIBRARY is a compiled library's path, or empty for the product's own. Prints JSON: `detail`, what
runs the products, `numerics`, the large model's fingerprint, and `tokens`, by way of answering.
"""

import json
import sys
from pathlib import Path

from transformers import AutoTokenizer

from outrider.engine.events import Failed, TokensEmitted
from outrider.engine.request import EngineRequest, SpeculationParams
from outrider.gateway.settings.sections import bundled_pair
from outrider.gateway.settings.tree import load_settings
from outrider.gateway.wiring import engine as wiring
from outrider.kernels.cpu import product_library
from outrider.verifier.params import SamplingParams

# Each way of answering: temperature, and whether the small model drafts.
WAYS = {"greedy": (0.0, True), "plain": (0.0, False), "sampled": (0.8, True)}


def main(library: str, prompt: str, numerics: str = "auto", scheme: str = "") -> None:
    """Answer in all ways at once."""
    if library:
        product_library.library_path = lambda _folder: Path(library)
    pair = bundled_pair()
    flags = {"models.large": str(pair / "large"), "models.small": str(pair / "small")}
    flags |= {"engine.num_threads": 1, "engine.numerics": numerics}
    flags |= {"models.quantize": scheme} if scheme else {}
    settings = load_settings(flags=flags, environ={}, config_file=None)
    runners = wiring.load_runners(settings, lambda *_: None)
    engine = wiring.join(settings, runners, None, grammars={})
    tokenizer = AutoTokenizer.from_pretrained(pair / "large")
    messages = [{"role": "user", "content": prompt}]
    token_ids = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    for way, (temperature, is_drafted) in WAYS.items():
        sampling = SamplingParams(
            max_tokens=48,
            temperature=temperature,
            seed=3,
            stop_token_ids=(tokenizer.eos_token_id,),
        )
        request = EngineRequest(
            request_id=way,
            memory_group=way,  # or the first answer would draft the others
            prompt_token_ids=tuple(token_ids),
            tier="large",
            speculation=SpeculationParams(enabled=is_drafted),
            sampling=sampling,
        )
        engine.submit(request)
    tokens: dict[str, list[int]] = {way: [] for way in WAYS}
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, TokensEmitted):
                tokens[event.request_id] += event.token_ids
            if isinstance(event, Failed):
                raise SystemExit(event.message)
    detail = product_library.product_support().detail
    found = {"detail": detail, "numerics": runners["large"].numerics, "tokens": tokens}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
