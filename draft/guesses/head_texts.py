"""A head's views of the sequences, and the large model's hidden states that wait to be taken in.

A head's row for the token at i carries what the large model made of the tokens up to i - 1. So its
text is the sequence's without the first token, which is part of the salt instead. A slot depends on
the tokens up to its own. So a block of the prefix cache never stands for another next token.
"""

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from outrider.draft.heads.protocol import HeadModel
from outrider.engine.cache.block_pool import OutOfBlocksError
from outrider.engine.cache.kv_view import KVView
from outrider.engine.passes.runner import ForwardSlice, ModelRunner
from outrider.engine.protocols import DraftPass, FeatureRows
from outrider.engine.sequences.sequence import Sequence
from outrider.verifier.params import Source

# Rows that may wait for the next draft pass; more are taken in by a pass of their own.
_MOST_WAITING: Final = 32
# So many cached tokens of the large model are computed again where the head lacks them: what waits
# at an answer's end, and the rest of its last block.
_MOST_REPEATED: Final = 48
# A head that is asked in fewer of the steps reads only every so many-th sequence.
_LEAST_WORTH: Final = 0.1
_WORTH_WEIGHT: Final = 0.05
_READS_EVERY: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """A head that drafts, its runner, and the width of the large model's logits."""

    model: HeadModel
    runner: ModelRunner
    vocab_size: int


@dataclass(eq=False, slots=True, kw_only=True)
class HeadText:
    """A sequence as the head knows it."""

    sequence: Sequence
    view: KVView
    """Slot j holds the token at `start` + j + 1, with the taps of the large model's row at `start`
    + j."""
    start: int = 0
    waiting: list[Tensor] = field(default_factory=list)
    """The taps behind what is computed, in order."""
    num_waiting: int = 0
    num_taken: int = 0
    is_tried: bool = False
    """Read although heads do not pay at present."""
    hidden: dict[int, Tensor] = field(default_factory=dict)
    """The output of each candidate's row, in this step's tree."""

    @property
    def end(self) -> int:
        """The place in the text of the next row of the large model that is wanted."""
        return self.start + self.view.num_computed_tokens + self.num_waiting

    @property
    def root_slot(self) -> int:
        """The slot of the text's last token."""
        return len(self.sequence.token_ids) - 2 - self.start

    @property
    def num_ready(self) -> int:
        """Rows that can be computed: their tokens are known."""
        return min(self.num_waiting, self.root_slot + 1 - self.view.num_computed_tokens)

    @property
    def reaches_root(self) -> bool:
        """True if all of the text can be computed, the last token included."""
        return self.view.num_computed_tokens + self.num_waiting > self.root_slot >= 0

    def add(self, taps: Tensor) -> None:
        """Keep the next rows' taps, [n, number of taps * hidden_size]."""
        self.waiting.append(taps)
        self.num_waiting += len(taps)

    def take(self, num_rows: int, *, num_logit_rows: int) -> tuple[ForwardSlice, Tensor]:
        """The next rows as a slice, whose slots must be reserved, and their taps."""
        waiting = torch.cat(self.waiting) if len(self.waiting) > 1 else self.waiting[0]
        taps, rest = waiting[:num_rows], waiting[num_rows:]
        self.waiting = [rest] if len(rest) else []
        self.num_waiting, self.num_taken = len(rest), num_rows
        first = self.view.num_computed_tokens
        place = self.start + first + 1
        piece = ForwardSlice(
            view=self.view,
            token_ids=self.sequence.token_ids[place : place + num_rows],
            start_slot=first,
            num_logit_rows=num_logit_rows,
        )
        return piece, taps

    def advance(self) -> None:
        """Note that the rows were computed that were taken last."""
        view, block_size = self.view, self.view.pool.block_size
        computed = view.num_computed_tokens + self.num_taken
        self.num_taken = 0
        is_block_full = computed // block_size > view.num_computed_tokens // block_size
        view.advance(computed, self.sequence.token_ids[1:] if is_block_full else ())


class HeadTexts:
    """The sequences that a head reads; an `outrider.engine.protocols.FeatureReader`.

    `sources`: those that the engine's settings allow.
    """

    def __init__(self, head: Head, *, sources: SequenceOf[Source]) -> None:
        self._runner = head.runner
        self._model = head.model
        self._is_on = "head" in sources
        self._texts: dict[str, HeadText] = {}
        self._worth = 1.0
        self._num_unread = 0

    @property
    def runner(self) -> ModelRunner:
        """The head's runner."""
        return self._runner

    def of(self, sequence: Sequence) -> HeadText | None:
        """Return what the head knows of a sequence; None where it does not read it."""
        return self._texts.get(sequence.request_id)

    def can_draft(self, sequence: Sequence) -> bool:
        """True if the head knows all of a text and has positions left."""
        text = self.of(sequence)
        return text is not None and text.reaches_root and self.num_positions(text) > 0

    def num_positions(self, text: HeadText) -> int:
        """Levels that a tree may have before the head's longest context ends."""
        assert self._runner.max_context is not None
        room = self._runner.max_context - text.root_slot - 1
        if (block := self._model.block) is None:
            return room
        return block.num_depths if block.num_slots_behind <= room else 0

    def note_asked(self, was_asked: bool) -> None:
        """Learn whether a step asks the head for a sequence that it could draft for."""
        self._worth += _WORTH_WEIGHT * (was_asked - self._worth)

    def note_unasked(self) -> None:
        """Learn that a step does not ask the head at all."""
        if self._texts:
            self.note_asked(False)

    @property
    def reads_any(self) -> bool:
        """True if a sequence is read; see `outrider.engine.protocols.FeatureReader`."""
        return bool(self._texts)

    # ---- the engine's protocol ------------------------------------------------------------

    def begin(self, sequence: Sequence, num_cached: int) -> int:
        """Take the head's cached blocks of a text; see
        `outrider.engine.protocols.FeatureReader`.
        """
        self.forget(sequence)
        if not self._is_wanted(sequence):
            return num_cached
        is_paying = self._worth >= _LEAST_WORTH
        if not is_paying:
            self._num_unread += 1
            if self._num_unread % _READS_EVERY:
                return num_cached
        view = self.new_view(sequence, is_shared=True)
        text = HeadText(sequence=sequence, view=view, is_tried=not is_paying)
        self._texts[sequence.request_id] = text
        num_known = 0
        if len(sequence.token_ids) > 1:
            num_known = view.match_prefix(sequence.token_ids[1:])
        return (
            min(num_cached, num_known) if num_cached - num_known <= _MOST_REPEATED else num_cached
        )

    def _is_wanted(self, sequence: Sequence) -> bool:
        own = sequence.request.speculation
        is_allowed = own.sources is None or "head" in own.sources
        return self._is_on and is_allowed and own.enabled and sequence.cascade is None

    def new_view(self, sequence: Sequence, *, is_shared: bool = True) -> KVView:
        """An empty view of a sequence's text without its first token, which is in the salt."""
        adapter = sequence.adapters.get("large")  # what the head reads depends on it
        digest = "" if adapter is None else adapter.digest
        # The request's own salt comes first: it says whether the text is private.
        salt = f"{sequence.request.cache_salt}:{sequence.token_ids[0]}:{digest}"
        return self._runner.new_view(salt, is_shared=is_shared)

    def forget(self, sequence: Sequence) -> None:
        """Give back what is held for a sequence."""
        text = self._texts.pop(sequence.request_id, None)
        if text is not None:
            text.view.release()

    def drop_tree(self, sequence: Sequence) -> None:
        """Give back the slots of a tree that was judged."""
        if (text := self.of(sequence)) is not None:
            text.view.trim()

    def read(self, taps: Tensor, pieces: SequenceOf[FeatureRows]) -> None:
        """Keep the taps of accepted rows; see `outrider.engine.protocols.FeatureReader`."""
        found: list[tuple[HeadText, int]] = []
        index: list[int] = []
        for piece in pieces:
            if (text := self.of(piece.sequence)) is None:
                continue
            if self._worth < _LEAST_WORTH and not text.is_tried:
                self.forget(piece.sequence)
                continue
            end = text.end + sum(number for other, number in found if other is text)
            if piece.first > end:
                self._begin_anew(text, piece.first)
                end = piece.first
            rows = piece.rows[end - piece.first :]
            if rows:
                found.append((text, len(rows)))
                index.extend(rows)
        if not index:
            return
        kept = taps[torch.tensor(index, device=taps.device)]
        parts = torch.split(kept, [number for _, number in found])
        for (text, _), part in zip(found, parts, strict=True):
            text.add(part)

    def _begin_anew(self, text: HeadText, start: int) -> None:
        """Begin a text of its own behind rows that the head will never see; no other finds it."""
        text.view.release()
        text.view = self.new_view(text.sequence, is_shared=False)
        text.start, text.waiting, text.num_waiting = start, [], 0

    def take_in(self) -> Iterator[DraftPass]:
        """The pass over rows that wait, where they are many, but for each text's last one."""
        texts = [
            text
            for text in list(self._texts.values())
            if text.num_ready > _MOST_WAITING
            and self.reserve(text, text.view.num_computed_tokens + text.num_ready - 1)
        ]
        if not texts:
            return
        taken = [text.take(text.num_ready - 1, num_logit_rows=0) for text in texts]
        yield DraftPass(
            slices=[piece for piece, _ in taken],
            owners=[text.sequence for text in texts],
            model="head",
            features=self._model.features_of_taps(torch.cat([taps for _, taps in taken])),
        )
        for text in texts:
            text.advance()

    def reserve(self, text: HeadText, num_slots: int) -> bool:
        """Reserve slots of accepted tokens; where there are none, the text is not read any more."""
        assert self._runner.max_context is not None
        try:
            if num_slots > self._runner.max_context:
                raise OutOfBlocksError
            self._runner.copy_blocks(text.view.reserve(num_slots))
        except OutOfBlocksError:
            self.forget(text.sequence)
            return False
        return True
