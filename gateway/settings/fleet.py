"""Settings of several engines behind one gateway (`[fleet]`)."""

from pydantic import Field

from outrider.gateway.settings.sections import Section


class FleetSettings(Section):
    """The engines of `engine.replicas` as a whole."""

    audit_share: float = Field(default=0.0, ge=0, le=1)
    """Share of answers that another engine of the same arithmetic judges while it is idle; private
    requests never are. 0: none."""
    audit_removes_at: float = Field(default=0.05, ge=0, le=1)
    """An engine that alone differed from all others in this share of its last 50 audits, and three
    times at least, gets no new requests; 0: it is told of only. With two engines nothing tells
    which of them is wrong."""
