"""Read a checkpoint's tensors one by one, from safetensors or GGUF files on disk."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from outrider.engine.errors import UnsupportedModelError
from outrider.engine.model.checkpoint_files import ALL_FILES, read_object
from outrider.engine.model.families.text_parts import HEADS, PREFIXES, text_prefix
from outrider.engine.model.fingerprint import checkpoint_fingerprint
from outrider.engine.model.freed_memory import give_back_freed_memory
from outrider.engine.model.gguf.folder import LINK
from outrider.engine.model.gguf.header import read_header
from outrider.engine.model.gguf.tensors import GgufFile, tensor_names
from outrider.engine.model.quantised.decoders import decoder_of
from outrider.engine.model.quantised.formats import WeightFormat
from outrider.kernels.quantised.stored_weight import StoredWeight

ProgressCallback = Callable[[int, int], None]

# What has been read of a memory-mapped file counts as resident until it is closed.
_CLOSE_AFTER_BYTES = 8 << 20
# Of tensors that have been read: each is dropped once it is packed.
_GIVE_BACK_AFTER_BYTES = 8 << 20


def resolve_checkpoint(path_or_id: str | Path, revision: str | None = None) -> Path:
    """The local folder of a checkpoint; a hub id is downloaded (or found in the hub's cache).

    `revision`: of a hub id, a branch, a tag or a commit; None for main.

    Raises UnsupportedModelError if it is no folder and cannot be fetched.
    """
    folder = Path(path_or_id).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download  # 0.2 s that a local folder does not need

    try:
        return Path(
            snapshot_download(str(path_or_id), revision=revision, allow_patterns=list(ALL_FILES))
        )
    except (OSError, ValueError) as error:
        which = "" if revision is None else f" (revision {revision})"
        raise UnsupportedModelError(
            f"{path_or_id}{which} is not a local folder and could not be fetched from the Hugging "
            f"Face hub: {error}"
        ) from error


class CheckpointReader:
    """Hands out each tensor of a checkpoint by name, once, in the wanted dtype.

    With `text_only`, names are those of the text model of a checkpoint that takes images, too, and
    its other tensors are left alone. `weight_format` says how weights are quantised. They are
    decoded, but for those that products hold as they are (`keeps`).

    A context manager. Tensors are read from the file when they are asked for; nothing but the
    one handed out stays in memory. `on_progress(done_bytes, total_bytes)` is called after each.
    """

    def __init__(
        self,
        folder: Path,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        on_progress: ProgressCallback | None = None,
        text_only: bool = False,
        weight_format: WeightFormat | None = None,
        keeps: Callable[[StoredWeight], bool] | None = None,
    ) -> None:
        """Find the files; raises UnsupportedModelError if there are none or one is broken."""
        self._folder = folder
        self._dtype = dtype
        self._device = torch.device(device)
        self._on_progress = on_progress
        self._keeps = keeps
        self._decoder = None if weight_format is None else decoder_of(weight_format)
        self._file_of = _locate_tensors(folder)
        self._gguf = GgufFile(folder / LINK) if LINK in self._file_of.values() else None
        self._name_in_file: dict[str, str] = {}
        if text_only:
            self._keep_text()
        self._unread = set(self._file_of)
        self._open_name: str | None = None
        self._open_file: Any = None  # safe_open has no types
        self._open_bytes = 0
        self._freed_bytes = 0
        self.done_bytes = 0
        self.total_bytes = sum(
            (folder / name).stat().st_size for name in set(self._file_of.values())
        )
        self.num_parameters = 0

    def __enter__(self) -> Self:
        """Open nothing: files are opened when the first tensor is read."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file that is open, and give back what it took to read it."""
        self._close()
        give_back_freed_memory()

    def __contains__(self, name: str) -> bool:
        """True if the checkpoint has a tensor of this name."""
        return name in self._file_of

    @property
    def device(self) -> torch.device:
        """The device that tensors are handed out on."""
        return self._device

    @property
    def dtype(self) -> torch.dtype:
        """The type that tensors are handed out in: the activations' too."""
        return self._dtype

    def skip(self, name: str) -> None:
        """Count a weight as read, with its scales, whose numbers are known otherwise."""
        stem = name.removesuffix("weight")
        for each in [each for each in self._unread if each.startswith(stem)]:
            self.raw(each)
        if self._on_progress is not None:
            self._on_progress(min(self.done_bytes, self.total_bytes), self.total_bytes)

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits that change with the checkpoint."""
        return checkpoint_fingerprint(self._folder)

    @property
    def rounded_name(self) -> str:
        """The name under which rounded weights of these tensors are kept."""
        return self.fingerprint

    @property
    def num_whole_parameters(self) -> int:
        """Numbers of the whole model, as far as it has been read."""
        return self.num_parameters

    def read(self, name: str, shape: Iterable[int]) -> Tensor:
        """The tensor `name`; raises UnsupportedModelError if it is missing or misshapen."""
        stored = self._stored(name, shape)
        # copy: the stored tensor may be a view of the file's memory map, which is closed soon
        tensor: Tensor = stored.to(device=self._device, dtype=self._dtype, copy=True)
        del stored
        self._count(tensor.numel())
        return tensor.contiguous()

    def read_joined(self, names: Sequence[str], sizes: Sequence[int], width: int) -> Tensor:
        """Return matrices of so many rows one below the other; with the errors of `read`.

        They are copied to their place one by one, so that only one is in memory twice.
        """
        together, first = None, 0
        for name, size in zip(names, sizes, strict=True):
            stored = self._stored(name, (size, width))
            if together is None:
                together = torch.empty((sum(sizes), width), dtype=self._dtype, device=self._device)
            together[first : first + size] = stored
            del stored
            first += size
            self._count(size * width)
        assert together is not None, "a product has at least one weight"
        return together

    def _stored(self, name: str, shape: Iterable[int]) -> Tensor:
        """Return a tensor in floats, decoded where it has to be, perhaps a view of the file."""
        stored = self._decoded(name)
        if not isinstance(stored, Tensor):
            if name not in self._file_of:
                raise UnsupportedModelError(f"{self._folder}: the tensor {name} is missing.")
            stored = self.raw(name)
        self._expect_shape(name, stored.shape, shape)
        if not stored.dtype.is_floating_point or stored.dtype.itemsize < 2:
            raise UnsupportedModelError(
                f"{self._folder}: the tensor {name} is stored as {stored.dtype}, but config.json "
                "names no format of quantised weights."
            )
        return stored

    @property
    def may_keep_stored(self) -> bool:
        """False if `read_weight` returns plain numbers always."""
        has_format = self._decoder is not None or self._gguf is not None
        return self._keeps is not None and has_format

    def read_weight(self, name: str, shape: Iterable[int]) -> Tensor | StoredWeight:
        """Return a product's weight as it is stored, where products can hold it so.

        Else, and with the errors, as `read`.
        """
        shape = tuple(shape)
        found = self.read_stored(name, shape)
        if found is None:
            return self.read(name, shape)
        self._count(found.codes.numel())
        return found

    def read_stored(self, name: str, shape: Iterable[int]) -> StoredWeight | None:
        """Return a weight as it is stored; None for one that products do not hold so."""
        if self._keeps is None or (found := self._kept(name, shape)) is None:
            return None
        return found.to(self._device) if self._keeps(found) else None

    def _kept(self, name: str, shape: Iterable[int]) -> StoredWeight | None:
        """Return a weight as it is stored; None for one that has to be decoded."""
        found = self._decoded(name, as_stored=True)
        if not isinstance(found, StoredWeight):
            return None
        self._expect_shape(name, found.shape, shape)
        return found

    def _expect_shape(self, name: str, found: Iterable[int], wanted: Iterable[int]) -> None:
        if tuple(found) != tuple(wanted):
            raise UnsupportedModelError(
                f"{self._folder}: the tensor {name} has the shape {list(found)}, but "
                f"config.json requires {list(wanted)}."
            )

    def _count(self, num_parameters: int) -> None:
        """Count numbers that are copied: what has been read of the file is not needed again."""
        self.num_parameters += num_parameters
        if self._open_bytes > _CLOSE_AFTER_BYTES:
            self._close()
        if self._on_progress is not None:
            self._on_progress(min(self.done_bytes, self.total_bytes), self.total_bytes)

    def raw(self, name: str) -> Tensor:
        """Return a tensor as it is stored, a view of the file. Raises ValueError without it."""
        if name not in self._file_of:
            raise ValueError(f"the tensor {name} is missing")
        if self._gguf is not None:
            self._note(name, self._gguf.num_bytes(name))
            return self._gguf.get_tensor(name)
        stored: Tensor = self._file(self._file_of[name]).get_tensor(
            self._name_in_file.get(name, name)
        )
        self._open_bytes += stored.nbytes
        self._note(name, stored.nbytes)
        return stored

    def _note(self, name: str, num_bytes: int) -> None:
        """Count a tensor as read."""
        if name in self._unread:
            self._unread.discard(name)
            self.done_bytes += num_bytes
        self._freed_bytes += num_bytes
        if self._freed_bytes > _GIVE_BACK_AFTER_BYTES:
            self._freed_bytes = 0
            give_back_freed_memory()

    def _decoded(self, name: str, *, as_stored: bool = False) -> Tensor | StoredWeight | None:
        """Return a quantised weight's numbers, or, `as_stored`, what products hold of them.

        None for one that is stored plainly, and for one that has to be decoded.
        """
        if self._gguf is not None and as_stored and name in self._file_of:
            found = self._gguf.packed(name)
            if found is not None:
                self._note(name, self._gguf.num_bytes(name))
            return found
        if self._decoder is None:
            return None
        try:
            if as_stored:
                return self._decoder.packed(self, name)
            return self._decoder.decode(self, name)
        except (ValueError, ArithmeticError, RuntimeError) as error:  # torch's: shapes, memory
            raise UnsupportedModelError(f"{self._place_of(name)}: {name}: {error}") from error

    def _place_of(self, name: str) -> Path:
        """Return the file that has a weight's parts; the folder where none has."""
        stem = name.removesuffix("weight")
        files = (file for part, file in self._file_of.items() if part.startswith(stem))
        return self._folder / next(files, "")

    def rename(self, renamed: Callable[[str], str | None]) -> None:
        """Call tensors, none of which is read yet, what `renamed` makes of their names.

        Those of which it makes None are left alone.
        """
        stored = self._file_of
        names = {renamed(name): name for name in stored}
        self._name_in_file = {new: old for new, old in names.items() if new is not None}
        self._file_of = {new: stored[old] for new, old in self._name_in_file.items()}
        self._unread = set(self._file_of)

    def finish(
        self, *, ignorable: tuple[str, ...] = (), ignorable_prefixes: tuple[str, ...] = ()
    ) -> None:
        """Raise UnsupportedModelError if tensors are left that no one asked for.

        Names that end in one of `ignorable`, or begin with one of the prefixes, may be left.
        """
        if self._decoder is not None:
            ignorable += self._decoder.ignored
        unexpected = sorted(
            name
            for name in self._unread
            if not name.endswith(ignorable or ("\0",))
            and not name.startswith(ignorable_prefixes or ("\0",))
        )
        if unexpected:
            shown = ", ".join(unexpected[:5]) + (" …" if len(unexpected) > 5 else "")
            raise UnsupportedModelError(
                f"{self._folder}: {len(unexpected)} unexpected tensor(s), so config.json does not "
                f"describe these weights: {shown}"
            )
        if self._on_progress is not None:
            self._on_progress(self.total_bytes, self.total_bytes)

    def _keep_text(self) -> None:
        """Give the text model's tensors the names that they have in a checkpoint of their own."""
        stored = self._file_of
        prefix = required_text_prefix(self._folder, stored)
        self._name_in_file = {
            "model." + name.removeprefix(prefix): name for name in stored if name.startswith(prefix)
        }
        if (head := next((name for name in HEADS if name in stored), None)) is not None:
            self._name_in_file["lm_head.weight"] = head
        self._file_of = {name: stored[old] for name, old in self._name_in_file.items()}

    def _file(self, name: str) -> Any:
        if self._open_name != name or self._open_bytes > _CLOSE_AFTER_BYTES:
            self._close()
            self._open_file = _open(self._folder / name)
            self._open_name = name
        return self._open_file

    def _close(self) -> None:
        if self._open_file is not None:
            self._open_file.__exit__(None, None, None)
        self._open_file, self._open_name, self._open_bytes = None, None, 0


def required_text_prefix(folder: Path, names: Iterable[str] | None = None) -> str:
    """Return what stands before the names of a checkpoint's text model.

    `names`: of its tensors, read from the files where they are not given. Raises
    UnsupportedModelError for a checkpoint without a text model.
    """
    prefix = text_prefix(_locate_tensors(folder) if names is None else names)
    if prefix is None:
        shown = " or ".join(each + "embed_tokens.weight" for each in PREFIXES[:2])
        raise UnsupportedModelError(
            f"{folder} has no text model: none of its tensors is called {shown}."
        )
    return prefix


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise UnsupportedModelError(f"{path} cannot be read: {error}") from error


def _file_names(index: Path) -> dict[str, str]:
    """File name of each tensor name, as an index has them: of files beside it, not of others."""
    file_of = (read_object(index) or {}).get("weight_map")
    if not isinstance(file_of, dict):
        raise UnsupportedModelError(f"{index} has no object weight_map.")
    for name in file_of.values():
        is_file = isinstance(name, str) and name.endswith(".safetensors")
        if not is_file or Path(name).name != name:
            raise UnsupportedModelError(
                f"{index} names {str(name)[:200]!r}; it has to be a *.safetensors beside it."
            )
    return file_of


def _locate_tensors(folder: Path) -> dict[str, str]:
    """File name of each tensor name."""
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if (folder / LINK).is_file():
        return dict.fromkeys(tensor_names(read_header(folder / LINK)), LINK)
    if index.is_file():
        file_of = _file_names(index)
        absent = sorted({name for name in file_of.values() if not (folder / name).is_file()})
        if absent:
            raise UnsupportedModelError(
                f"{folder}: {index.name} names {', '.join(absent)}, which does not exist."
            )
        return file_of
    if single.is_file():
        with _open(single) as file:
            return dict.fromkeys(file.keys(), single.name)
    others = sorted(path.name for path in folder.glob("*.bin"))
    found = f" It has {', '.join(others[:3])}, a format that is not supported." if others else ""
    if files := sorted(path.name for path in folder.glob("*.gguf")):
        found = f" It has {files[0]} beside config.json: name that file, or move it to a folder."
    raise UnsupportedModelError(f"{folder} has no model.safetensors.{found}")
