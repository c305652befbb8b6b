"""A process that writes extents without end, for tests that kill it: python FILE FOLDER."""

import itertools
import os
import sys
from pathlib import Path

from outrider.engine.cache.block_pool import chain_hash
from outrider.engine.cache.extent_folder import ExtentFolder
from outrider.engine.cache.extent_space import About
from outrider.engine.cache.extents import Extent, ExtentHeader
from outrider.engine.cache.sealing import Seal

BUDGET_BYTES = 2**21
KEY = bytes(range(32))
ABOUT = About(model="a-model", fingerprint="f" * 32)


def main() -> None:
    """Write until the end."""
    folder = ExtentFolder(Path(sys.argv[1]), seal=Seal(KEY), budget_bytes=BUDGET_BYTES, ttl_s=1e6)
    space = folder.space(ABOUT)
    for number in itertools.count():
        payload = os.urandom(100_000)
        header = ExtentHeader(
            fingerprint=ABOUT.fingerprint,
            kind="blocks",
            first=0,
            parent=b"root",
            hashes=(chain_hash(b"root", [os.getpid(), number]),),
            shapes=((len(payload),),),
        )
        folder.write(space, Extent(header=header, payload=payload))
        if number == 0:
            sys.stdout.write("begun\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
