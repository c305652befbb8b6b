"""Removes personal data and credentials from a text. Best effort: it matches forms only."""

import re
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

_MIN_CARD_DIGITS: Final = 13
_MAX_CARD_DIGITS: Final = 19
_CARD_BEGINS: Final = frozenset({2, 3, 4, 5, 6})
"""The first digits of the networks' numbers (ISO/IEC 7812)."""
_MIN_PHONE_DIGITS: Final = 8
_MAX_PHONE_DIGITS: Final = 15
_MAX_DEPTH: Final = 200


def _cards(found: re.Match[str]) -> str:
    """Redact payment cards in a run of digits, which may stand in groups; keep other numbers."""
    text = found[0]
    groups = text.replace("-", " ").split(" ")
    parts: list[str] = []
    begin = first = 0
    while first < len(groups):
        count = _num_card_groups(groups[first : first + _MAX_CARD_DIGITS])
        taken = groups[first : first + max(count, 1)]
        end = begin + sum(map(len, taken)) + len(taken) - 1
        parts += ("[card]" if count else text[begin:end], text[end : end + 1])
        begin, first = end + 1, first + len(taken)
    return "".join(parts)


def _num_card_groups(groups: Sequence[str]) -> int:
    """Return how many of the first groups are a card's number, by its check digit; 0: none."""
    digits: list[int] = []
    for count, group in enumerate(groups, start=1):
        if len(digits) + len(group) > _MAX_CARD_DIGITS:
            return 0
        digits += map(int, group)
        if len(digits) >= _MIN_CARD_DIGITS and digits[0] in _CARD_BEGINS:
            doubled = [sum(divmod(2 * digit, 10)) for digit in digits[-2::-2]]
            if (sum(digits[-1::-2]) + sum(doubled)) % 10 == 0:
                return count
    return 0


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
_FORMS: Final[tuple[tuple[str, re.Pattern[str], str | Callable[[re.Match[str]], str]], ...]] = (
    (
        "key",
        re.compile(
            r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----[A-Za-z0-9+/=\s\\]*"
            r"(?:-----END [A-Z ]{0,40}PRIVATE KEY-----)?"
        ),
        "[secret]",
    ),
    # JSON web tokens; then keys by the prefixes that their makers gave them, ours among them.
    (
        "key",
        re.compile(
            r"(?<![A-Za-z0-9_-])eyJ[A-Za-z0-9_-]{5,}\.[A-Za-z0-9_-]{5,}(?:\.[A-Za-z0-9_-]*)?"
        ),
        "[secret]",
    ),
    (
        "key",
        re.compile(
            r"(?<![A-Za-z0-9])(?:or-|sk-|pk-|rk_live_|sk_live_|sk_test_|gh[opsur]_|github_pat_|glpat-"
            r"|xox[abeoprs]-|hf_|npm_|pypi-|AIza|ya29\.)[A-Za-z0-9_.-]{16,}"
        ),
        "[secret]",
    ),
    ("key", re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"), "[secret]"),
    ("secret", re.compile(r"(?i)\b(bearer|basic)\s{1,4}[A-Za-z0-9+/_.~=-]{12,}"), r"\1 [secret]"),
    (
        "secret",
        re.compile(
            r"(?i)\b(password|passwd|secret|token|api[_-]?key|access[_-]?key)"
            r"(\"?\s{0,4}[:=]\s{0,4}\"?)[^\s\"',;]{4,}"
        ),
        r"\1\2[secret]",
    ),
    (
        "secret",
        re.compile(r"(?i)\b([a-z][a-z0-9+.-]{1,30}://)[^\s/@:]{1,256}:[^\s/@]{1,256}@"),
        r"\1[secret]@",
    ),
    (
        "email",
        re.compile(r"(?<![\w.+-])[\w.+-]{1,64}@[A-Za-z0-9-]{1,63}(?:\.[A-Za-z0-9-]{1,63}){1,8}"),
        "[email]",
    ),
    (
        "account",
        re.compile(r"(?i)\b[a-z]{2}\d{2}(?:\s?[a-z0-9]{4}){2,7}(?:\s?[a-z0-9]{1,3})?\b"),
        _account,
    ),
    ("card", re.compile(r"(?<![\d.])\d+(?:[ -]\d+)*(?![\d.]?\d)"), _cards),
    ("id", re.compile(r"(?<![\w.])\d{3}-\d{2}-\d{4}(?![\w-])"), "[id]"),
    (
        "phone",
        re.compile(r"(?<![\w.,-])(?:\+|00)\d(?:[ ./()-]{0,2}\d){6,14}(?!\d)"),
        _phone,
    ),
    (
        "phone",
        re.compile(
            r"(?<![\w.,-])\(?\d{2,5}\)?[ ./-]\d{2,4}[ ./-]\d{3,5}(?:[ ./-]\d{2,5})?(?![\w-])"
        ),
        _phone,
    ),
)


def redact_text(text: str, kinds: Collection[str] | None = None) -> str:
    """Replace mail addresses, telephone, card and account numbers and secrets in a text.

    `kinds`: the kinds of forms that are replaced, of `email`, `card`, `key` and others; None: all.
    """
    for kind, form, replacement in _FORMS:
        if kinds is None or kind in kinds:
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
