"""Last tier of each conversation: a bounded memory without any text.

A conversation is known by a keyed digest of its messages up to and including an answer. A request
that sends the same messages again continues it; without the process's key a digest is useless.
"""

import secrets
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Final

from outrider.verifier.params import Tier, record

_DIGEST_BYTES: Final = 16
Calls = Sequence[tuple[str, str]]


@record(frozen=True, slots=True, kw_only=True)
class Turn:
    """A past answer: its tier, the tokens of prompt and answer, and its time (s)."""

    tier: Tier
    num_tokens: int
    at_s: float


class ConversationDigest:
    """The digest of a conversation, message by message. `key`: up to 64 secret bytes."""

    __slots__ = ("_hash",)

    def __init__(self, key: bytes) -> None:
        self._hash = blake2b(digest_size=_DIGEST_BYTES, key=key)

    def add(self, role: str, text: str, calls: Calls = ()) -> None:
        """The next message. White space around its text and its calls' ids do not count.

        `calls`: (function's name, arguments as text) of an assistant's message.
        """
        if not calls:  # by far the most
            who = role.encode("utf-8", "surrogatepass")
            said = text.strip().encode("utf-8", "surrogatepass")
            self._hash.update(b"%d,%d;%b%b" % (len(who), len(said), who, said))
            return
        parts = [role, text.strip()]
        for name, arguments in calls:
            parts += (name, arguments.strip())
        # Lengths first, so that no two lists of parts run together.
        encoded = [part.encode("utf-8", "surrogatepass") for part in parts]
        lengths = b",".join([b"%d" % len(part) for part in encoded])
        self._hash.update(b"".join([lengths, b";", *encoded]))

    def copy(self) -> "ConversationDigest":
        """Return the same so far; the two go on apart."""
        twin = ConversationDigest.__new__(ConversationDigest)
        twin._hash = self._hash.copy()
        return twin

    def value(self) -> bytes:
        """Return the digest of all messages so far."""
        return self._hash.digest()


class ConversationMemory:
    """The latest turns by digest; the least recently used one goes first."""

    def __init__(self, capacity: int = 8192, *, key: bytes | None = None) -> None:
        """Raises ValueError for a capacity below 1."""
        if capacity < 1:
            raise ValueError(f"capacity={capacity} must be at least 1")
        self._capacity = capacity
        self._key = secrets.token_bytes(32) if key is None else key
        self._turns: OrderedDict[bytes, Turn] = OrderedDict()

    def __len__(self) -> int:
        return len(self._turns)

    def digest(self) -> ConversationDigest:
        """Return the digest of a conversation without messages."""
        return ConversationDigest(self._key)

    def remember(self, digest: ConversationDigest, turn: Turn) -> None:
        """The conversation's last message is this turn's answer."""
        value = digest.value()
        self._turns[value] = turn
        self._turns.move_to_end(value)
        if len(self._turns) > self._capacity:
            self._turns.popitem(last=False)

    def recall(self, digest: ConversationDigest) -> Turn | None:
        """Return the turn that ended so; None where it is unknown."""
        value = digest.value()
        turn = self._turns.get(value)
        if turn is not None:
            self._turns.move_to_end(value)
        return turn


def is_tool_loop(roles: Iterable[tuple[str, bool]]) -> bool:
    """Return whether the last answer's calls have results. `roles`: (role, has calls)."""
    is_called = is_answered = False
    for role, has_calls in roles:
        if role == "assistant":
            is_called, is_answered = has_calls, False
        elif role == "tool":
            is_answered = is_called
    return is_answered
