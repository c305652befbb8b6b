"""The sequence and the forest that are judged, as far as the acceptance rule looks at them."""

from typing import Protocol

from torch import Tensor

from outrider.kernels.sampling.sampling_rows import SamplingTable
from outrider.verifier.logit_rules import LogitRule
from outrider.verifier.noise import SequenceNoise
from outrider.verifier.params import CascadeParams, SamplingParams


class JudgedSequence(Protocol):
    """The text of one request so far, and what decides its next token."""

    token_ids: list[int]
    """Prompt and answer."""
    rules: list[LogitRule]
    """Change the logits before a token is chosen."""
    noise: SequenceNoise
    failure: Exception | None
    """What broke while its rules were followed. Set here; nothing of the sequence is emitted
    then."""

    @property
    def request_id(self) -> str:
        """The request's id, for log lines."""

    @property
    def sampling(self) -> SamplingParams:
        """The parameters by which a token is chosen from the target's distribution."""

    @property
    def cascade(self) -> CascadeParams | None:
        """The distribution that stands in the target's place; None: the target's own."""


class JudgedForest(Protocol):
    """The trees of a step, one a sequence, laid out flat on the device; padding at the end.

    `outrider.engine.trees.forest.Forest` gives the shapes.
    """

    @property
    def sampling(self) -> SamplingTable:
        """The sampling of each sequence, by tree and depth."""

    @property
    def token_ids(self) -> Tensor:
        """The nodes' tokens, int64 [num_rows]."""

    @property
    def parent_index(self) -> Tensor:
        """The nodes' parents as flat rows, -1 for roots and padding."""

    @property
    def depth(self) -> Tensor:
        """The nodes' distances from their roots."""

    @property
    def tree_index(self) -> Tensor:
        """The nodes' trees, -1 for padding."""

    @property
    def num_trees(self) -> int:
        """Count how many sequences have a tree here."""

    @property
    def max_depth(self) -> int:
        """The depth that no node exceeds."""
