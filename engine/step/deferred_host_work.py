"""The host's work that can wait until the device has something to do."""

from collections.abc import Callable


class DeferredHostWork:
    """Does put-off work right after a pass was started, while the device is busy with it.

    `overlaps`: off, nothing is ever put off. Passes on the CPU are over when they return, so there
    is nothing to wait beside.
    """

    def __init__(self, *, overlaps: bool) -> None:
        self.overlaps = overlaps
        self._waiting: list[Callable[[], None]] = []

    def defer(self, work: Callable[[], None]) -> None:
        """Have it done beside the next pass, behind what was put off before; or do it now."""
        if self.overlaps:
            self._waiting.append(work)
        else:
            work()

    def run(self) -> None:
        """Do all of it."""
        waiting, self._waiting = self._waiting, []
        for work in waiting:
            work()
