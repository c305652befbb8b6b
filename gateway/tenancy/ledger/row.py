"""One row of the ledger: one attempt at an answer, its key, tier, usage and cost."""

import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Final, Literal

import msgspec

DAY_S: Final = 86_400
RowKind = Literal[
    "answer",  # the client's request, at the first tier that was tried
    "escalation",  # the large model's answer where the small one's was given up
    "retry",  # the same request again, after a failure before the first byte
    "hedge",  # the same request beside a slow one
    "continuation",  # the rest of an answer that broke off
    "draft",  # the small model's guesses for the large one's answer
    "probe",  # the small model's reading of a prompt for the router, or a check of a server
    "mirror",  # a copy for comparison
    "cached",  # an answer of the response cache
]
RowOutcome = Literal[
    "answered",
    "failed",
    "refused",  # the request is at fault
    "lost",  # another attempt at the same request was faster
    "cancelled",  # the client left, or the deadline passed
    "escalated",  # given up for the large model's answer
    "limited",  # ended where the tenant's limit ended
]
RowUsageSource = Literal["engine", "reported", "counted", "estimated"]

MAX_END_USER_CHARS: Final = 256
MAX_LENGTHS: Final[Mapping[str, int]] = {
    "row_id": 64,
    "request_id": 64,
    "kind": 16,
    "outcome": 16,
    "tier": 64,
    "key_id": 64,
    "team_id": 64,
    "client_request_id": 128,
    "endpoint": 32,
    "model": 256,
    "replica": 256,
    "arm": 1024,
    "end_user": MAX_END_USER_CHARS,
    "hand_off": 64,
    "failure": 64,
    "usage_source": 16,
    "price_version": 32,
}
"""The most characters of a text field; longer ones are cut."""


class LedgerRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One attempt, when it has ended. Durations are seconds, money is nano-dollars."""

    row_id: str
    """Unique."""
    request_id: str
    """Ours, shared by all attempts at one API request."""
    ended_at: float
    """Seconds since 1970 (UTC)."""
    kind: RowKind
    outcome: RowOutcome
    tier: str
    key_id: str = "anonymous"
    team_id: str | None = None
    client_request_id: str = ""
    """The header x-request-id."""
    endpoint: str = "chat"
    model: str = ""
    replica: str = ""
    arm: str = ""
    end_user: str = ""
    """As the request names it, or its digest (ledger.end_users); empty where it names none."""
    hand_off: str = ""
    failure: str = ""
    num_prompt_tokens: int = 0
    """Cached ones included."""
    num_cached_tokens: int = 0
    num_computed_tokens: int = 0
    num_completion_tokens: int = 0
    num_reasoning_tokens: int = 0
    num_drafted_tokens: int = 0
    """Nodes of token trees."""
    num_accepted_tokens: int = 0
    """Nodes of token trees."""
    num_held_tokens: int = 0
    """Tokens that waited for a decision."""
    num_discarded_tokens: int = 0
    """Tokens of the completion that were not delivered."""
    num_charged_tokens: int = 0
    """Tokens of prompt and completion that the client pays for and that limits count."""
    usage_source: RowUsageSource = "engine"
    cost_nanos: int = 0
    """Our cost."""
    charge_nanos: int = 0
    """The client's charge."""
    price_version: str = ""
    queue_s: float | None = None
    ttft_s: float | None = None
    duration_s: float = 0.0
    is_streamed: bool = False
    is_degraded: bool = False

    @property
    def day(self) -> int:
        """The day of UTC on which it ended, counted from 1970 on."""
        return int(self.ended_at // DAY_S)


def printable(text: str) -> str:
    """Return the text with a question mark for whatever cannot be printed."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def fitted(row: LedgerRow) -> LedgerRow:
    """Return the row with texts that every database takes: of bounded length, printable."""
    changes = {}
    for name, length in MAX_LENGTHS.items():
        word: str | None = getattr(row, name)
        if word is not None and not (len(word) <= length and word.isprintable()):
            changes[name] = printable(word[:length])
    return msgspec.structs.replace(row, **changes) if changes else row


def row_ids(rng: random.Random, wall_clock: Callable[[], float]) -> Iterator[str]:
    """Return ids of 38 characters that count up after a prefix that no other process has.

    Ids that begin alike and grow keep a database's index dense: a new row goes to its end. `rng`
    must differ between processes; `wall_clock` is since 1970.
    """
    prefix = f"{int(wall_clock() * 1000):012x}-{rng.getrandbits(64):016x}"
    return map(f"{prefix}-{{:08x}}".format, itertools.count())
