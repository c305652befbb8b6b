"""Exit codes of `outrider bench`."""

from typing import Final

EXIT_FAILED: Final = 1

EXIT_USAGE: Final = 2

EXIT_TOO_SLOW: Final = 3

EXIT_STOPPED: Final = 130
