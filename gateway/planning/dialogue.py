"""A request's conversation: the tier that answered last, and a note of the one that answers now."""

from collections.abc import Sequence
from typing import Final

from engine.request import Tier
from gateway.planning.job import Answer
from gateway.planning.routing_parts import RoutingParts
from gateway.schema.chat import AssistantMessage, Message, join_parts
from router.conversations import ConversationDigest, Turn, is_tool_loop

# About as long as an idle prefix stays in the cache of a server in use.
_CACHE_LIFETIME_S: Final = 600.0


class Dialogue:
    """One request's messages against the memory of turns. Only digests of text are kept."""

    def __init__(self, messages: Sequence[Message], parts: RoutingParts, salt: str = "") -> None:
        """`salt` is the tenant's: no tenant learns which tiers answered another's conversations."""
        self._parts = parts
        answers = [i for i, message in enumerate(messages) if message.role == "assistant"]
        num_before = answers[-1] + 1 if answers else 0
        self._digest = parts.memory.digest()
        if salt:
            self._digest.add("tenant", salt, ())
        for message in messages[:num_before]:
            _add(self._digest, message)
        self._rest = tuple(messages[num_before:])
        self._turn = parts.memory.recall(self._digest) if answers else None
        self.is_tool_loop = is_tool_loop(
            (message.role, isinstance(message, AssistantMessage) and bool(message.tool_calls))
            for message in messages
        )

    @property
    def tier(self) -> Tier | None:
        """The tier that gave the last answer; None where it is unknown."""
        return None if self._turn is None else self._turn.tier

    @property
    def num_new_chars(self) -> int:
        """Characters behind the last answer."""
        return sum(len(_text(message)) for message in self._rest)

    def cached_turn(self, now_s: float) -> Turn | None:
        """The last turn, as long as its tokens are likely to be in the cache."""
        turn = self._turn
        return turn if turn is not None and now_s - turn.at_s <= _CACHE_LIFETIME_S else None

    def remember(self, answer: Answer, num_prompt_tokens: int, now_s: float) -> None:
        """Note that the conversation goes on with this answer, should its messages come back."""
        digest = self._digest.copy()
        for message in self._rest:
            _add(digest, message)
        digest.add("assistant", answer.text, answer.calls)
        turn = Turn(tier=answer.tier, num_tokens=num_prompt_tokens + answer.num_tokens, at_s=now_s)
        self._parts.memory.remember(digest, turn)


def _add(digest: ConversationDigest, message: Message) -> None:
    calls = message.tool_calls or () if isinstance(message, AssistantMessage) else ()
    named = [(call.function.name, call.function.arguments) for call in calls]
    digest.add(message.role, _text(message), named)


def _text(message: Message) -> str:
    return join_parts(message.content)
