"""Receipts as they are sent, read back, and published (docs/receipts.md)."""

from typing import Annotated, Literal

from outrider.gateway.contract.schema.structs import CompleteModel, says

Number = Annotated[str, says("A number as text, so that its form is one and the same everywhere.")]


class Commitment(CompleteModel, kw_only=True):
    """Stands for tokens without telling them."""

    sha256: Annotated[str, says("Of a label, a nonce of 16 bytes, and the ids in 4 bytes each.")]
    num_tokens: int


class ReceiptCascade(CompleteModel, kw_only=True):
    """The speculative cascade of an answer."""

    alpha: Number
    rule: str
    checkpoint: Annotated[str | None, says("The small model's; the payload's is the large one's.")]


class ReceiptSampling(CompleteModel, kw_only=True):
    """Everything that decided the tokens beside the models, the prompt and the noise."""

    temperature: Number
    top_k: int
    top_p: Number
    min_p: Number
    presence_penalty: Number
    frequency_penalty: Number
    repetition_penalty: Number
    min_tokens: int
    logit_bias: list[tuple[int, Number]]
    stop_token_ids: Annotated[list[int], says("Where `min_tokens` forbids them at first.")]
    grammar: Annotated[str | None, says("SHA-256 of the grammar; null without one.")]
    thinking: Annotated[str | None, says("SHA-256 of the budget of thinking; null without one.")]
    cascade: ReceiptCascade | None


class ReceiptChoice(CompleteModel, kw_only=True):
    """One of the answers."""

    index: int
    tier: Annotated[str | None, says("It wrote this answer; null where it is concealed.")]
    stream: Annotated[
        int | None, says("The stream of noise: twice the choice's number, one more for large.")
    ]
    prompt: Commitment
    answer: Commitment
    finish_reason: str


class ReceiptPayload(CompleteModel, kw_only=True):
    """What is signed. Facts that the key or the alias does not reveal are null."""

    type: Literal["outrider-receipt"]
    version: int
    id: Annotated[str, says("The answer's.")]
    issued_at: Annotated[int, says("Seconds since 1970.")]
    model: Annotated[str | None, says("The name that asks for the same model again.")]
    checkpoint: str | None
    numerics: Annotated[str | None, says("The answer's `system_fingerprint`.")]
    adapter: Annotated[str | None, says("The adapter's name and version.")]
    engine: Annotated[str | None, says("The release of the gateway.")]
    seed: Annotated[str | None, says("A number as text; null for greedy answers.")]
    sampling: ReceiptSampling
    choices: list[ReceiptChoice]


class Nonces(CompleteModel, kw_only=True):
    """What opens the commitments of one choice, 16 bytes in base64url each."""

    prompt: str
    answer: str


class Receipt(CompleteModel, kw_only=True):
    """A signed receipt, and the nonces, which may be kept apart from it."""

    payload: ReceiptPayload
    key_id: str
    signature: Annotated[
        str, says("Ed25519, in base64url, over the payload in the form of RFC 8785.")
    ]
    nonces: list[Nonces]


class PublishedKey(CompleteModel, kw_only=True):
    """A public key as a JWK."""

    kty: Literal["OKP"]
    crv: Literal["Ed25519"]
    x: str
    kid: str
    use: Literal["sig"]
    alg: Literal["EdDSA"]


class PublishedKeys(CompleteModel, kw_only=True):
    """The keys that receipts are signed with, the present one first."""

    keys: list[PublishedKey]
