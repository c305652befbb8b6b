"""Counts one choice's tokens and times."""

from collections.abc import Sequence
from typing import Final

import msgspec


class ChoiceUsage(msgspec.Struct, kw_only=True):
    """The usage of one choice. Times in seconds; None before the event."""

    num_tokens: int = 0
    num_reasoning_tokens: int = 0
    num_cached_tokens: int = 0
    num_restored_tokens: int = 0
    """Those of the cached ones that were read from a disk."""
    num_pulled_tokens: int = 0
    """Those of the cached ones that came from another engine."""
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    num_unratified_tokens: int = 0
    num_reused_tokens: int = 0
    """Tokens that the other tier's retracted answer held."""
    num_steps: int = 0
    num_prediction_tokens: int = 0
    """Tokens of the request's prediction."""
    num_predicted_tokens: int = 0
    """Tokens of the prediction that were right."""
    queue_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None

    @classmethod
    def total(cls, usages: "Sequence[ChoiceUsage]") -> "ChoiceUsage":
        """Return the usage of several choices together: the first token of any, the longest wait.

        Its numbers are sums, but for `num_mispredicted_tokens`, which is each choice's own.
        """
        queued = [u.queue_s for u in usages if u.queue_s is not None]
        firsts = [u.first_token_s for u in usages if u.first_token_s is not None]
        lasts = [u.last_token_s for u in usages if u.last_token_s is not None]
        return cls(
            **{name: sum([getattr(u, name) for u in usages]) for name in _COUNTS},
            queue_s=max(queued, default=None),
            first_token_s=min(firsts, default=None),
            last_token_s=max(lasts, default=None),
        )

    @property
    def num_mispredicted_tokens(self) -> int:
        """Tokens of the prediction that did not come out; a piece that came twice counts twice."""
        return max(self.num_prediction_tokens - self.num_predicted_tokens, 0)


_COUNTS: Final = tuple(name for name in ChoiceUsage.__struct_fields__ if name.startswith("num_"))
