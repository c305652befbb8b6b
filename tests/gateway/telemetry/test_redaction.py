"""Redaction of captured texts: what goes, what stays, and that no text takes long."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.gateway.telemetry.redaction import redact_json, redact_text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("write to jane.doe+x@mail.example.org!", "write to [email]!"),
        ("card 4111 1111 1111 1111, please", "card [card], please"),
        ("5500-0000-0000-0004", "[card]"),
        ("5 4111 1111 1111 1111 12 378282246310005", "5 [card] 12 [card]"),
        ("IBAN DE89 3704 0044 0532 0130 00.", "IBAN [account]."),
        ("gb82WEST12345698765432", "[account]"),
        ("call +49 30 901820 or +1 (555) 010-9999", "call [phone] or [phone]"),
        ("call 555-010-9999 now", "call [phone] now"),
        ("0041 44 668 18 00", "[phone]"),
        ("my number is 078-05-1120", "my number is [id]"),
        ("key or-3F9aB2cD4eF6gH8iJ0kL2mN4", "key [secret]"),
        ("sk-proj-abcdefghijklmnop1234", "[secret]"),
        ("ghp_abcdefghijklmnopqrstuvwxyz0123456789", "[secret]"),
        ("AKIAIOSFODNN7EXAMPLE", "[secret]"),
        ("Authorization: Bearer abcdef1234567890", "Authorization: Bearer [secret]"),
        ("password = hunter2!", "password = [secret]"),
        ('{"api_key": "abcd1234"}', '{"api_key": "[secret]"}'),
        ("postgres://me:hunter2@db/x", "postgres://[secret]@db/x"),
        (
            "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.SflKxwRJSMeKKF2QT4fwpMeJf36POk6yJV",
            "[secret]",
        ),
        (
            "-----BEGIN RSA PRIVATE KEY-----\nMIIE+/=\nabc\n-----END RSA PRIVATE KEY-----\nrest",
            "[secret]\nrest",
        ),
        ("-----BEGIN PRIVATE KEY-----\nMIIEcut off", "[secret]"),
    ],
)
def test_personal_data_and_credentials_are_redacted(text: str, expected: str) -> None:
    assert redact_text(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "What is 4786 + 3957?",
        "The 4111111111111112 is no card: its check digit is wrong.",
        "DE00370400440532013000 is no account.",
        "pi is 3.14159265358979",
        "on 2026-11-22 at 10:15:30 in version 1.2.3",
        "from 127.0.0.1:8000 to 10.0.0.255",
        "one or-two or three; a token of thanks; the secret is out",
        "x@y has no domain; @mention; a@b",
        "https://host/path?x=1 and git@",
        "漢字 🙂 çà",
    ],
)
def test_the_rest_stays(text: str) -> None:
    assert redact_text(text) == text


def test_json_is_redacted_throughout() -> None:
    body = {
        "messages": [{"role": "user", "content": "I am a@example.org", "n": 3, "x": None}],
        "a@example.org": True,
        "stop": ["call +49 30 901820"],
    }
    assert redact_json(body) == {
        "messages": [{"role": "user", "content": "I am [email]", "n": 3, "x": None}],
        "[email]": True,
        "stop": ["call [phone]"],
    }


def test_json_may_be_nested_deeper_than_python_goes() -> None:
    value: object = "a@example.org"
    for _ in range(900):
        value = [value]
    assert "a@example.org" not in str(redact_json(value))


@given(st.text(max_size=300))
def test_twice_is_once(text: str) -> None:
    once = redact_text(text)
    assert redact_text(once) == once


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    "piece",
    [
        "a", "1", "1 ", "+1", "a@", "a.", "@a.", "eyJ-", "eyJaaaaa.", "-----BEGIN PRIVATE KEY-----",
        "sk-", "password=", "password", "bearer ", "a://", "a://b:", "DE89", "DE89 ", "(030) ",
        "1-", "00 ", " ", "-", "a+", "x" * 63 + ".",
    ],
)  # fmt: skip
def test_no_text_takes_long(piece: str) -> None:
    """Time grows with the length: four times the text, far less than sixteen times the time."""

    def seconds(size: int) -> float:
        text = piece * (size // len(piece)) + "!"
        begun_s = time.process_time()
        redact_text(text)
        return time.process_time() - begun_s

    # Quadratic forms take minutes for this much.
    assert seconds(200_000) < 5.0
