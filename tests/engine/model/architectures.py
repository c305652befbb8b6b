"""Survey of the causal architectures of the installed transformers: docs/models.md's table.

`python -m tests.engine.model.architectures` builds each one tiny and at random, compares its logits
with transformers' own, and writes the table; a minute.
"""

import tempfile
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, get_args

import torch
import transformers
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from outrider.engine.errors import UnsupportedModelError
from outrider.engine.model.families import text_parts
from outrider.engine.model.load import load_model
from outrider.engine.model.protocol import CausalModel
from outrider.engine.model.read_config import read_model_config
from outrider.engine.model.transformers_config import quiet_transformers
from tests.engine.model.decoder_passes import (
    NUM_TOKENS,
    Rows,
    make_table,
    make_tokens,
    new_cache,
    run,
)
from tests.multimodal_models import make_multimodal_model
from tests.transformers_models import make_transformers_model, tiny_config

Outcome = Literal["native", "through transformers", "refused"]

PAGE: Final = Path(__file__).parents[3] / "docs" / "models.md"
_BEGIN: Final = "<!-- made by python -m tests.engine.model.architectures -->\n"
_END: Final = "<!-- end -->\n"
# A model with more is not built, only described.
_MAX_PARAMETERS: Final = 20_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Surveyed:
    """The result for one architecture. `reason`: why it is refused."""

    model_type: str
    architecture: str
    outcome: Outcome
    reason: str = ""


def largest_difference(model: CausalModel, reference: PreTrainedModel) -> float:
    """Return the difference of a chunked prompt's logits from transformers', relative to size."""
    token_ids, cache, table = make_tokens(NUM_TOKENS), new_cache(model), make_table(1)
    outputs, done = [], 0
    for count in (13, 1, 7, 20):
        piece = Rows(token_ids=token_ids[done : done + count], num_computed=done, block_table=table)
        outputs.append(run(model, cache, piece).logits)
        done += count
    with torch.inference_mode():
        theirs = reference(token_ids[None]).logits[0].float()
    difference = (torch.cat(outputs) - theirs).abs().max()
    return float(difference / theirs.std().clamp(min=1.0))


def survey(model_type: str) -> Surveyed:
    """Describe, load and compare a tiny model of this type."""
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    with quiet_transformers(), tempfile.TemporaryDirectory() as folder:
        try:
            outcome, reason = _outcome(model_type, architecture, Path(folder))
        except UnsupportedModelError as error:
            outcome, reason = "refused", _short(str(error))
    return Surveyed(
        model_type=model_type, architecture=architecture, outcome=outcome, reason=reason
    )


def _outcome(model_type: str, architecture: str, folder: Path) -> tuple[Outcome, str]:
    if architecture in (*text_parts.ARCHITECTURES, *text_parts.THROUGH_TRANSFORMERS):
        reference = make_multimodal_model(model_type)
    else:
        config = tiny_config(model_type)
        config.save_pretrained(folder)
        read_model_config(folder)  # refuses before anything is built
        with torch.device("meta"):
            size = AutoModelForCausalLM.from_config(config).num_parameters()
        assert size < _MAX_PARAMETERS, f"{model_type} has {size} parameters even when tiny"
        reference = make_transformers_model(model_type)
    reference.save_pretrained(folder)
    is_native = read_model_config(folder).is_native
    difference = largest_difference(load_model(str(folder)), reference)
    assert difference < 1e-4, f"{model_type}: logits differ by {difference}"
    return "native" if is_native else "through transformers", ""


def _short(message: str) -> str:
    """A refusal without the folder, the architecture and the words of an exception."""
    if "shapes alone (" in message or "engine's (" in message:
        message = message.rpartition(" (")[0] + "."
    for mark in ("which the engine cannot run: ", "config.json: "):
        if mark in message:
            return message.split(mark, 1)[1]
    return message.split(": ", 1)[-1]


# ---- the table ----------------------------------------------------------------------------------


def table(found: Iterable[Surveyed]) -> str:
    """The section of docs/models.md, in Markdown."""
    every = list(found)
    counts = [sum(each.outcome == outcome for each in every) for outcome in get_args(Outcome)]
    native, through, _ = (_names(every, outcome) for outcome in get_args(Outcome))
    reasons: dict[str, list[Surveyed]] = defaultdict(list)
    for each in every:
        if each.outcome == "refused":
            reasons[each.reason].append(each)
    refused = sorted(reasons.items(), key=lambda item: (-len(item[1]), item[0]))
    lines = [
        f"Of the {len(every)} model types with a causal language model in transformers "
        f"{transformers.__version__}, {counts[0]} run natively, {counts[1]} through transformers, "
        f"and {counts[2]} are refused.",
        "",
        "| runs | architectures |",
        "|---|---|",
        f"| natively | {native} |",
        f"| through transformers | {through} |",
        "",
        "| refused, because | architectures |",
        "|---|---|",
        *(f"| {reason} | {_names(several, 'refused')} |" for reason, several in refused),
    ]
    return "\n".join(lines) + "\n"


def written_table() -> str:
    """The section as docs/models.md has it."""
    return PAGE.read_text(encoding="utf-8").split(_BEGIN, 1)[1].split(_END, 1)[0]


def _names(every: Iterable[Surveyed], outcome: Outcome) -> str:
    names = {each.architecture for each in every if each.outcome == outcome}
    return ", ".join(f"`{name}`" for name in sorted(names))


def main() -> None:
    """Write the section anew."""
    text = PAGE.read_text(encoding="utf-8")
    names = tqdm(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), unit=" types")
    section = table(survey(name) for name in names)
    before, rest = text.split(_BEGIN, 1)
    PAGE.write_text(before + _BEGIN + section + _END + rest.split(_END, 1)[1], encoding="utf-8")


if __name__ == "__main__":
    main()
