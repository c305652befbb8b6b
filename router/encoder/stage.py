"""The encoder's stage of a router: what the text says and what labelled neighbours say, mixed.

The two are averaged as they are. A second classifier on top of both, as the other stages have, had
more to learn than a thousand prompts tell (docs/router.md).
"""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.router.encoder.neighbours import Neighbours
from outrider.router.encoder.sentence import EncoderId
from outrider.router.estimates import QualityEstimate
from outrider.router.features import FloatRows
from outrider.router.files import record_from


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig:
    """What `router.json` says of the stage."""

    id: EncoderId
    share: float
    """How much the neighbours' word counts beside the text's, in (0, 1]."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncoderStage:
    """What the neighbours of a prompt add to its text."""

    config: EncoderConfig
    neighbours: Neighbours

    def __post_init__(self) -> None:
        """Raise ValueError unless the parts fit one another."""
        if not 0.0 < self.config.share <= 1.0:
            raise ValueError(f"encoder: share={self.config.share} must be in (0, 1]")
        if self.neighbours.dimension != self.dimension:
            raise ValueError(
                f"encoder: dimension {self.dimension}, but the stored embeddings have "
                f"{self.neighbours.dimension} numbers"
            )

    @property
    def dimension(self) -> int:
        """The length of the embeddings that it takes."""
        return self.config.id.dimension

    @property
    def num_heads(self) -> int:
        """The number of tiers that it was labelled for."""
        return len(self.neighbours.means)

    def estimate(self, text_estimate: QualityEstimate, shares: FloatRows) -> QualityEstimate:
        """Refine the text's estimate by what the prompt's neighbours say, [num_heads]."""
        text = np.array(text_estimate.heads)
        small, *large = mixed(text, shares, self.config.share)
        return QualityEstimate(small=float(small), large=float(large[0]) if large else None)


def mixed(text: FloatRows, neighbours: FloatRows, share: float) -> FloatRows:
    """Return the mean of two words about a prompt, the second with the weight `share`."""
    return (1.0 - share) * text + share * neighbours


def stage_arrays(stage: EncoderStage) -> dict[str, NDArray[Any]]:
    """Return what `router.safetensors` holds of it, by name."""
    parts = asdict(stage.neighbours).items()
    return {f"neighbour_{name}": np.ascontiguousarray(values) for name, values in parts}


def take_stage(config: object, arrays: dict[str, NDArray[Any]]) -> EncoderStage:
    """Take the stage's arrays out of `arrays`; raises ValueError for missing and unfit ones."""
    found = record_from(EncoderConfig, config)
    parts = {name: f"neighbour_{name}" for name in Neighbours.__dataclass_fields__}
    missing = [name for name in parts.values() if name not in arrays]
    if missing:
        raise ValueError(f"the encoder {found.id.source} is named, but {missing} are missing")
    taken = {name: arrays.pop(array) for name, array in parts.items()}
    if any(array.dtype == np.uint64 for array in taken.values()):
        raise ValueError("the neighbours' arrays must be floats")
    return EncoderStage(config=found, neighbours=Neighbours(**taken))
