"""A receipt: what an answer was made of, as commitments and numbers, in one canonical form.

The signed bytes are the payload's JSON by RFC 8785, of which nothing but a sorted, compact form is
left: names are ASCII, whole numbers lie below 2**53, and every other number is a text, as Python's
`repr` writes a float. The nonces stand beside the payload. Who has the receipt without them learns
nothing of prompt and answer, and can be shown either of them later.
"""

import hashlib
import secrets
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from outrider.engine.request import EngineRequest
from outrider.gateway.contract.schema.receipts import (
    Commitment,
    Nonces,
    Receipt,
    ReceiptCascade,
    ReceiptPayload,
    ReceiptSampling,
)
from outrider.gateway.receipts.signing_keys import SigningKeys, from_base64, to_base64
from outrider.verifier.params import ThinkingBudget

VERSION: Final = 1

Part = Literal["prompt", "answer"]

_NONCE_BYTES: Final = 16
_canonical: Final = msgspec.json.Encoder(order="sorted").encode


def canonical(payload: ReceiptPayload | Mapping[str, Any]) -> bytes:
    """Return the bytes that are signed."""
    return _canonical(payload)


def draw_nonces() -> Nonces:
    """Return the nonces of one choice."""
    prompt, answer = (to_base64(secrets.token_bytes(_NONCE_BYTES)) for _ in range(2))
    return Nonces(prompt=prompt, answer=answer)


def commit(part: Part, nonce: str, token_ids: Sequence[int]) -> Commitment:
    """Commit to tokens. Raises ValueError for a nonce that is none."""
    raw = from_base64(nonce)
    if len(raw) != _NONCE_BYTES:
        raise ValueError(f"a nonce has {_NONCE_BYTES} bytes, not {len(raw)}")
    label = f"outrider-receipt/{VERSION}/{part}\0".encode()
    ids = struct.pack(f"<{len(token_ids)}I", *token_ids)
    digest = hashlib.sha256(label + raw + ids).hexdigest()
    return Commitment(sha256=digest, num_tokens=len(token_ids))


def sampling_of(request: EngineRequest, *, small_checkpoint: str | None = None) -> ReceiptSampling:
    """Return what decided an answer's tokens.

    `small_checkpoint`: the small model's fingerprint, which a cascade names.
    """
    params, grammar, cascade = request.sampling, request.grammar, request.cascade
    return ReceiptSampling(
        temperature=repr(params.temperature),
        top_k=params.top_k,
        top_p=repr(params.top_p),
        min_p=repr(params.min_p),
        presence_penalty=repr(params.presence_penalty),
        frequency_penalty=repr(params.frequency_penalty),
        repetition_penalty=repr(params.repetition_penalty),
        min_tokens=params.min_tokens,
        logit_bias=[(token, repr(bias)) for token, bias in params.logit_bias],
        stop_token_ids=list(params.stop_token_ids) if params.min_tokens else [],
        grammar=None if grammar is None else _digest(f"{grammar.kind}\0{grammar.text}"),
        thinking=None if params.thinking is None else _digest(_budget(params.thinking)),
        cascade=None
        if cascade is None
        else ReceiptCascade(
            alpha=repr(cascade.alpha), rule=cascade.rule, checkpoint=small_checkpoint or None
        ),
    )


def sign(payload: ReceiptPayload, nonces: list[Nonces], keys: SigningKeys) -> Receipt:
    """Sign a receipt. Raises NoSigningKeyError."""
    key_id, signature = keys.sign(canonical(payload))
    return Receipt(payload=payload, key_id=key_id, signature=signature, nonces=nonces)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()


def _budget(thinking: ThinkingBudget) -> str:
    return repr((thinking.max_tokens, thinking.opens, thinking.closes))
