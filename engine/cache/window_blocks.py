"""The smaller cache of the layers that see a window: its blocks, lent to blocks of the pool."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# Tokens behind a window that are kept, for a drafter's view that goes back a few tokens.
_SLACK_TOKENS = 64
# Blocks that a running answer holds beside its window's: begun ones at both ends, and its tree's.
_SPARE_BLOCKS = 6
_STEP_TOKENS = 4096  # of a pass
_MOST_BLOCKS = 2**31 - 1  # block ids are int32 on the device


def window_block_demand(
    window: int, *, block_size: int, max_sequences: int, max_step_tokens: int
) -> int:
    """Return how many window blocks are enough for `max_sequences` answers of any length.

    window, max_step_tokens (rows of a pass, of all answers together): in tokens.
    """
    per_answer = -(-(window + _SLACK_TOKENS) // block_size) + _SPARE_BLOCKS
    return 1 + max_sequences * per_answer + -(-max_step_tokens // block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockBytes:
    """Memory of one block of a model's cache: in its layers without a window, and in the others."""

    full: int
    windowed: int = 0
    demand: int = 0
    """Window blocks that are enough (`window_block_demand`); 0 for a model without windows."""
    share: float = 1.0
    """Blocks for each block of a model whose share is 1; at most 1."""
    least: int = 0
    """Blocks that it gets in any case, where the memory allows."""
    most: int = _MOST_BLOCKS
    """More are never in use."""

    def blocks(self, number: int) -> int:
        """Return how many blocks it gets where a share of 1 gets `number`."""
        return min(max(int(self.share * number), min(self.least, number)), self.most)

    def num_bytes(self, number: int) -> int:
        """Return the memory of those blocks; windowed layers have no more than the demand."""
        own = self.blocks(number)
        return self.full * own + self.windowed * (min(own, self.demand) if self.demand else own)


def share_blocks(budget_bytes: float, models: Sequence[BlockBytes]) -> list[int]:
    """Return how many blocks of each model fit, by their shares.

    What one cannot use goes to the others.
    """
    low, high = 0, _MOST_BLOCKS
    while low < high:
        middle = (low + high + 1) // 2
        if sum(each.num_bytes(middle) for each in models) <= budget_bytes:
            low = middle
        else:
            high = middle - 1
    return [each.blocks(low) for each in models]


class OutOfWindowBlocksError(Exception):
    """Every window block is held. A view asks for room before it holds one."""


class WindowBlocks:
    """Window blocks, each lent to one block of the pool: where its windowed layers' keys lie.

    A view holds the window blocks of the tokens that its next rows may see. One that no view holds
    stays with its block, for a later prefix hit, until another block needs it: the least recently
    held goes first. Window block 0 is never lent: what is read or written for a block without a
    window block is read and written there, and is never used.

    `changes`: block to window block, since they were last taken; `copies`: (source, copy) window
    blocks whose content must be copied before the next pass. `window`: in tokens. `on_detach`: told
    each block that loses its window block.
    """

    def __init__(self, *, num_blocks: int, window: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.changes: dict[int, int] = {}
        self.copies: list[tuple[int, int]] = []
        self.on_detach: Callable[[int], None] | None = None
        self._reach = window - 1
        self._block_size = block_size
        self._free = list(range(num_blocks - 1, 0, -1))
        self._of_block: dict[int, int] = {}
        self._num_holders: dict[int, int] = {}  # by block
        # Blocks whose window block no view holds.
        self._unheld: OrderedDict[int, None] = OrderedDict()

    @property
    def num_available(self) -> int:
        """Window blocks that could be lent now."""
        return len(self._free) + len(self._unheld)

    def spare(self, *, max_context: int) -> int:
        """Return how many window blocks a lone answer of that length can do without."""
        most = min(max_context, _STEP_TOKENS)
        needed = window_block_demand(
            self._reach + 1, block_size=self._block_size, max_sequences=1, max_step_tokens=most
        )
        whole = 2 + -(-max_context // self._block_size)  # it never holds more than all of it
        return max(self.num_blocks - min(needed, whole), 0)

    def first_seen(self, num_tokens: int) -> int:
        """The index, in a view's table, of the first block that rows behind `num_tokens` see."""
        return max(num_tokens - self._reach, 0) // self._block_size

    def first_kept(self, num_tokens: int) -> int:
        """The index of the first block that a view of `num_tokens` goes on holding."""
        return max(num_tokens - self._reach - _SLACK_TOKENS, 0) // self._block_size

    def has(self, block: int) -> bool:
        """True if the block's windowed keys are there."""
        return block in self._of_block

    def block_of(self, block: int) -> int:
        """Return the window block that a block has."""
        return self._of_block[block]

    def hold(self, block: int) -> int:
        """Return the block's window block and keep it; lend one if it has none.

        Raises OutOfWindowBlocksError.
        """
        window_block = self._of_block.get(block)
        if window_block is None:
            window_block = self._take()
            self._of_block[block] = window_block
            self.changes[block] = window_block
        self._unheld.pop(block, None)
        self._num_holders[block] = self._num_holders.get(block, 0) + 1
        return window_block

    def let_go(self, block: int) -> None:
        """Let others have the block's window block when they need it."""
        self._num_holders[block] -= 1
        if not self._num_holders[block]:
            del self._num_holders[block]
            self._unheld[block] = None

    def copy(self, source: int, copy: int) -> int:
        """Lend a window block to `copy`, to be filled with what the one of `source` holds."""
        held = self._of_block[source]
        window_block = self.hold(copy)
        self.copies.append((held, window_block))
        return window_block

    def forget(self, block: int) -> None:
        """Take back what was lent to a block that is about to mean something else."""
        if block in self._unheld:
            del self._unheld[block]
            self._free.append(self._detach(block))

    def take_changes(self) -> dict[int, int]:
        """Return the changes, and begin anew."""
        changes, self.changes = self.changes, {}
        return changes

    def take_copies(self) -> list[tuple[int, int]]:
        """Return the copies to be made, and begin anew; of two into one block the last counts."""
        last = {copy: source for source, copy in self.copies}
        self.copies = []
        return [(source, copy) for copy, source in last.items()]

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        if not self._unheld:
            raise OutOfWindowBlocksError
        block, _ = self._unheld.popitem(last=False)
        return self._detach(block)

    def _detach(self, block: int) -> int:
        self.changes[block] = 0
        if self.on_detach is not None:
            self.on_detach(block)
        return self._of_block.pop(block)
