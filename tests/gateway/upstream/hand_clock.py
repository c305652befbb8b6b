"""A clock that goes on when it is told to."""


class HandClock:
    """Seconds; call it to read it, add to `now_s` to move it."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s
