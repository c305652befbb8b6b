"""The end of an answer that its server cut short, so that another model may go on."""

from outrider.gateway.contract.errors.tree import GatewayError
from outrider.gateway.contract.schema.kinds import FallbackKind


class CutShortError(GatewayError):
    """Raised by a responder whose server ended the answer early; another model may go on.

    `kind`: content_filter or context_length. `ending`: the parts that end the answer as the server
    did, for where no other model goes on.
    """

    def __init__(self, kind: FallbackKind, ending: bytes) -> None:
        super().__init__(f"The answer was ended early ({kind}).", code=kind)
        self.kind: FallbackKind = kind
        self.ending = ending
