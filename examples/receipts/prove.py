"""An answer with a receipt: its signature, what a model says of it, and three frauds.

    outrider serve                          # in one terminal
    python examples/receipts/prove.py       # in another

OUTRIDER_URL is where the gateway is, unless it is http://127.0.0.1:8000.
"""

import base64
import copy
import json
import os
import sys
import urllib.error
import urllib.request
from typing import Any, Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

URL: Final = os.environ.get("OUTRIDER_URL", "http://127.0.0.1:8000")
QUESTION: Final = "Tell me a story about a fox and two old ships."


def ask(path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the JSON of an answer, also of a refusal."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"{URL}{path}", data=data, headers={"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request) as response:
            found: dict[str, Any] = json.load(response)
    except urllib.error.HTTPError as error:
        found = json.load(error)
    return found


def answer_of(model: str, seed: int = 7) -> dict[str, Any]:
    """Return a sampled answer with a receipt."""
    return ask(
        "/v1/chat/completions",
        {
            "model": model,
            "messages": [{"role": "user", "content": QUESTION}],
            "temperature": 1.5,
            "seed": seed,
            "max_tokens": 60,
            "outrider": {"receipt": True},
        },
    )


def from_base64(text: str) -> bytes:
    """Read base64url without padding."""
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def check_signature(receipt: dict[str, Any]) -> None:
    """Check a receipt with the published keys alone. Raises InvalidSignature."""
    keys = {key["kid"]: key["x"] for key in ask("/.well-known/outrider-keys")["keys"]}
    key = Ed25519PublicKey.from_public_bytes(from_base64(keys[receipt["key_id"]]))
    signed = json.dumps(
        receipt["payload"], sort_keys=True, separators=(",", ":"), ensure_ascii=False
    )
    key.verify(from_base64(receipt["signature"]), signed.encode())


def say(what: str, report: dict[str, Any]) -> None:
    """Print what a verification found."""
    if "error" in report:
        print(f"{what}: refused: {report['error']['message']}")  # noqa: T201
        return
    claimed = report["hypotheses"][0]
    print(  # noqa: T201
        f"{what}: {claimed['num_matching']} of {report['num_tokens']} tokens match; "
        f"explanation: {report['explanation']}"
    )


def main() -> None:
    """Prove, then cheat."""
    answer = answer_of("large")
    if "receipt" not in answer.get("outrider", {}):
        sys.exit(f"there is no receipt: {answer.get('outrider', answer)}")
    check_signature(answer["outrider"]["receipt"])
    print("the signature is that of a published key")  # noqa: T201
    say("the answer", ask("/v1/verify", {"answer": answer}))

    edited = copy.deepcopy(answer)
    ids = edited["choices"][0]["token_ids"]
    ids[5] = ids[6] if ids[5] != ids[6] else ids[5] + 1
    say("an edited answer", ask("/v1/verify", {"answer": edited}))

    changed = copy.deepcopy(answer)
    changed["outrider"]["receipt"]["payload"]["seed"] = "8"
    say("a changed receipt", ask("/v1/verify", {"answer": changed}))

    # Over one token in a hundred gives a cheaper model away; a few answers are enough.
    for seed in range(20):
        cheap = answer_of("small", seed)
        report = ask("/v1/verify", {"answer": cheap, "model": "large"})
        if report["hypotheses"][0]["share"] < 1.0:
            say("the small model's answer as the large one's", report)
            return
    sys.exit("the small model was not told from the large one")


if __name__ == "__main__":
    main()
