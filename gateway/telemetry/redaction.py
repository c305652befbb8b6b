"""Removes personal data and credentials from a text. Best effort: it matches forms only."""

import re
from collections.abc import Callable
from typing import Any, Final

_MIN_CARD_DIGITS: Final = 13
_MIN_PHONE_DIGITS: Final = 8
_MAX_PHONE_DIGITS: Final = 15
_MAX_DEPTH: Final = 200


def _card(found: re.Match[str]) -> str:
    """Redact a payment card, recognised by its check digit; keep any other number."""
    digits = [int(char) for char in found[0] if char.isdigit()]
    doubled = [sum(divmod(2 * digit, 10)) for digit in digits[-2::-2]]
    is_card = (sum(digits[-1::-2]) + sum(doubled)) % 10 == 0
    return "[card]" if is_card and len(digits) >= _MIN_CARD_DIGITS else found[0]


def _account(found: re.Match[str]) -> str:
    """Redact an IBAN, recognised by its two check digits (ISO 7064, MOD 97-10)."""
    compact = re.sub(r"\s", "", found[0]).upper()
    number = "".join(str(int(char, 36)) for char in compact[4:] + compact[:4])
    return "[account]" if int(number) % 97 == 1 else found[0]


def _phone(found: re.Match[str]) -> str:
    count = sum(char.isdigit() for char in found[0])
    return "[phone]" if _MIN_PHONE_DIGITS <= count <= _MAX_PHONE_DIGITS else found[0]


# In this order: text taken by an earlier form is not seen by the later ones. No form nests
# repetitions of the same characters, so that none takes more than linear time.
_FORMS: Final[tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...]] = (
    (
        re.compile(
            r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----[A-Za-z0-9+/=\s\\]*"
            r"(?:-----END [A-Z ]{0,40}PRIVATE KEY-----)?"
        ),
        "[secret]",
    ),
    # JSON web tokens; then keys by the prefixes that their makers gave them, ours among them.
    (
        re.compile(
            r"(?<![A-Za-z0-9_-])eyJ[A-Za-z0-9_-]{5,}\.[A-Za-z0-9_-]{5,}(?:\.[A-Za-z0-9_-]*)?"
        ),
        "[secret]",
    ),
    (
        re.compile(
            r"(?<![A-Za-z0-9])(?:or-|sk-|pk-|rk_live_|sk_live_|sk_test_|gh[opsur]_|github_pat_|glpat-"
            r"|xox[abeoprs]-|hf_|npm_|pypi-|AIza|ya29\.)[A-Za-z0-9_.-]{16,}"
        ),
        "[secret]",
    ),
    (re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"), "[secret]"),
    (re.compile(r"(?i)\b(bearer|basic)\s{1,4}[A-Za-z0-9+/_.~=-]{12,}"), r"\1 [secret]"),
    (
        re.compile(
            r"(?i)\b(password|passwd|secret|token|api[_-]?key|access[_-]?key)"
            r"(\"?\s{0,4}[:=]\s{0,4}\"?)[^\s\"',;]{4,}"
        ),
        r"\1\2[secret]",
    ),
    (
        re.compile(r"(?i)\b([a-z][a-z0-9+.-]{1,30}://)[^\s/@:]{1,256}:[^\s/@]{1,256}@"),
        r"\1[secret]@",
    ),
    (
        re.compile(r"(?<![\w.+-])[\w.+-]{1,64}@[A-Za-z0-9-]{1,63}(?:\.[A-Za-z0-9-]{1,63}){1,8}"),
        "[email]",
    ),
    (re.compile(r"(?i)\b[a-z]{2}\d{2}(?:\s?[a-z0-9]{4}){2,7}(?:\s?[a-z0-9]{1,3})?\b"), _account),
    (re.compile(r"(?<![\d.])\d(?:[ -]?\d){12,18}(?![\d.]?\d)"), _card),
    (re.compile(r"(?<![\w.])\d{3}-\d{2}-\d{4}(?![\w-])"), "[id]"),
    (
        re.compile(r"(?<![\w.,-])(?:\+|00)\d(?:[ ./()-]{0,2}\d){6,14}(?!\d)"),
        _phone,
    ),
    (
        re.compile(
            r"(?<![\w.,-])\(?\d{2,5}\)?[ ./-]\d{2,4}[ ./-]\d{3,5}(?:[ ./-]\d{2,5})?(?![\w-])"
        ),
        _phone,
    ),
)


def redact_text(text: str) -> str:
    """Replace mail addresses, telephone, card and account numbers and secrets in a text."""
    for form, replacement in _FORMS:
        text = form.sub(replacement, text)
    return text


def redact_json(value: Any, _depth: int = 0) -> Any:
    """Redact every string in a JSON value, the names in objects included."""
    if isinstance(value, str):
        return redact_text(value)
    if _depth >= _MAX_DEPTH:
        return "[too deep]"
    if isinstance(value, dict):
        return {redact_text(str(k)): redact_json(v, _depth + 1) for k, v in value.items()}
    if isinstance(value, list):
        return [redact_json(item, _depth + 1) for item in value]
    return value
