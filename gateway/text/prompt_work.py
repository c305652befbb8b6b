"""Threads in which prompts are built, so that no long one holds the event loop or the memory.

Short work is done at once, work of middle size in a few threads of its own: the event loop's
default threads ask the database, and all of them may wait for one that does not answer. Long
prompts share a few slots: tenants take turns for them, so that one tenant's many long prompts delay
another's by one at most.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, TypeVar

from gateway.errors.tree import BadRequestError, PromptQueueFullError

# Below this a prompt is built within about a millisecond: less than a hop to a thread may cost.
INLINE_CHARS: Final = 4096
# From here on a prompt takes tens of milliseconds and megabytes of memory.
LONG_CHARS: Final = 65_536
_MIDDLE_THREADS: Final = 4

Result = TypeVar("Result")


class PromptSlots:
    """A few slots for long prompts, given to tenants in turn.

    A slot is taken until its thread has ended, also when the client has left meanwhile.
    """

    def __init__(self, *, num_slots: int = 2, max_waiting_per_tenant: int = 32) -> None:
        self._executor = ThreadPoolExecutor(num_slots, thread_name_prefix="prompt")
        self._middle = ThreadPoolExecutor(_MIDDLE_THREADS, thread_name_prefix="middle-prompt")
        self._num_free = num_slots
        self._max_waiting_per_tenant = max_waiting_per_tenant
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    async def run_middle(self, work: Callable[[], Result]) -> Result:
        """Run work of some milliseconds in a thread, in the order of its coming."""
        return await asyncio.get_running_loop().run_in_executor(self._middle, work)

    async def run(self, tenant: str, work: Callable[[], Result]) -> Result:
        """Run `work` in a thread when it is the tenant's turn. Raises PromptQueueFullError."""
        await self._enter(tenant)
        loop = asyncio.get_running_loop()

        def ended(_: Future[Result]) -> None:
            loop.call_soon_threadsafe(self._leave)

        future = self._executor.submit(work)
        future.add_done_callback(ended)
        return await asyncio.wrap_future(future)

    async def _enter(self, tenant: str) -> None:
        if self._num_free:
            self._num_free -= 1
            return
        queue = self._waiting.setdefault(tenant, deque())
        if len(queue) >= self._max_waiting_per_tenant:
            raise PromptQueueFullError(num_waiting=len(queue))
        turn = asyncio.get_running_loop().create_future()
        queue.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._leave()  # its turn came while the client left
            else:
                self._forget(tenant, turn)
            raise

    def _forget(self, tenant: str, turn: asyncio.Future[None]) -> None:
        queue = self._waiting[tenant]
        queue.remove(turn)
        if not queue:
            del self._waiting[tenant]

    def _leave(self) -> None:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptWork:
    """How the prompts of one request are built, and what they may cost.

    `max_chars`: text in all messages and tools of a prompt. `slots`: None where prompts are not a
    client's, as in the tools that plan and collect.
    """

    slots: PromptSlots | None = None
    tenant: str = ""
    max_chars: int | None = None

    async def run(self, num_chars: int, work: Callable[[], Result]) -> Result:
        """Run `work` on a text of `num_chars`. Raises BadRequestError for too much text."""
        if self.max_chars is not None and num_chars > self.max_chars:
            raise BadRequestError(
                f"The prompt has {num_chars} characters; at most {self.max_chars} are allowed "
                "(limits.max_prompt_chars). Send less text.",
                code="prompt_too_large",
            )
        if num_chars < INLINE_CHARS:
            return work()
        if self.slots is None:
            return await asyncio.to_thread(work)
        if num_chars < LONG_CHARS:
            return await self.slots.run_middle(work)
        return await self.slots.run(self.tenant, work)


UNBOUNDED: Final = PromptWork()
