"""Threads in which prompts are built, so that no long one holds the event loop or the memory.

Short work is done at once. Work of middle size has a few slots, each with a thread of its own: the
event loop's default threads ask the database, and all may wait for one that does not answer. Long
prompts have fewer slots. Tenants take turns for both, so that one tenant's many prompts delay
another's by one at most.
"""

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, TypeVar

import msgspec

from outrider.gateway.contract.errors.tree import BadRequestError, PromptQueueFullError
from outrider.gateway.contract.schema.chat import AssistantMessage, Message
from outrider.gateway.contract.schema.parsing import JsonBounds, check_json_bounds
from outrider.gateway.contract.schema.tools import Tool

# Below this a prompt is built within a millisecond (0.6 us a character, by two cores of 2024).
INLINE_CHARS: Final = 1024
# From here on building a prompt takes as long as all that stands before it and behind it.
OWN_TURN_CHARS: Final = 512
# From here on a prompt takes tens of milliseconds and megabytes of memory.
LONG_CHARS: Final = 65_536
_CHARS_PER_MESSAGE: Final = 64
"""The characters that a template's work on one message or call counts as, beside its text."""

Result = TypeVar("Result")


class TenantSlots:
    """A few slots, each with a thread, given to tenants in turn.

    A slot is taken until its thread has ended, also when the client has left meanwhile.
    """

    def __init__(self, name: str, num_slots: int, max_waiting_per_tenant: int | None) -> None:
        """`max_waiting_per_tenant`: None where the bytes of bodies bound them well enough."""
        self._executor = ThreadPoolExecutor(num_slots, thread_name_prefix=name)
        self._num_free = num_slots
        self._max_waiting_per_tenant = max_waiting_per_tenant
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    async def run(self, tenant: str, work: Callable[[], Result]) -> Result:
        """Run `work` in a thread when it is the tenant's turn. Raises PromptQueueFullError."""
        await self._enter(tenant)
        loop = asyncio.get_running_loop()

        def ended(_: Future[Result]) -> None:
            loop.call_soon_threadsafe(self.leave)

        future = self._executor.submit(work)
        future.add_done_callback(ended)
        return await asyncio.wrap_future(future)

    async def _enter(self, tenant: str) -> None:
        if self._num_free:
            self._num_free -= 1
            return
        queue = self._waiting.setdefault(tenant, deque())
        most = self._max_waiting_per_tenant
        if most is not None and len(queue) >= most:
            raise PromptQueueFullError(num_waiting=len(queue))
        turn = asyncio.get_running_loop().create_future()
        queue.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave()  # its turn came while the client left
            else:
                self._forget(tenant, turn)
            raise

    def _forget(self, tenant: str, turn: asyncio.Future[None]) -> None:
        """Take a cancelled turn out, unless `leave` came upon it before its task ran again."""
        queue = self._waiting.get(tenant)
        if queue is None or turn not in queue:
            return
        queue.remove(turn)
        if not queue:
            del self._waiting[tenant]

    def leave(self) -> None:
        """Give the slot to the tenant that has waited for longest since its last turn."""
        self._num_free += 1
        while self._waiting and self._num_free:
            tenant, queue = self._waiting.popitem(last=False)
            turn = queue.popleft()
            if queue:
                self._waiting[tenant] = queue
            if not turn.done():
                turn.set_result(None)
                self._num_free -= 1


class PromptSlots:
    """The slots for prompts of middle length, and those for long ones."""

    def __init__(
        self, *, num_slots: int = 2, num_middle_slots: int = 4, max_waiting_per_tenant: int = 32
    ) -> None:
        """`num_slots` and `max_waiting_per_tenant` are for long prompts."""
        self.long = TenantSlots("prompt", num_slots, max_waiting_per_tenant)
        self.middle = TenantSlots("middle-prompt", num_middle_slots, None)


class PromptWork(msgspec.Struct, frozen=True, kw_only=True):
    """Builds the prompts of one request within its limits."""

    slots: PromptSlots | None = None
    """None where prompts are not a client's, as in the tools that plan and collect."""
    tenant: str = ""
    max_chars: int | None = None
    """The most characters in all messages and tools of a prompt."""
    json_bounds: JsonBounds = msgspec.field(default_factory=JsonBounds)
    """Bounds on the arguments of a prompt's tool calls."""
    max_context: int | None = None
    """The context of the tier that reads the prompt; None for any length."""
    max_tokens: int = 1
    """The most tokens of the requested answer."""
    on_held: Callable[[float], object] | None = None
    """Called with the seconds for which short work held the event loop."""

    def within(self, max_context: int, max_tokens: int) -> "PromptWork":
        """Return the same for a tier's context and an answer's length."""
        return PromptWork(
            slots=self.slots,
            tenant=self.tenant,
            max_chars=self.max_chars,
            json_bounds=self.json_bounds,
            max_context=max_context,
            max_tokens=max_tokens,
            on_held=self.on_held,
        )

    async def run(self, num_chars: int, work: Callable[[], Result]) -> Result:
        """Run `work` on a text of `num_chars`. Raises BadRequestError for too much text."""
        if self.max_chars is not None and num_chars > self.max_chars:
            raise BadRequestError(
                f"The prompt has {num_chars} characters; at most {self.max_chars} are allowed "
                "(limits.max_prompt_chars). Send less text.",
                code="prompt_too_large",
            )
        if num_chars < OWN_TURN_CHARS:
            return self._at_once(work)
        if num_chars < INLINE_CHARS:
            await asyncio.sleep(0)
            built = self._at_once(work)
            await asyncio.sleep(0)
            return built
        if self.slots is None:
            return await asyncio.to_thread(work)
        slots = self.slots.middle if num_chars < LONG_CHARS else self.slots.long
        return await slots.run(self.tenant, work)

    def _at_once(self, work: Callable[[], Result]) -> Result:
        began_s = time.perf_counter()
        try:
            return work()
        finally:
            if self.on_held is not None:
                self.on_held(time.perf_counter() - began_s)


UNBOUNDED: Final = PromptWork()


def template_chars(messages: Iterable[Message], tools: Iterable[Tool]) -> int:
    """Estimate cheaply the characters that a template writes for messages and tools."""
    return sum(map(_message_chars, messages)) + sum(map(_tool_chars, tools))


def _message_chars(message: Message) -> int:
    content = message.content
    if isinstance(content, str):
        num_chars = len(content)
    else:
        num_chars = sum(len(part.text) + _CHARS_PER_MESSAGE for part in content or ())
    if isinstance(message, AssistantMessage):
        num_chars += len(message.thoughts or "")
        calls = message.tool_calls or ()
        num_chars += sum(len(call.function.arguments) + _CHARS_PER_MESSAGE for call in calls)
    return num_chars + _CHARS_PER_MESSAGE


def _tool_chars(tool: Tool) -> int:
    function = tool.function
    return len(function.description or "") + len(str(function.parameters)) + _CHARS_PER_MESSAGE


def check_call_arguments(messages: Sequence[Message], bounds: JsonBounds) -> None:
    """Bound the arguments of all calls together. Raises BodyTooComplexError.

    To the body they are texts; read as JSON they may hold as much as a body, and no more.
    """
    texts = [
        call.function.arguments
        for message in messages
        if isinstance(message, AssistantMessage)
        for call in message.tool_calls or ()
    ]
    check_json_bounds("".join(texts).encode("utf-8", "replace"), bounds)
