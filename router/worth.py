"""What a prompt's answers are expected to cost: tokens, seconds and dollars of both tiers.

A router that counts prompts takes each answer of the large model for as dear as any other, so it
spends most on the longest prompts. Here a gain is weighed by what it costs: the large model is
asked where the gain for each second or dollar is highest. The answer's length comes from the
prompt's features (a ridge regression of its logarithm), the time from rates that were measured: a
part for the request, for each token of the prompt and for each of the answer.
"""

from dataclasses import dataclass
from typing import Any, Final, Literal, Self

import numpy as np
from numpy.typing import NDArray

from outrider.router.features import FloatRows, SparseVector
from outrider.router.files import record_from

CostUnit = Literal["second", "dollar"]
MAX_ANSWER_TOKENS: Final = 2.0**20


@dataclass(frozen=True, slots=True, kw_only=True)
class CostRates:
    """The cost of a tier's answers, in seconds or USD."""

    request: float
    prompt_token: float
    answer_token: float

    def __post_init__(self) -> None:
        """Raise ValueError for a rate that is no cost."""
        for name in ("request", "prompt_token", "answer_token"):
            value = getattr(self, name)
            if not (np.isfinite(value) and value >= 0.0):
                raise ValueError(f"{name}={value} is not a cost")

    def cost(self, num_prompt_tokens: float, num_answer_tokens: float) -> float:
        """Return the cost of one answer."""
        tokens = self.prompt_token * num_prompt_tokens + self.answer_token * num_answer_tokens
        return self.request + tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRates:
    """The rates of both tiers, in one unit."""

    small: CostRates
    large: CostRates


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedTokens:
    """Expected tokens of a prompt and its answers."""

    prompt: float
    small: float
    large: float

    def at_most(self, limit: int | None) -> "ExpectedTokens":
        """Return the same with answers of at most `limit` tokens."""
        if limit is None:
            return self
        return ExpectedTokens(
            prompt=self.prompt, small=min(self.small, limit), large=min(self.large, limit)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedCosts:
    """Expected costs of a request, in one unit."""

    small: float
    begun: float
    """Of an answer that the small model begins and hands over, before the large model's."""
    large: float

    @property
    def cascade(self) -> float:
        """Of an answer that the large model takes over."""
        return self.begun + self.large


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """The numbers of a `Worth` that are no array; a router's file names them."""

    unit: CostUnit
    """What gains are weighed by."""
    seconds: PairRates | None
    """None where the data told no times."""
    dollars: PairRates | None
    """None where no prices were named."""
    tokens_at_start: float
    """Tokens of a prompt beside its text: the template's."""
    tokens_per_char: float
    reference: float
    """The large model's extra cost at the cheapest prompts. There a gain counts in full, elsewhere
    by so much less as the extra cost is higher."""

    def __post_init__(self) -> None:
        """Raise ValueError if the unit's rates are missing or a number cannot be."""
        if self.rates(self.unit) is None:
            raise ValueError(f"unit {self.unit!r} has no rates")
        numbers = (self.tokens_at_start, self.tokens_per_char, self.reference)
        if not (np.isfinite(numbers).all() and min(numbers) >= 0.0 and self.reference > 0.0):
            raise ValueError(f"{numbers} cannot be tokens and a reference cost")

    def rates(self, unit: CostUnit) -> PairRates | None:
        """The rates in a unit."""
        return self.seconds if unit == "second" else self.dollars


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Worth:
    """Expected costs of prompts, and the factor by which they weigh a gain."""

    model: CostModel
    length_weight: FloatRows
    """Of the logarithms of both tiers' answer lengths, [2, num_features]."""
    length_bias: FloatRows
    """[2]."""

    def __post_init__(self) -> None:
        """Raise ValueError for arrays of other shapes or values that are not finite."""
        if self.length_bias.shape != (2,) or len(self.length_weight) != 2:
            raise ValueError(f"length_weight has shape {list(self.length_weight.shape)}")
        if not (np.isfinite(self.length_weight).all() and np.isfinite(self.length_bias).all()):
            raise ValueError("length weights hold values that are not finite")

    def check(self, num_features: int) -> None:
        """Raise ValueError for another number of features."""
        if self.length_weight.shape != (2, num_features):
            raise ValueError(f"length_weight has shape {list(self.length_weight.shape)}")

    @property
    def arrays(self) -> dict[str, NDArray[Any]]:
        """The arrays, as a router's file holds them."""
        return {
            "length_weight": np.ascontiguousarray(self.length_weight, dtype=np.float32),
            "length_bias": np.ascontiguousarray(self.length_bias, dtype=np.float64),
        }

    @classmethod
    def read(
        cls, costs: object, weight: NDArray[Any] | None, bias: NDArray[Any] | None
    ) -> Self | None:
        """Return it from a file's parts, None where there are none; raises ValueError."""
        if costs is None and weight is None and bias is None:
            return None
        if costs is None or weight is None or bias is None:
            raise ValueError("the expected costs are incomplete")
        return cls(
            model=record_from(CostModel, costs),
            length_weight=weight.astype(np.float64),
            length_bias=bias.astype(np.float64),
        )

    def tokens(self, vector: SparseVector, num_chars: int) -> ExpectedTokens:
        """Return the expected tokens of a prompt with these features and of its answers."""
        logs = np.take(self.length_weight, vector.indices, axis=1) @ vector.values
        small, large = answer_lengths(logs + self.length_bias).tolist()
        prompt = self.model.tokens_at_start + self.model.tokens_per_char * num_chars
        return ExpectedTokens(prompt=prompt, small=small, large=large)

    def costs(
        self, tokens: ExpectedTokens, unit: CostUnit, *, hold_back_tokens: int = 16
    ) -> ExpectedCosts | None:
        """Return what the answers are expected to cost; None where the unit's rates are unknown."""
        rates = self.model.rates(unit)
        if rates is None:
            return None
        begun = min(tokens.small, hold_back_tokens)
        return ExpectedCosts(
            small=rates.small.cost(tokens.prompt, tokens.small),
            begun=rates.small.cost(tokens.prompt, begun),
            large=rates.large.cost(tokens.prompt, tokens.large),
        )

    def all_costs(
        self, tokens: ExpectedTokens, *, hold_back_tokens: int = 16
    ) -> dict[CostUnit, ExpectedCosts]:
        """Return the expected costs in the units that are known."""
        units: tuple[CostUnit, ...] = ("second", "dollar")
        known = {
            unit: self.costs(tokens, unit, hold_back_tokens=hold_back_tokens) for unit in units
        }
        return {unit: costs for unit, costs in known.items() if costs is not None}

    def factor(self, tokens: ExpectedTokens) -> float:
        """Return how much more gain than at the cheapest prompts the large model must bring."""
        costs = self.costs(tokens, self.model.unit)
        if costs is None:
            return 1.0
        return max(1.0, (costs.large - costs.small) / self.model.reference)


def answer_lengths(logs: FloatRows) -> FloatRows:
    """Lengths from the logarithms of 1 + length: at least one token, never beyond all bounds."""
    lengths: FloatRows = np.expm1(np.clip(logs, 0.0, np.log1p(MAX_ANSWER_TOKENS)))
    return np.maximum(lengths, 1.0)
