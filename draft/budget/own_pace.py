"""Bounds how long a step may last, so that no request is slower for the guesses of others.

A step with guesses takes as long as several plain ones: its stretch. A request whose guesses were
right is paid in tokens. One whose guesses were wrong, or that wants none, has only waited. So each
request has an account in plain steps: a token adds one, and a step takes its stretch away, as it
was to be expected: what else holds a machine up is no fault of guesses. What a request has and what
its own guesses should bring is all that a step may take of it.
"""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from typing import Final

from outrider.engine.sequences.sequence import Sequence

# A request may be so much slower than without guesses, in all, and so many plain steps besides.
# With the step under way when the account is empty, that is a twentieth of 64 tokens.
_SLOWER: Final = 0.015
_FIRST: Final = 1.25
# A text whose guesses were right for long does not pay for its next part without end, and one that
# has waited for long is not owed plain steps without end.
_MOST: Final = 8.0


class OwnPace:
    """The accounts of the requests that decode together, by request id."""

    def __init__(self) -> None:
        self._accounts: dict[str, float] = {}
        # Tokens and steps that each had when its last step began.
        self._counts: dict[str, tuple[int, int]] = {}

    def begin_step(self, sequences: SequenceOf[Sequence], stretch: float | None) -> None:
        """Book the last step, then begin one of these sequences; others' accounts are closed.

        `stretch`: of the last step, in plain ones; None where it is not known.
        """
        accounts, counts = self._accounts, self._counts
        kept: dict[str, float] = {}
        for sequence in sequences:
            request_id = sequence.request_id
            account = accounts.get(request_id, _FIRST)
            if stretch is not None and request_id in counts:
                num_tokens, num_steps = counts[request_id]
                gained = sequence.num_output_tokens - num_tokens
                if gained > 0:  # its answer did not begin anew
                    num_unseen = sequence.num_steps - num_steps - 1  # which had no guesses
                    account += (1.0 + _SLOWER) * gained - stretch - num_unseen
            kept[request_id] = min(max(account, -_MOST), _MOST)
        self._accounts = kept
        self._counts = {
            each.request_id: (each.num_output_tokens, each.num_steps) for each in sequences
        }

    @property
    def patience(self) -> float:
        """Return the plain steps that every request can wait for guesses which fail.

        Below 0 one has waited for more than its tokens pay: the step is to be plain.
        """
        return min(self._accounts.values(), default=0.0)

    def most_stretch(self, expected: Iterable[tuple[Sequence, float]]) -> float:
        """Return how many plain steps the next one may last.

        `expected`: of every sequence in it, the tokens that its own guesses should bring.
        """
        return min(
            1.0 + gain + self._accounts.get(sequence.request_id, _FIRST)
            for sequence, gain in expected
        )
