"""Bounds how long a step may last, so that no request is slower for the guesses of others.

A step with guesses takes as long as several plain ones: its stretch. A request whose guesses were
right is paid in tokens. One whose guesses were wrong, or that wants none, has only waited. So each
request has an account in plain steps: a token adds one, and a step takes its stretch away, as it
was to be expected: what else holds a machine up is no fault of guesses. What a request has and what
its own guesses should bring is all that a step may take of it.

What a model reads of a request's text, before it can draft, serves all steps to come: the request
pays for it in instalments, as long as it has guesses. Others have only waited, and pay at once.
"""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from math import inf
from typing import Final

from outrider.draft.budget.budget import MOST_STEPS, NOTHING_READ
from outrider.engine.sequences.sequence import Sequence

# A request may be so much slower than without guesses, in all, and so many plain steps besides.
# With the step under way when the account is empty, that is a twentieth of 64 tokens.
_SLOWER: Final = 0.015
_FIRST: Final = 1.25
# And of the time that it waits for others' prompts.
_SLOWER_BESIDE: Final = 0.05
# A text whose guesses were right for long does not pay for its next part without end, and one that
# has waited for long is not owed plain steps without end.
_MOST: Final = 8.0


@dataclass(slots=True)
class _Account:
    """A request's account, in plain steps."""

    num_tokens: int
    """Those that it had when its last step began."""
    num_steps: int
    """Its steps until then."""
    balance: float = _FIRST
    owed: float = 0.0
    """The part that it has not paid yet of what a model read of its text."""
    instalment: float = 0.0


class OwnPace:
    """The accounts of the requests that decode together, by request id."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}

    def begin_step(
        self,
        sequences: SequenceOf[Sequence],
        stretch: float | None,
        read: Mapping[str, float] = NOTHING_READ,
        beside: float = 0.0,
    ) -> None:
        """Book the last step, then begin one of these sequences; others' accounts are closed.

        `stretch`: of the last step, in plain ones; None where it is not known. `read`: what a model
        read in it of requests' texts, in plain steps, besides; `beside`: what prompts took.
        """
        accounts: dict[str, _Account] = {}
        num_read = sum(read.values())
        for sequence in sequences:
            request_id, num_tokens = sequence.request_id, sequence.num_output_tokens
            account = self._accounts.get(request_id)
            if account is None:
                account = _Account(num_tokens, sequence.num_steps)
            else:
                gained = num_tokens - account.num_tokens
                if stretch is not None and gained > 0:  # its answer did not begin anew
                    num_unseen = sequence.num_steps - account.num_steps - 1  # without guesses
                    account.balance += (1.0 + _SLOWER) * gained - stretch - num_unseen
                account.balance += _SLOWER_BESIDE * beside
                if read or account.owed:
                    has_guesses = stretch is not None and stretch > 1.0
                    _pay(account, read.get(request_id, 0.0), num_read, has_guesses=has_guesses)
                account.balance = min(max(account.balance, -_MOST), _MOST)
            account.num_tokens, account.num_steps = num_tokens, sequence.num_steps
            accounts[request_id] = account
        self._accounts = accounts

    @property
    def patience(self) -> float:
        """Return the plain steps that every request can wait for guesses which fail.

        Below 0 one has waited for more than its tokens pay: the step is to be plain.
        """
        return min([account.balance for account in self._accounts.values()], default=0.0)

    def patience_beside(self, readers: SequenceOf[Sequence]) -> float:
        """Return the plain steps that all but these can wait; without end where there are none."""
        own = {sequence.request_id for sequence in readers}
        others = [each.balance for name, each in self._accounts.items() if name not in own]
        return min(others, default=inf)

    def most_stretch(self, expected: Iterable[tuple[Sequence, float]]) -> float:
        """Return how many plain steps the next one may last.

        `expected`: of every sequence in it, the tokens that its own guesses should bring.
        """
        accounts = self._accounts
        return min(
            1.0 + gain + accounts[sequence.request_id].balance for sequence, gain in expected
        )


def _pay(account: _Account, own: float, num_read: float, *, has_guesses: bool) -> None:
    """Take what was read for others at once, and an instalment of what was read for it."""
    if has_guesses:
        part = min(account.instalment, account.owed)
        account.owed -= part
        account.balance -= part
    account.balance -= num_read - own
    if own:
        account.owed += own
        account.instalment = account.owed / MOST_STEPS
