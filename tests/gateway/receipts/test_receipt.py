"""Commitments and the canonical form: what others have to compute to check a receipt."""

import hashlib
import json
import struct

import msgspec
import pytest

from outrider.engine.request import EngineRequest, GrammarSpec
from outrider.gateway.contract.schema.receipts import Commitment, ReceiptChoice, ReceiptPayload
from outrider.gateway.receipts.receipt import canonical, commit, draw_nonces, sampling_of
from outrider.verifier.params import CascadeParams, SamplingParams, ThinkingBudget


def payload_of(request: EngineRequest) -> ReceiptPayload:
    nothing = Commitment(sha256="0" * 64, num_tokens=1)
    return ReceiptPayload(
        type="outrider-receipt",
        version=1,
        id="chatcmpl-ä\n",
        issued_at=1_800_000_000,
        model="large",
        checkpoint=None,
        numerics="fp_0",
        adapter=None,
        engine="0.1.0",
        seed=str(request.sampling.seed),
        sampling=sampling_of(request),
        choices=[
            ReceiptChoice(
                index=0, tier="large", stream=1, prompt=nothing, answer=nothing,
                finish_reason="stop",
            )
        ],
    )  # fmt: skip


def request_of(**sampling: object) -> EngineRequest:
    params = SamplingParams(max_tokens=9, **sampling)  # type: ignore[arg-type]
    return EngineRequest(request_id="a", prompt_token_ids=(1,), tier="large", sampling=params)


def test_the_signed_bytes_are_what_any_language_makes_of_the_json() -> None:
    payload = payload_of(
        request_of(temperature=0.1 + 0.2, seed=2**64 - 1, logit_bias=((7, -1e-7), (3, 2.0)))
    )
    document = json.loads(msgspec.json.encode(payload))
    again = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert canonical(payload) == again.encode() == canonical(document)
    assert document["sampling"]["temperature"] == "0.30000000000000004"
    assert document["sampling"]["logit_bias"] == [[7, "-1e-07"], [3, "2.0"]]
    assert document["seed"] == "18446744073709551615"


def test_a_commitment_is_a_labelled_hash() -> None:
    ids, nonce = (1, 2**31 - 1), "AAECAwQFBgcICQoLDA0ODw"
    raw = bytes(range(16))
    for part in ("prompt", "answer"):
        message = f"outrider-receipt/1/{part}\0".encode() + raw + struct.pack("<2I", *ids)
        found = commit(part, nonce, ids)  # type: ignore[arg-type]
        assert found == Commitment(sha256=hashlib.sha256(message).hexdigest(), num_tokens=2)
    with pytest.raises(ValueError, match="16 bytes"):
        commit("prompt", "AAAA", ids)
    drawn = [draw_nonces() for _ in range(2)]
    assert len({nonce for each in drawn for nonce in (each.prompt, each.answer)}) == 4


def test_everything_that_decides_tokens_is_said() -> None:
    plain = sampling_of(request_of())
    thinking = ThinkingBudget(max_tokens=3, opens=((1,),), closes=((2,),))
    request = request_of(thinking=thinking, min_tokens=2, stop_token_ids=(5,))
    other = msgspec.structs.asdict(
        sampling_of(
            EngineRequest(
                request_id="a", prompt_token_ids=(1,), tier="large", sampling=request.sampling,
                grammar=GrammarSpec(kind="regex", text="a+"),
                cascade=CascadeParams(alpha=0.25),
            )
        )
    )  # fmt: skip
    assert (plain.grammar, plain.thinking, plain.cascade) == (None, None, None)
    assert all(other[name] is not None for name in ("grammar", "thinking", "cascade"))
    assert (other["min_tokens"], other["stop_token_ids"]) == (2, [5])
    assert other["cascade"].alpha == "0.25"
