"""An EAGLE-3 head for a grown large model, from one that was trained for the model it grew from.

Growth changes nothing that the large model computes: each hidden state is the old one times s, with
zeros behind it (draft/training/expand.py). So a head that reads it through fc, with its columns
moved and divided by s, guesses what it guessed before, to the last bits. It keeps the old width,
and so needs a table of tokens of its own.
"""

import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from outrider.draft.training.expand import spread
from outrider.draft.training.expand_shape import Shape
from outrider.draft.training.head_files import default_taps
from outrider.engine.model.fingerprint import checkpoint_fingerprint
from outrider.engine.model.weights import CheckpointReader


def grow_head(head: Path, source: Path, target: Path, out: Path) -> None:
    """Write to `out` what `head`, made for `source`, is for `target`, which grew from it.

    Raises ValueError for a head that reads what the last norm gives, which growth rescales.
    """
    config = json.loads((head / "config.json").read_text(encoding="utf-8"))
    old, new = (
        Shape.of(json.loads((each / "config.json").read_text())) for each in (source, target)
    )
    taps = config.get("eagle_aux_hidden_state_layer_ids") or default_taps("eagle3", old.num_layers)
    if max(taps) >= old.num_layers:
        raise ValueError(f"{head.name} reads behind the last norm (hidden states {taps})")
    places = spread(old.num_layers, new.num_layers)
    tensors = load_file(head / "model.safetensors")
    tensors["fc.weight"] = _grown_fc(tensors["fc.weight"], old.hidden_size, new.hidden_size)
    tensors.setdefault("embed_tokens.weight", _table(source, tensors["fc.weight"].dtype))
    config.pop("eagle_config", None)
    config |= {
        "eagle_aux_hidden_state_layer_ids": [places.index(tap) for tap in taps],
        "target_fingerprint": checkpoint_fingerprint(target),
        "target_hidden_size": new.hidden_size,
    }
    out.mkdir(parents=True)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    # Last: a folder with it is complete.
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _grown_fc(weight: torch.Tensor, old_width: int, new_width: int) -> torch.Tensor:
    """Return fc [hidden, taps * old_width] for hidden states of `new_width` numbers."""
    pieces = weight.float().view(len(weight), -1, old_width)
    grown = torch.zeros(len(weight), pieces.shape[1], new_width)
    grown[..., :old_width] = pieces / math.sqrt(new_width / old_width)
    return grown.flatten(1).to(weight.dtype)


def _table(folder: Path, dtype: torch.dtype) -> torch.Tensor:
    """Return the table of tokens of a checkpoint."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    shape = (config["vocab_size"], config["hidden_size"])
    with CheckpointReader(folder, dtype=dtype) as reader:
        return reader.read("model.embed_tokens.weight", shape)
