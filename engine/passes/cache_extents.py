"""Moves blocks and recurrent states between a runner's caches and extents.

What comes in is what a pass has left there, bit for bit. So a text that goes on behind it is the
one that goes on behind blocks that never left.
"""

import hashlib
from collections.abc import Iterator, Sequence
from functools import cache, cached_property
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.engine.cache.block_pool import BlockHash, BlockPool, OutOfBlocksError, chain_hash
from outrider.engine.cache.extents import (
    Extent,
    ExtentError,
    ExtentHeader,
    ExtentKind,
    blocks_per_extent,
)
from outrider.engine.cache.recurrent_lines import RecurrentPool
from outrider.engine.model.kv_cache import KVCache, LayerGroup
from outrider.engine.passes.cache_moves import CacheMoves
from outrider.engine.passes.processor import processor_name
from outrider.engine.passes.recurrent_states import RecurrentStates


class _Taken(NamedTuple):
    """A block that an extent is written to."""

    place: int
    block: int
    is_new: bool


class CacheExtents:
    """`export_blocks` and `import_blocks` of one runner.

    `numerics`: the runner's; with the code, the machine and the block size it is the fingerprint.
    """

    def __init__(
        self,
        kv_cache: KVCache,
        pool: BlockPool,
        recurrent: RecurrentStates | None,
        moves: CacheMoves,
        *,
        numerics: str,
    ) -> None:
        self._cache = kv_cache
        self._pool = pool
        self._recurrent = recurrent
        self._moves = moves
        full, window = (_block_shapes(group) for group in (kv_cache.full, kv_cache.window))
        # Where windowed layers are apart but not smaller, their keys are those of the same blocks.
        self._shapes = full if pool.window is not None else full + window
        self._window_shapes = window if pool.window is not None else []
        block_bytes = sum(_num_bytes(shape) for shape in (*full, *window))
        self.block_bytes = block_bytes
        self.blocks_per_extent = blocks_per_extent(block_bytes)
        self._numerics = numerics

    @cached_property
    def fingerprint(self) -> str:
        """Return 32 hexadecimal digits of all that the numbers in the cache depend on."""
        shapes = (self._shapes, self._window_shapes)
        facts = (self._numerics, self._pool.block_size, shapes, code_digest())
        return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]

    @property
    def states(self) -> RecurrentPool | None:
        """Return the states of recurrent layers; None where there are none."""
        return None if self._recurrent is None else self._recurrent.pool

    # ---- out --------------------------------------------------------------------------------

    @torch.inference_mode()
    def export_blocks(
        self,
        hashes: Sequence[BlockHash],
        *,
        first: int = 0,
        parent: BlockHash = b"",
        owner: str = "",
    ) -> list[Extent]:
        """Return the cached blocks of these hashes, which follow each other, and their states.

        `first`: the index of the first one in its text; `parent`: the hash before it; `owner`:
        whose text it is. What the cache has not is left out. Windowed keys come with the blocks
        that have them.
        """
        found = [self._pool.find(each) for each in hashes]
        runs = groupby(range(len(hashes)), lambda index: self._kind(found[index]))
        extents: list[Extent] = []
        for kind, indices in runs:
            if kind is None:
                continue
            run = list(indices)
            for start in range(0, len(run), self.blocks_per_extent):
                part = run[start : start + self.blocks_per_extent]
                blocks = [block for index in part if (block := found[index]) is not None]
                header = self._header(
                    kind,
                    first=first + part[0],
                    parent=hashes[part[0] - 1] if part[0] else parent,
                    hashes=tuple(hashes[index] for index in part),
                    owner=owner,
                )
                extents.append(Extent(header=header, payload=self._read(kind, blocks)))
        return extents + list(self._states(hashes, first, owner))

    def _kind(self, block: int | None) -> ExtentKind | None:
        if block is None:
            return None
        window = self._pool.window
        if window is None:
            return "blocks"
        if window.has(block):
            return "windowed"
        return "blocks" if self._shapes else None  # nothing is left of it

    def _header(
        self,
        kind: ExtentKind,
        *,
        first: int,
        parent: BlockHash,
        hashes: tuple[BlockHash, ...],
        owner: str,
    ) -> ExtentHeader:
        shapes = self._expected(kind, len(hashes))
        return ExtentHeader(
            fingerprint=self.fingerprint,
            kind=kind,
            first=first,
            parent=parent,
            hashes=hashes,
            shapes=tuple(shapes),
            owner=owner,
        )

    def _expected(self, kind: ExtentKind, number: int) -> list[tuple[int, ...]]:
        """Return the shapes of an extent's arrays of bytes."""
        if kind == "state":
            return [] if self._recurrent is None else self._recurrent.state_shapes
        own = self._shapes + (self._window_shapes if kind == "windowed" else [])
        return [(*shape[:2], number, *shape[2:]) for shape in own]

    def _read(self, kind: ExtentKind, blocks: list[int]) -> bytes:
        parts = [
            array.index_select(2, torch.tensor(own, device=array.device))
            for array, own in self._arrays(kind, blocks)
        ]
        return b"".join(part.cpu().numpy().tobytes() for part in parts)

    def _arrays(self, kind: ExtentKind, blocks: list[int]) -> Iterator[tuple[Tensor, list[int]]]:
        """Yield all arrays of the cache that an extent is of, as bytes, with the blocks in each."""
        window = self._pool.window
        if self._cache.full is not None:
            yield from ((array, blocks) for array in _as_bytes(self._cache.full))
        if self._cache.window is not None and window is None:
            yield from ((array, blocks) for array in _as_bytes(self._cache.window))
        elif self._cache.window is not None and window is not None and kind == "windowed":
            own = [window.block_of(block) for block in blocks]
            yield from ((array, own) for array in _as_bytes(self._cache.window))

    def _states(self, hashes: Sequence[BlockHash], first: int, owner: str) -> Iterator[Extent]:
        if self._recurrent is None:
            return
        for index, block_hash in enumerate(hashes):
            state = self._recurrent.pool.states.find(block_hash)
            if state is not None:
                header = self._header(
                    "state", first=first + index, parent=b"", hashes=(block_hash,), owner=owner
                )
                yield Extent(header=header, payload=self._recurrent.read_state(state))

    # ---- in ---------------------------------------------------------------------------------

    @torch.inference_mode()
    def import_blocks(
        self,
        extents: Sequence[Extent],
        *,
        root: BlockHash = b"",
        token_ids: Sequence[int] | None = None,
        keep: list[int] | None = None,
    ) -> list[BlockHash]:
        """Publish what extents hold; returns the hashes that the cache has now and held not before.

        `token_ids`: the text, whose chain of hashes from `root` the blocks must be of; those behind
        where an extent's text parts from it are left out. `keep`: gets
        the blocks, held, for the caller to release, the last first; without it nobody holds them,
        and they are found until they are evicted. What finds no room is left out. Raises
        ExtentError for an extent of another cache or text; those before it are in.
        """
        imported: list[BlockHash] = []
        held: list[int] = [] if keep is None else keep
        try:
            for extent in extents:
                number = self._check(extent, root, token_ids)
                if extent.header.kind == "state":
                    imported += self._import_state(extent)
                else:
                    imported += self._import(extent, number, held, root, token_ids)
        except OutOfBlocksError:
            pass
        finally:
            if keep is None:
                self._pool.release(reversed(held))
        return imported

    def _check(self, extent: Extent, root: BlockHash, token_ids: Sequence[int] | None) -> int:
        """Return how many blocks of an extent are of a text; all without one.

        Raises ExtentError for an extent that is not of this cache, or of another text.
        """
        header = extent.header
        if header.fingerprint != self.fingerprint:
            raise ExtentError(f"of another model or cache: {header.fingerprint}")
        if header.kind not in ("blocks", "windowed", "state") or not header.hashes:
            raise ExtentError("of a kind that is not known")
        if list(header.shapes) != self._expected(header.kind, len(header.hashes)):
            raise ExtentError("of other shapes")
        if token_ids is None or header.kind == "state":
            return len(header.hashes)
        size, parent, number = self._pool.block_size, header.parent, 0
        for index, block_hash in enumerate(header.hashes, start=header.first):
            parent = chain_hash(parent, token_ids[index * size : (index + 1) * size])
            if parent != block_hash:
                break
            number += 1
        if not number or (header.first == 0 and header.parent != root):
            raise ExtentError("of another text")
        return number

    def _import(
        self,
        extent: Extent,
        number: int,
        held: list[int],
        root: BlockHash,
        token_ids: Sequence[int] | None,
    ) -> list[BlockHash]:
        header, window = extent.header, self._pool.window
        taken = self._take(header, number, held)
        if window is not None and header.kind == "windowed":
            taken = taken[: window.num_available]
            for each in taken:
                window.hold(each.block)
            self._moves.apply_window_changes()
        self._write(extent, taken)
        for each in taken:
            if each.is_new:
                self._publish(header, each, root, token_ids or ())
            if window is not None and header.kind == "windowed":
                window.let_go(each.block)
        return [header.hashes[each.place] for each in taken]

    def _take(self, header: ExtentHeader, number: int, held: list[int]) -> list[_Taken]:
        """Hold the first blocks of an extent, while there is room; return those to write."""
        pool, taken = self._pool, []
        for place, block_hash in enumerate(header.hashes[:number]):
            block = pool.find(block_hash)
            is_new = block is None
            if block is not None:
                pool.share(block)
            elif pool.num_available:
                block = pool.allocate()
            else:
                break
            held.append(block)
            if is_new or self._lacks_window(header, block):
                taken.append(_Taken(place, block, is_new))
        return taken

    def _lacks_window(self, header: ExtentHeader, block: int) -> bool:
        window = self._pool.window
        return header.kind == "windowed" and window is not None and not window.has(block)

    def _publish(
        self, header: ExtentHeader, taken: _Taken, root: BlockHash, token_ids: Sequence[int]
    ) -> None:
        place, size = taken.place, self._pool.block_size
        start = (header.first + place) * size
        self._pool.publish(
            taken.block,
            header.hashes[place],
            parent=header.hashes[place - 1] if place else header.parent,
            root=root,
            token_ids=token_ids[start : start + size],
        )

    def _write(self, extent: Extent, taken: Sequence[_Taken]) -> None:
        if not taken:
            return
        kind, number = extent.header.kind, len(extent.header.hashes)
        chosen = torch.tensor([each.place for each in taken])
        arrays = self._arrays(kind, [each.block for each in taken])
        parts = _arrays_of(extent, self._expected(kind, number))
        for (array, own), part in zip(arrays, parts, strict=True):
            rows = part if len(taken) == number else part.index_select(2, chosen)
            array.index_copy_(2, torch.tensor(own, device=array.device), rows.to(array.device))

    def _import_state(self, extent: Extent) -> list[BlockHash]:
        assert self._recurrent is not None, "its shapes were compared"
        (block_hash,) = extent.header.hashes
        states = self._recurrent.pool.states
        if states.find(block_hash) is not None:
            return []
        state = states.allocate()
        self._recurrent.write_state(state, _arrays_of(extent, self._expected("state", 1)))
        states.publish(state, block_hash)
        states.release([state])
        return [block_hash]


def _as_bytes(group: LayerGroup) -> Iterator[Tensor]:
    yield group.tensor.view(torch.uint8)
    if group.scales is not None:
        yield group.scales.view(torch.uint8)


def _block_shapes(group: LayerGroup | None) -> list[tuple[int, ...]]:
    """Return the shapes of one block in a group's arrays of bytes, without the blocks' axis."""
    if group is None:
        return []
    return [(*array.shape[:2], *array.shape[3:]) for array in _as_bytes(group)]


def _num_bytes(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _arrays_of(extent: Extent, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Return an extent's arrays of bytes."""
    # Torch wants memory that may be written; nothing writes to it.
    payload = torch.frombuffer(bytearray(extent.payload), dtype=torch.uint8)
    parts = torch.split(payload, [_num_bytes(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


@cache
def code_digest() -> str:
    """Return a digest of the code that computes, of its libraries' versions and the processor.

    Numbers on a disk outlive an upgrade; what another code has computed is not taken for its own.
    """
    digest = hashlib.sha256(f"{torch.__version__} {version('transformers')}".encode())
    engine = Path(__file__).parents[1]
    for folder in (engine / "model", engine.parent / "kernels"):
        for path in sorted(folder.rglob("*")):
            if path.suffix in (".py", ".so", ".dylib"):
                digest.update(path.name.encode() + path.read_bytes())
    digest.update(processor_name().encode())
    return digest.hexdigest()
