"""/v1/verify and the published keys in the OpenAPI document."""

from typing import Any

from outrider.gateway.contract.schema.openapi import operation, question_operation
from outrider.gateway.contract.schema.receipts import PublishedKeys
from outrider.gateway.http.apis.verify.schema import VerificationReport, VerifyRequest


def verify_operation() -> dict[str, Any]:
    """A POST of an answer."""
    return question_operation(
        (VerifyRequest,), VerificationReport, "How it agrees with its receipt.", "verify"
    )


def keys_operation() -> dict[str, Any]:
    """A GET of public keys."""
    return operation(PublishedKeys, "Keys of receipts.", 404, operation_id="receiptKeys")
