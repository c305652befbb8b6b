"""The children of instruments with labels."""

from typing import Generic, TypeVar

from prometheus_client.metrics import MetricWrapperBase

Instrument = TypeVar("Instrument", bound=MetricWrapperBase)


class Children(Generic[Instrument]):
    """One instrument's children by their labels, kept.

    prometheus_client takes two microseconds each time that it is asked for a child it has.
    """

    __slots__ = ("_found", "instrument")

    def __init__(self, instrument: Instrument) -> None:
        self.instrument = instrument
        self._found: dict[tuple[str, ...], Instrument] = {}

    def of(self, *labels: str) -> Instrument:
        """Return the child with these values of the labels, in their order."""
        found = self._found.get(labels)
        if found is None:
            found = self._found[labels] = self.instrument.labels(*labels)
        return found
