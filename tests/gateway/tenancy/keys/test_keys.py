"""Keys: their form, their strength, and that hashes say nothing."""

import hmac
import random
import secrets

from hypothesis import given
from hypothesis import strategies as st

from outrider.gateway.tenancy.keys.keys import KEY_ID, KeyHasher, id_in, mint_key, prefix_of


def test_a_key_has_its_form() -> None:
    key = mint_key(secrets.SystemRandom())
    assert key.text.startswith(f"or-{key.key_id}")
    assert KEY_ID.fullmatch(key.key_id)
    assert len(key.text) == 3 + 8 + 43
    assert key.text.isascii()
    assert id_in(key.text) == key.key_id
    assert prefix_of(key.key_id) == key.text[:11]
    assert key.text not in repr(key)


@given(st.integers(0, 2**256 - 1))
def test_every_one_of_256_bits_is_in_the_secret(number: int) -> None:
    class Fixed(random.Random):
        def getrandbits(self, k: int) -> int:
            assert k == 256
            return number

    digits = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
    secret = mint_key(Fixed(), "abcdefgh").text[11:]
    assert sum(digits.index(char) * 62**i for i, char in enumerate(secret)) == number


@given(st.binary(min_size=1, max_size=200), st.text(max_size=60))
def test_a_digest_is_hmacs(secret: bytes, text: str) -> None:
    """Stored digests outlive the code that made them."""
    expected = hmac.digest(secret, text.encode("utf-8", "surrogatepass"), "sha256")
    assert KeyHasher(secret).digest(text) == expected


@given(st.text(max_size=60))
def test_texts_that_are_no_keys_have_no_id(text: str) -> None:
    assert id_in(text) is None
    assert id_in(mint_key(random.Random(1)).text + text[:1]) is None or not text


def test_a_line_end_is_no_part_of_a_key() -> None:
    assert id_in(mint_key(random.Random(1)).text + "\n") is None


def test_hashes_are_keyed() -> None:
    one, other = KeyHasher(b"one"), KeyHasher(b"other")
    assert one.digest("key") == KeyHasher(b"one").digest("key") != other.digest("key")
    assert len(one.digest("key")) == 32
    assert one.name != other.name
    assert one.digest("\ud800")  # what a header cannot hold, but a caller may


def test_salts_tell_tenants_apart_and_cannot_be_foreseen() -> None:
    hasher = KeyHasher(b"one")
    assert hasher.cache_salt("a") == hasher.cache_salt("a") != hasher.cache_salt("b")
    assert hasher.cache_salt("a") != KeyHasher(b"other").cache_salt("a")
