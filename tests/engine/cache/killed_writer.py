"""Kills processes that write and read extents in one folder: python FILE FOLDER NUM_KILLS SEED.

The killed are forked from this one, which imports everything once. They write the same few texts,
so that they meet. One that reads what was not written, or fails, says so in a file `garbage`.
"""

import hashlib
import os
import random
import signal
import sys
import time
from pathlib import Path

from outrider.engine.cache.block_pool import BlockHash, chain_hash
from outrider.engine.cache.extent_folder import ExtentFolder
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
