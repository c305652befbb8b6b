"""Two random models of real shapes that agree as often as they are told to: noisy bigram tables.

The residual stream of both models stays the token's embedding: what layers add is scaled to almost
nothing, though every weight is random, read and multiplied. So logits are a function of the last
token, a row of one table times the rows of another. The drafter's second table is turned away from
the target's by an angle, so its best guess is the target's as often as the angle says. All that
follows is real: the rule of acceptance, the noise, calibration, budget, trees, moves of keys.

Constructed is how alike the models are, and nothing is said of real texts: a speed belongs beside
the acceptance that was measured with it.

    python -m benchmarks.gpu.gpu_paired_models          which cosine gives which agreement
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.gpu.gpu_models import LOGIT_DEVIATION, RandomReader
from outrider.engine.model.config import ModelConfig
from outrider.engine.model.decoder import DecoderModel

_BESIDE_EMBEDDING = 1e-3  # of what attention and feed-forward add
_SEED = 5
_TABLE, _HEAD, _OTHER_HEAD = 1, 2, 3  # seeds of the random numbers of each


@dataclass(frozen=True, slots=True, kw_only=True)
class Bigrams:
    """Settings of a model's tables."""

    cosine: float = 1.0  # of the angle to the target's head; 1 is the target's own
    rank: int = 256  # columns that are not 0, at most the smaller model's width


class PairedReader(RandomReader):
    """`RandomReader` whose table and head are those of a bigram model."""

    def __init__(
        self, config: ModelConfig, bigrams: Bigrams, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(config, dtype=dtype, device=device)
        self._bigrams = bigrams

    def read(self, name: str, shape: Iterable[int]) -> Tensor:
        """A table, or a random tensor; a small one where it adds to the residual stream."""
        size = tuple(shape)
        if "embed_tokens" in name:
            tensor = self._widened(self._numbers(_TABLE, size[0]), size)
        elif name.startswith("lm_head"):
            tensor = self._widened(self._head(size), size)
        else:
            tensor = super().read(name, size)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                tensor *= _BESIDE_EMBEDDING
            return tensor
        self.num_parameters += tensor.numel()
        self.done_bytes += tensor.nbytes
        return tensor

    def _head(self, size: tuple[int, ...]) -> Tensor:
        """Float32 [vocab_size, rank]; a normed embedding is as long as the root of size[1]."""
        cosine = self._bigrams.cosine
        own = self._numbers(_HEAD, size[0]) * cosine
        if cosine < 1.0:
            own += self._numbers(_OTHER_HEAD, size[0]) * math.sqrt(1.0 - cosine**2)
        return own * (LOGIT_DEVIATION / math.sqrt(size[1]))

    def _numbers(self, which: int, rows: int) -> Tensor:
        """Random numbers that are the same for both models, float32 [rows, rank]."""
        generator = torch.Generator(self._device).manual_seed(_SEED + which)
        size = (rows, self._bigrams.rank)
        return torch.randn(size, generator=generator, device=self._device)

    def _widened(self, columns: Tensor, size: tuple[int, ...]) -> Tensor:
        """The columns, and zeros up to the model's width."""
        wide = torch.zeros(size, dtype=self.dtype, device=self._device)
        wide[:, : columns.shape[1]] = columns.to(self.dtype)
        return wide


def paired_model(
    config: ModelConfig, bigrams: Bigrams, *, dtype: torch.dtype, device: torch.device
) -> DecoderModel:
    """The engine's model of this shape, with two tables: a tied head would name its own token."""
    untied = replace(config, tie_word_embeddings=False)
    with torch.inference_mode():
        reader = PairedReader(untied, bigrams, dtype=dtype, device=device)
        # The reader has the interface of the checkpoints' one.
        return DecoderModel(config=untied, reader=reader, dtype=dtype, device=device)  # type: ignore[arg-type]


@torch.inference_mode()
def turn_head(head: Tensor, config: ModelConfig, bigrams: Bigrams) -> None:
    """Write another head in place, so that recorded passes go on reading it."""
    reader = PairedReader(config, bigrams, dtype=head.dtype, device=head.device)
    head.copy_(reader.read("lm_head.weight", head.shape))


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Shares of random tokens behind which the drafter names the target's best next one."""

    first: float  # as its best
    among_three: float
    belief: float  # the target's own mean probability of its best


def agreement(
    vocab_size: int, bigrams: Bigrams, *, count: int = 400, device: torch.device
) -> Agreement:
    """Compute the agreement that a cosine gives, without a model."""
    rank, cosine = bigrams.rank, bigrams.cosine
    generator = torch.Generator(device).manual_seed(_SEED)

    def numbers(rows: int) -> Tensor:
        return torch.randn((rows, rank), generator=generator, device=device)

    head, other, rows = numbers(vocab_size), numbers(vocab_size), numbers(count)
    rows *= LOGIT_DEVIATION / rows.norm(dim=1, keepdim=True)
    target = rows @ head.T
    draft = target * cosine + (rows @ other.T) * math.sqrt(1.0 - cosine**2)
    best, guesses = target.argmax(1), draft.topk(3).indices
    return Agreement(
        first=float((guesses[:, 0] == best).float().mean()),
        among_three=float((guesses == best[:, None]).any(1).float().mean()),
        belief=float(target.softmax(1).gather(1, best[:, None]).mean()),
    )


def main() -> None:
    """Print the agreement of some cosines at a small vocabulary."""
    print("cosine  first  among 3  the target's belief")
    for cosine in (0.9, 0.95, 0.97, 0.985, 0.993, 0.998):
        found = agreement(20_000, Bigrams(cosine=cosine), count=200, device=torch.device("cpu"))
        print(f"{cosine:6} {found.first:6.3f} {found.among_three:8.3f} {found.belief:8.3f}")


if __name__ == "__main__":
    main()
