"""Grow a trained checkpoint to any larger shape without changing what it computes.

Question: what does speculation gain at the *cost* of a large model, with the *acceptance* of a pair
that was really trained? A shipped pair is small; this script makes it as slow as one likes.

Method: `draft/training/expand.py` says what is added, and why it cannot reach the output.

How to read it: the last lines give the largest difference between the logits of the two models on
random prompts, in fp32 (should be about 1e-5 of the logits' size, or less) and in the dtype written
(differs by the order of summation: an argmax may flip where two tokens are nearly tied).

    python -m benchmarks.shared.expand --model draft/pair/large --out runs/large-400m \
        --target-parameters 400M
"""

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedModel

from outrider.draft.training.expand import expand
from outrider.draft.training.expand_files import Checkpoint
from outrider.draft.training.expand_shape import Shape, shape_for_parameters

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def max_logit_gap(
    source: Path, out: Path, *, dtype: torch.dtype, seed: int = 0, num_tokens: int = 64
) -> tuple[float, float]:
    """Largest difference of the two models' logits on random prompts, and the largest logit."""
    generator = torch.Generator().manual_seed(seed)
    models = [_load(folder, dtype) for folder in (source, out)]
    vocab_size = models[0].config.vocab_size
    prompts = torch.randint(0, vocab_size, (2, num_tokens), generator=generator)
    with torch.inference_mode():
        old, new = (model(prompts).logits.float() for model in models)  # [2, num_tokens, vocab]
    return float((old - new).abs().max()), float(old.abs().max())


def _load(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    model.eval()  # type: ignore[no-untyped-call]
    return model


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="folder of the trained model")
    parser.add_argument("--out", type=Path, required=True, help="folder to write, new or empty")
    parser.add_argument("--target-parameters", help="pick a shape of about this size, e.g. 400M")
    for name in ("hidden-size", "num-layers", "intermediate-size", "num-heads", "num-kv-heads"):
        parser.add_argument(f"--{name}", type=int, help="default: as it is, or as picked")
    parser.add_argument("--dtype", choices=sorted(_DTYPES), help="default: as it is")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-check", action="store_true", help="do not compare the logits")
    return parser.parse_args(arguments)


def main(command_line: Sequence[str] | None = None) -> None:
    """Pick the shape, expand, compare."""
    arguments = _arguments(command_line)
    dtype = _DTYPES[arguments.dtype] if arguments.dtype else None
    try:
        config = Checkpoint(arguments.model).config
        shape = Shape.of(config)
        if arguments.target_parameters:
            shape = shape_for_parameters(config, arguments.target_parameters)
        shape = shape.replaced({name: getattr(arguments, name) for name in shape.names})
        print(f"{arguments.model} -> {arguments.out}\n  {Shape.of(config)}\n  {shape}")
        track = partial(tqdm, desc="layers", unit="layer")
        expand(arguments.model, arguments.out, shape, dtype=dtype, seed=arguments.seed, track=track)
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from error
    written = Checkpoint(arguments.out).config
    print(f"  {shape.num_parameters(written) / 1e6:.1f} M parameters in {written['dtype']}")
    if not arguments.no_check:
        for name in dict.fromkeys(("float32", written["dtype"])):
            gap, largest = max_logit_gap(arguments.model, arguments.out, dtype=_DTYPES[name])
            print(f"  {name:>8}: logits differ by at most {gap:.2e} (largest logit {largest:.1f})")


if __name__ == "__main__":
    main()
