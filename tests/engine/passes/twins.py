"""Two runners of one model that are given the same passes: one plain, one through step buffers."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from outrider.engine.cache.kv_view import KVView
from outrider.engine.model.protocol import CausalModel
from outrider.engine.passes.device_rows import DeviceRows
from outrider.engine.passes.flat_rows import ForwardSlice
from outrider.engine.passes.runner import ModelRunner, PassOutput
from outrider.engine.passes.step_buffers import mask_words
from outrider.kernels.triton_support import use_kernels
from outrider.verifier.token_tree import TokenTree

BLOCK_SIZE = 4
NUM_BLOCKS = 160


def record_eagerly(run: Callable[[], None]) -> Callable[[], None]:
    """Stands in for a CUDA graph: runs once, as warming up does, and again at every replay."""
    run()
    return run


@dataclass
class Piece:
    """A sequence's part of a pass: rows behind the computed ones, or a tree from there on."""

    sequence: int
    token_ids: list[int]
    num_logit_rows: int
    tree: TokenTree | None = None

    @property
    def num_slots(self) -> int:
        return len(self.token_ids)


@dataclass
class Twin:
    """A runner and the views of some sequences, whose blocks are handed out in a set order."""

    runner: ModelRunner
    views: list[KVView] = field(default_factory=list)

    def reset(self) -> None:
        """Empty the cache."""
        for view in self.views:
            view.release()
        self.views.clear()
        self.runner.kv_cache.groups[0].tensor.zero_()

    def view(self, sequence: int) -> KVView:
        while len(self.views) <= sequence:
            self.views.append(self.runner.new_view(""))
        return self.views[sequence]

    def slice_of(self, piece: Piece) -> ForwardSlice:
        view = self.view(piece.sequence)
        start = view.num_computed_tokens
        self.runner.copy_blocks(view.reserve(start + piece.num_slots))
        tree = piece.tree
        return ForwardSlice(
            view=view,
            token_ids=piece.token_ids,
            start_slot=start,
            num_logit_rows=piece.num_logit_rows,
            positions=None if tree is None else [start + depth for depth in tree.depth],
            tree_start=None if tree is None else start,
            ancestor_masks=None if tree is None else tree.ancestor_mask,
        )

    def run(self, pieces: list[Piece]) -> PassOutput:
        return self.runner.forward([self.slice_of(piece) for piece in pieces])

    def advance(self, pieces: list[Piece]) -> None:
        """Take in the rows of all that are no trees."""
        for piece in pieces:
            view = self.view(piece.sequence)
            if piece.tree is None:
                view.advance(view.num_computed_tokens + len(piece.token_ids), [])
            view.trim()


def make_twin(model: CausalModel, **options: Any) -> Twin:
    return Twin(
        ModelRunner(
            model=model,
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            prefix_caching=False,
            **options,
        )
    )


def make_twins(model: CausalModel, *, max_rows: int = 32, **options: object) -> tuple[Twin, Twin]:
    """A runner that plans on the host, and one whose passes go through buffers and recordings."""
    plain, staged = make_twin(model, **options), make_twin(model, **options)
    with use_kernels("reference"):
        assert staged.runner.capture_graphs(capture=record_eagerly, max_rows=max_rows) > 0
    return plain, staged


@torch.inference_mode()
def poison(runner: ModelRunner) -> None:
    """Whatever a pass does not write anew is nonsense from now on."""
    graphs = runner._graphs
    assert graphs is not None
    graphs._words.fill_(0x7ABCDEF07ABCDEF0)
    graphs._logits.fill_(torch.nan)
    graphs._hidden.fill_(torch.nan)
    for static in (graphs._taps, graphs._features):
        if static is not None:
            static.fill_(torch.nan)
    if graphs._paths is not None:
        graphs._paths.fill_(0x7ABCDEF)


def random_tree(rng: random.Random, num_nodes: int, vocab_size: int) -> TokenTree:
    reach = rng.choice([1, 2, 6])  # 1 makes a chain, deeper than the tests' windows
    parents = [-1] + [rng.randrange(max(0, node - reach), node) for node in range(1, num_nodes)]
    tokens = [rng.randrange(vocab_size) for _ in parents]
    return TokenTree(token_ids=tokens, parent_index=parents, sources=[0] * num_nodes)


def random_pass(
    rng: random.Random, *, vocab_size: int, sizes: list[int], num_trees: int
) -> list[Piece]:
    """Rows for so many sequences each; the last `num_trees` are trees."""
    pieces = []
    for sequence, size in enumerate(sizes):
        tree = None
        if sequence >= len(sizes) - num_trees:
            tree = random_tree(rng, size, vocab_size)
        tokens = tree.token_ids if tree else [rng.randrange(vocab_size) for _ in range(size)]
        wanted = size if tree else rng.choice([0, 1, size])
        pieces.append(Piece(sequence=sequence, token_ids=tokens, num_logit_rows=wanted, tree=tree))
    return pieces


def device_rows(
    twin: Twin, pieces: list[Piece], rng: random.Random, *, num_words: int = 4
) -> tuple[DeviceRows, list[int]]:
    """Trees as the device would hold them, with padding between, and their real rows' numbers."""
    rows: list[tuple[int, int, int, int, int]] = []  # token, position, slot, sequence, mask
    bounds: list[tuple[int, int, int, int]] = []
    real: list[int] = []
    views = []

    def pad(sequence: int) -> None:  # with things that would do harm if they were used
        rows.append((rng.choice([0, 10**9]), rng.choice([-3, 7]), -1, sequence, rng.randrange(4)))

    for sequence, piece in enumerate(pieces):
        piece_rows = twin.slice_of(piece)
        assert piece_rows.ancestor_masks is not None
        assert piece_rows.positions is not None
        views.append(piece_rows.view)
        first = len(rows)
        for place, (position, mask) in enumerate(
            zip(piece_rows.positions, piece_rows.ancestor_masks, strict=True)
        ):
            if rng.random() < 0.2:
                pad(sequence)  # belongs to the sequence, but is a place that nobody took
            real.append(len(rows))
            slot = piece_rows.start_slot + place
            rows.append((piece.token_ids[place], position, slot, sequence, mask))
        bounds.append((first, len(rows) - first, piece_rows.start_slot, piece_rows.end_slot))
        for _ in range(rng.choice([0, 0, 2])):
            pad(sequence)  # belongs to nobody
    device = twin.runner.device
    columns = torch.tensor([row[:4] for row in rows], device=device).T.contiguous()
    of_sequences = torch.tensor(bounds, dtype=torch.int32, device=device).T.contiguous()
    words = torch.from_numpy(mask_words([row[4] for row in rows]).copy())[:, :num_words]
    return DeviceRows(
        views=views,
        token_ids=columns[0],
        positions=columns[1],
        logical_slots=columns[2],
        sequence_index=columns[3],
        ancestor_words=words.to(device),
        row_starts=of_sequences[0],
        num_rows=of_sequences[1],
        tree_starts=of_sequences[2],
        kv_lens=of_sequences[3],
    ), real
