"""Kills processes that write and read extents in one folder: python FILE FOLDER NUM_KILLS SEED.

The killed are forked from this one, which imports everything once. They write the same few texts,
so that they meet. One that reads what was not written, or fails, says so in a file `garbage`.
`findings` says what they left.
"""

import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from outrider.engine.cache.block_pool import BlockHash, chain_hash
from outrider.engine.cache.extent_folder import ExtentFolder, check_extents
from outrider.engine.cache.extent_space import About
from outrider.engine.cache.extent_store import ExtentStore
from outrider.engine.cache.extents import Extent, ExtentHeader
from outrider.engine.cache.sealing import Seal

BUDGET_BYTES = 2**21
KEY = bytes(range(32))
ABOUT = About(model="a-model", fingerprint="f" * 32)
_NUM_TEXTS = 40
_EXTENT_BYTES = 100_000
_MOST_LIFE_S = 0.02
_LATER_S = 120.0  # partial files are removed by then


def kill(place: Path, *, num_kills: int, seed: int, timeout_s: float) -> dict[str, int]:
    """Kill so many processes that use a folder, which is made; return what they left."""
    place.mkdir(mode=0o700)
    command = [sys.executable, __file__, str(place), str(num_kills), str(seed)]
    subprocess.run(command, check=True, timeout=timeout_s)
    return findings(place)


def findings(place: Path) -> dict[str, int]:
    """Return what lies in a folder, now and when it was cleaned up two minutes later.

    num_garbage: processes that read what nobody wrote, or failed. num_damaged: files that are not
    what was written. num_others_left: partial files, and others that are no extents.
    """
    checked = list(check_extents(place, Seal(KEY)))
    files = [path for path, _ in checked]
    found = {
        "num_garbage": int((place / "garbage").exists()),
        "num_files": len(files),
        "num_damaged": sum(error is not None for _, error in checked),
        "num_bytes": sum(path.stat().st_size for path in files),
        "budget_bytes": BUDGET_BYTES,
    }
    folder = ExtentFolder(
        place,
        seal=Seal(KEY),
        budget_bytes=BUDGET_BYTES,
        ttl_s=1e6,
        clock=lambda: time.time() + _LATER_S,
    )
    space = folder.space(ABOUT)
    folder.collect()
    left = [path for path in space.folder.iterdir() if path.name != "about.json"]
    return found | {
        "num_bytes_later": sum(path.stat().st_size for path in left if path.suffix == ".kv"),
        "num_bytes_counted_later": folder.num_bytes,
        "num_others_left": sum(path.suffix != ".kv" for path in left),
    }


def main() -> None:
    """Kill so many processes, two at a time, at moments drawn from the seed."""
    place, num_kills, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    rng = random.Random(seed)
    for number in range(0, num_kills, 2):
        pids = [_start(place, seed=number + each) for each in range(2)]
        time.sleep(rng.uniform(0.0, _MOST_LIFE_S))
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _start(place: Path, *, seed: int) -> int:
    """Fork a process that uses a store until it is killed; return when it has begun to."""
    begun, beginning = os.pipe()
    pid = os.fork()
    if pid == 0:
        _use_store(place, random.Random(seed), beginning)
    os.close(beginning)
    assert os.read(begun, 1) == b"!"
    os.close(begun)
    return pid


def _use_store(place: Path, rng: random.Random, beginning: int) -> None:
    try:
        folder = ExtentFolder(place, seal=Seal(KEY), budget_bytes=BUDGET_BYTES, ttl_s=1e6)
        store, space = ExtentStore(folder), folder.space(ABOUT)
        os.write(beginning, b"!")
        while True:
            text = rng.randrange(_NUM_TEXTS)
            found = space.match([_hash_of(text)], 0)
            if found is None or rng.random() < 0.2:
                store.write(space, extent_of(text))
                continue
            extent = store.read(space, found[0]).result()
            if store.counts.num_damaged or (extent is not None and extent != extent_of(text)):
                raise RuntimeError(found[0].file_name)
    except Exception as error:  # noqa: BLE001 - whatever it is, the test is to know
        (place / "garbage").write_text(repr(error), encoding="utf-8")
    finally:
        os._exit(1)


def _hash_of(text: int) -> BlockHash:
    return chain_hash(b"root", [text])


def extent_of(text: int) -> Extent:
    """Return what is written of a text."""
    payload = hashlib.shake_128(b"%d" % text).digest(_EXTENT_BYTES)
    header = ExtentHeader(
        fingerprint=ABOUT.fingerprint,
        kind="blocks",
        first=0,
        parent=b"root",
        hashes=(_hash_of(text),),
        shapes=((len(payload),),),
    )
    return Extent(header=header, payload=payload)


if __name__ == "__main__":
    main()
