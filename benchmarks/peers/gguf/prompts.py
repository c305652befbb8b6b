"""The file and the prompts of bench_gguf: which are asked, by domain and temperature."""

from collections.abc import Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, Final

from benchmarks.shared.harness import console
from benchmarks.shared.prompts import Prompt, load_prompts, make_prompt
from outrider.gateway.settings.public_models import PUBLIC_MODELS
from outrider.gateway.tools.commands.models.fetching import ModelFetchError, fetch_model
from outrider.gateway.tools.demo.real_prompts import REAL_PROMPTS

MODEL: Final = "smollm2-135m"
_MOST_PROMPT: Final = 1024
_MOST_READ: Final = 300


def model_file(given: Path | None) -> Path:
    """The file that is measured. Raises SystemExit with a sentence where there is none."""
    if given is not None:
        if not given.is_file():
            raise SystemExit(f"--gguf {given}: no such file.")
        return given
    try:
        return fetch_model(PUBLIC_MODELS[MODEL], lambda stage, _: console.print(stage))
    except ModelFetchError as error:
        raise SystemExit(f"{MODEL}: {error}") from error


def prompts_by_domain(tokenizer: Any, files: Sequence[Path]) -> dict[str, list[Prompt]]:
    """Different prompts by their category or file; the demo's ten where no file is named."""
    found = [prompt_of(tokenizer, one.prompt, one.kind) for one in REAL_PROMPTS]
    if files:
        found = [prompt for file in files for prompt in _prompts_of(tokenizer, file)]
    different = {prompt.token_ids: prompt for prompt in found}.values()
    domains: dict[str, list[Prompt]] = {}
    for prompt in different:
        domains.setdefault(prompt.kind, []).append(prompt)
    return domains


def _prompts_of(tokenizer: Any, file: Path) -> list[Prompt]:
    return load_prompts(str(file), tokenizer, num_prompts=_MOST_READ, max_tokens=_MOST_PROMPT)


def dealt(
    domains: dict[str, list[Prompt]], num_hands: int, *, per_domain: int | None, most: int
) -> list[list[Prompt]]:
    """Deal each domain's prompts, none twice; in a hand domains take turns.

    A hand has at most so many of a domain and at most `most`; the first gets what is left over.
    """
    hands = []
    for number in range(num_hands):
        own = [prompts[number::num_hands][:per_domain] for prompts in domains.values()]
        in_turn = chain.from_iterable(zip_longest(*own))
        hands.append([prompt for prompt in in_turn if prompt is not None][:most])
    return hands


def prompt_of(tokenizer: Any, text: str, kind: str) -> Prompt:
    """A question of one message."""
    return make_prompt(tokenizer, [{"role": "user", "content": text}], kind=kind)


def long_prompts(prompts: Sequence[Prompt], length: int, count: int) -> list[list[int]]:
    """Prompts of exactly `length` tokens, from the text of these; no two begin alike."""
    tokens = [token for prompt in prompts for token in prompt.token_ids]
    endless = tokens * (2 + length // len(tokens))
    # From the middle of a piece, so that none begins with the system's words.
    starts = [(2 * number + 1) * len(tokens) // (2 * count) for number in range(count)]
    return [endless[start : start + length] for start in starts]
