"""The part of a request's context that its job depends on."""

from typing import Protocol

from gateway.slo.classes import ResolvedObjective
from gateway.telemetry.tracer import Span
from gateway.tenants.keys import Principal


class ObjectiveRecord(Protocol):
    """Notes the latency that a request is served under."""

    def serve_under(self, resolved: ResolvedObjective) -> None:
        """Note it; a later call replaces an earlier one."""


class JobContext(Protocol):
    """The asking key, the arrival, the experiments' arms, and where the job is recorded.

    `arm`: the arms in words. has_arms_slo: the latency objective is set by an arm, not by the
    request. `meter`: None where the request is not answered.
    """

    @property
    def arrival_s(self) -> float: ...
    @property
    def principal(self) -> Principal: ...
    @property
    def arm(self) -> str: ...
    @property
    def has_arms_slo(self) -> bool: ...
    @property
    def meter(self) -> ObjectiveRecord | None: ...
    @property
    def span(self) -> Span: ...
