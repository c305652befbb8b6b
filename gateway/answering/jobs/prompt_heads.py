"""Finds clients whose prompts differ at their head, so that no prefix of them is cached.

A clock at the head of a system prompt is such a difference: what follows is the same, and is
computed anew each time. Of a prompt only hashes of its parts are kept, and never a private one's.
"""

from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

PART_TOKENS: Final = 64
"""Prompts are compared in parts of this length; the first one is their head."""
WINDOW_S: Final = 300.0
_MAX_PARTS: Final = 64
_MAX_SHIFT: Final = 16
_MAX_CLIENTS: Final = 256
_MAX_PROMPTS: Final = 4
_MAX_NOTES: Final = 128
_MIN_PARTS: Final = 2
MIN_TOKENS: Final = (1 + _MIN_PARTS) * PART_TOKENS
"""Shorter prompts are not compared: a cache saves little of them."""
_MIN_REQUESTS: Final = 3
_MAX_AGENT_CHARS: Final = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadFigures:
    """One client's prompts of the last five minutes, of which at least half have a head anew."""

    key_id: str
    agent: str
    """The first word of its user agent."""
    num_requests: int
    num_changed: int
    """Those that differ from an earlier one at the head, and hardly behind it."""
    num_repeated_tokens: int
    """What these had in common behind it, which a cache would have had."""
    num_prompt_tokens: int
    """All tokens of these."""


@dataclass(slots=True)
class _Client:
    tenant: str
    prompts: deque[tuple[int, ...]] = field(default_factory=lambda: deque(maxlen=_MAX_PROMPTS))
    """Hashes of the parts of its last prompts with different heads."""
    notes: deque[tuple[float, int, int]] = field(default_factory=lambda: deque(maxlen=_MAX_NOTES))
    """When a prompt came, its repeated tokens, and all of its tokens."""


class PromptHeads:
    """Compares each client's prompts; of at most 256 clients, the latest."""

    def __init__(self) -> None:
        self._clients: OrderedDict[tuple[str, str], _Client] = OrderedDict()

    def note(
        self, key_id: str, tenant: str, user_agent: str, token_ids: Sequence[int], now_s: float
    ) -> None:
        """Compare a prompt with the client's last ones. It is not private, and has `MIN_TOKENS`."""
        client = self._client(key_id, tenant, user_agent)
        repeated = 0
        head = _part(token_ids, 0)
        if all(prompt[0] != head for prompt in client.prompts):
            shifts = _shifts(token_ids)
            common = (_num_common(token_ids, other, shifts) for other in client.prompts)
            num_parts = max(common, default=0)
            repeated = num_parts * PART_TOKENS if num_parts >= _MIN_PARTS else 0
            client.prompts.append((head, *_hashes(token_ids)))
        client.notes.append((now_s, repeated, len(token_ids)))

    def figures(self, tenant: str | None, now_s: float) -> list[HeadFigures]:
        """Return the clients that should change their prompts, of one tenant or of all."""
        found = [
            _figures(key_id, agent, client, now_s)
            for (key_id, agent), client in self._clients.items()
            if tenant is None or client.tenant == tenant
        ]
        told = [
            each for each in found if each.num_changed >= max(_MIN_REQUESTS, each.num_requests / 2)
        ]
        return sorted(told, key=lambda each: -each.num_repeated_tokens)

    def _client(self, key_id: str, tenant: str, user_agent: str) -> _Client:
        words = user_agent[:_MAX_AGENT_CHARS].split(maxsplit=1)
        name = (key_id, words[0] if words and words[0].isprintable() else "")
        client = self._clients.setdefault(name, _Client(tenant))
        self._clients.move_to_end(name)
        if len(self._clients) > _MAX_CLIENTS:
            self._clients.popitem(last=False)
        return client


def _hashes(token_ids: Sequence[int]) -> list[int]:
    """Return the hashes of the whole parts behind the head."""
    end = min(len(token_ids) // PART_TOKENS, _MAX_PARTS) * PART_TOKENS
    starts = range(PART_TOKENS, end, PART_TOKENS)
    return [_part(token_ids, start) for start in starts]


def _shifts(token_ids: Sequence[int]) -> dict[int, int]:
    """Map hashes of what may be the first part behind the head to the places that it has moved.

    A number with more digits moves all that stands behind it.
    """
    return {
        _part(token_ids, PART_TOKENS + shift): shift for shift in range(-_MAX_SHIFT, _MAX_SHIFT + 1)
    }


def _num_common(token_ids: Sequence[int], other: Sequence[int], shifts: Mapping[int, int]) -> int:
    """Return how many of another prompt's parts behind its head follow here, from the first on."""
    shift = shifts.get(other[1])
    if shift is None:
        return 0
    num_equal = 1
    for theirs in other[2:]:
        if _part(token_ids, (num_equal + 1) * PART_TOKENS + shift) != theirs:
            break
        num_equal += 1
    return num_equal


def _part(token_ids: Sequence[int], start: int) -> int:
    return hash(tuple(token_ids[start : start + PART_TOKENS]))


def _figures(key_id: str, agent: str, client: _Client, now_s: float) -> HeadFigures:
    notes = [note for note in client.notes if now_s - note[0] <= WINDOW_S]
    changed = [note for note in notes if note[1]]
    return HeadFigures(
        key_id=key_id,
        agent=agent,
        num_requests=len(notes),
        num_changed=len(changed),
        num_repeated_tokens=sum(repeated for _, repeated, _ in changed),
        num_prompt_tokens=sum(tokens for _, _, tokens in changed),
    )
