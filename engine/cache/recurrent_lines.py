"""Lines and states of recurrent layers: which sequence has which, and what later prefixes find.

A sequence's state at its last boundary is kept, and in a line of its own what later rows contribute
(`outrider.engine.model.recurrent_cache`). A state that others may find, or hold, is not written:
the next one gets a place of its own. So a checkpoint costs no copy.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from outrider.engine.cache.block_pool import BlockHash, BlockPool

BOUNDARY: Final = 64
"""Tokens between two states of a sequence."""
LINE_TREE_ROWS: Final = 128
"""Rows of a sequence's tree that its line has room for, the root included."""
LINE_ROWS: Final = BOUNDARY + LINE_TREE_ROWS
_ZERO_STATE = 0
_CHECKPOINT_SHARE = 0.1
"""The share of the memory for keys and values."""
_MOST_CHECKPOINTS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentSizes:
    """Lines (sequences that hold rows at once) and checkpoints of a model's recurrent layers."""

    num_lines: int = 64
    num_checkpoints: int = 64

    @classmethod
    def within(
        cls, budget_bytes: float, *, max_sequences: int, state_bytes: int
    ) -> "RecurrentSizes":
        """Return the sizes for so many answers, with checkpoints for a share of a budget."""
        num_checkpoints = int(budget_bytes * _CHECKPOINT_SHARE / state_bytes)
        return cls(num_lines=max_sequences, num_checkpoints=min(num_checkpoints, _MOST_CHECKPOINTS))

    def num_bytes(self, *, line_bytes: int, state_bytes: int) -> int:
        """Return the memory that they take."""
        return self.num_lines * line_bytes + self.num_states * state_bytes

    @property
    def num_states(self) -> int:
        """The empty text's, each line's and its next one in the same pass, and the checkpoints."""
        return 1 + 2 * self.num_lines + self.num_checkpoints


class RecurrentPool:
    """The lines and states of one model."""

    def __init__(self, sizes: RecurrentSizes, *, block_size: int) -> None:
        """Raise ValueError for blocks that boundaries would cut."""
        if BOUNDARY % block_size:
            raise ValueError(
                f"block_size={block_size} must divide {BOUNDARY}, the tokens between two states of "
                "recurrent layers"
            )
        self.lines = BlockPool(num_blocks=sizes.num_lines, block_size=1)
        self.states = BlockPool(num_blocks=sizes.num_states, block_size=BOUNDARY)
        zero = self.states.allocate()
        assert zero == _ZERO_STATE


class RecurrentLine:
    """A view's line, and its state: of its first `num_tokens` tokens, whole boundaries."""

    def __init__(self, pool: RecurrentPool) -> None:
        self.pool = pool
        self.number: int | None = None
        self.state = _ZERO_STATE
        self.num_tokens = 0

    @property
    def can_hold(self) -> bool:
        """True if the view has a line, or could have one."""
        return self.number is not None or self.pool.lines.num_available > 0

    def hold(self) -> None:
        """Take a line, unless there is one. Raises OutOfBlocksError."""
        if self.number is None:
            self.number = self.pool.lines.allocate()

    def fold(self) -> tuple[int, int, bool]:
        """Go on to the next boundary: (state to read, state to write, whether to release one).

        The one that is read is to be released once all states of the pass have their places.
        """
        source, states = self.state, self.pool.states
        self.num_tokens += BOUNDARY
        is_own = source != _ZERO_STATE
        if is_own and states.ref_count(source) == 1 and not states.is_published(source):
            return source, source, False
        self.state = states.allocate()
        return source, self.state, is_own

    def find(self, hashes: Callable[[int], BlockHash | None], limit: int) -> int:
        """Return the longest prefix, of at most `limit` tokens, whose state is there; 0 for none.

        `hashes`: the hash of a prefix of so many tokens, None where it is not known.
        """
        for num_tokens in range(limit // BOUNDARY * BOUNDARY, 0, -BOUNDARY):
            prefix = hashes(num_tokens)
            if prefix is not None and self.pool.states.find(prefix) is not None:
                return num_tokens
        return 0

    def take(self, prefix: BlockHash | None, num_tokens: int) -> None:
        """Go on from the state that `find` found; from none where `num_tokens` is 0."""
        self._let_go()
        if num_tokens and prefix is not None:
            found = self.pool.states.find(prefix)
            assert found is not None
            self.pool.states.share(found)
            self.state = found
        self.num_tokens = num_tokens

    def pretend(self, num_tokens: int) -> None:
        """Take whatever state there is for that of `num_tokens` tokens, to measure passes."""
        self.num_tokens = num_tokens // BOUNDARY * BOUNDARY

    def publish(self, prefix: BlockHash) -> None:
        """Let later prefixes find the state. `prefix`: the hash of its tokens."""
        if self.state != _ZERO_STATE:
            self.pool.states.publish(self.state, prefix)

    def release(self) -> None:
        """Give line and state back; a published state stays until it is evicted."""
        self.take(None, 0)
        if self.number is not None:
            self.pool.lines.release([self.number])
            self.number = None

    def _let_go(self) -> None:
        if self.state != _ZERO_STATE:
            self.pool.states.release([self.state])
        self.state = _ZERO_STATE
