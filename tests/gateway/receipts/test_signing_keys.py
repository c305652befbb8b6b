"""The file of keys: made once, private, kept when the key changes, published without secrets."""

import builtins
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from outrider.gateway.receipts.signing_keys import (
    NoSigningKeyError,
    SigningKeys,
    from_base64,
    to_base64,
)

MESSAGE = b"an answer"


def private_pem(key: Any) -> bytes:
    return bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))


def written(path: Path, *blocks: bytes, mode: int = 0o600) -> SigningKeys:
    path.write_bytes(b"".join(blocks))
    path.chmod(mode)
    return SigningKeys(path)


def test_the_first_receipt_makes_a_file_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "state" / "receipts.pem"
    keys = SigningKeys(path)
    assert not path.exists()
    key_id, signature = keys.sign(MESSAGE)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [each.name for each in path.parent.iterdir()] == ["receipts.pem"]
    again = SigningKeys(path)
    assert again.has_signed(key_id, from_base64(signature), MESSAGE) is True
    assert again.has_signed(key_id, from_base64(signature), b"another") is False
    assert again.has_signed("unknown", from_base64(signature), MESSAGE) is None


def test_an_old_key_stays_valid_and_published_behind_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "receipts.pem"
    old = SigningKeys(path)
    old_id, signature = old.sign(MESSAGE)
    public = Ed25519PrivateKey.generate().public_key()
    only_public = public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    new = written(
        path, b"# new\n", private_pem(Ed25519PrivateKey.generate()), path.read_bytes(), only_public
    )
    new_id, _ = new.sign(MESSAGE)
    assert new.has_signed(old_id, from_base64(signature), MESSAGE) is True
    published = new.ring().jwks()["keys"]
    assert [key["kid"] for key in published][:2] == [new_id, old_id]
    assert published[2]["x"] == to_base64(public.public_bytes_raw())
    for key in published:
        assert set(key) == {"kty", "crv", "x", "kid", "use", "alg"}  # and no "d"
        assert (key["kty"], key["crv"], key["alg"]) == ("OKP", "Ed25519", "EdDSA")


@pytest.mark.parametrize(
    ("blocks", "mode", "why"),
    [
        ([], 0o600, "none of them is private"),
        ([private_pem(Ed25519PrivateKey.generate())], 0o644, "chmod 600"),
        ([private_pem(generate_private_key(SECP256R1()))], 0o600, "not Ed25519"),
        ([b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"], 0o600, "no Ed25519"),
    ],
    ids=["empty", "readable", "other-kind", "broken"],
)
def test_a_file_that_cannot_sign_says_why(
    tmp_path: Path, blocks: Sequence[bytes], mode: int, why: str
) -> None:
    keys = written(tmp_path / "receipts.pem", *blocks, mode=mode)
    with pytest.raises(NoSigningKeyError, match=why):
        keys.sign(MESSAGE)


def test_without_a_home_or_a_folder_there_is_no_key(tmp_path: Path) -> None:
    with pytest.raises(NoSigningKeyError, match=r"receipts\.key_file"):
        SigningKeys(None).ring()
    (tmp_path / "file").write_text("")
    with pytest.raises(NoSigningKeyError, match="cannot be read or made"):
        SigningKeys(tmp_path / "file" / "receipts.pem").ring()


def test_without_the_package_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(
        name: str,
        globals_: Mapping[str, object] | None = None,
        locals_: Mapping[str, object] | None = None,
        fromlist: Sequence[str] = (),
        level: int = 0,
    ) -> Any:
        if name.startswith("cryptography"):
            raise ModuleNotFoundError(name)
        return real(name, globals_, locals_, fromlist, level)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(NoSigningKeyError, match=r"outrider\[receipts\]"):
        SigningKeys(tmp_path / "receipts.pem").ring()
