"""The answer that is to be verified, as its client has it, and the receipt in it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from outrider.gateway.contract.errors.tree import BadRequestError
from outrider.gateway.contract.schema.receipts import Receipt, ReceiptChoice
from outrider.gateway.receipts.receipt import VERSION, canonical, commit
from outrider.gateway.receipts.signing_keys import NoSigningKeyError, SigningKeys, from_base64

_RECEIPT: Final = "answer.outrider.receipt"
_MOST_ID: Final = 2**31
_THINKING: Final = ("reasoning_content", "reasoning")


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenAnswer:
    """One choice of an answer."""

    index: int
    document: Mapping[str, Any]
    choice: Mapping[str, Any]
    prompt_token_ids: tuple[int, ...] | None
    token_ids: tuple[int, ...] | None

    @property
    def report(self) -> Mapping[str, Any]:
        """The answer's `outrider` object."""
        report = self.document.get("outrider")
        return report if isinstance(report, dict) else {}

    @property
    def message(self) -> Mapping[str, Any] | None:
        """A chat's message; None of a completion."""
        message = self.choice.get("message")
        return message if isinstance(message, dict) else None

    @property
    def thinking(self) -> tuple[Any, ...]:
        """The thinking that a chat's message shows, under each of its names."""
        message = self.message or {}
        return tuple(message[name] for name in _THINKING if message.get(name))

    @property
    def text(self) -> str:
        """The choice's text. Raises BadRequestError where its tokens cannot be had from that."""
        message = self.message
        content = self.choice.get("text") if message is None else message.get("content")
        has_calls = message is not None and any(
            message.get(name) for name in ("tool_calls", "function_call")
        )
        if content is None and self.thinking:
            content = ""
        if has_calls or not isinstance(content, str) or not (content or self.thinking):
            raise self.without_ids()
        return content

    def without_ids(self) -> BadRequestError:
        """Return the error of a choice whose tokens cannot be had from its text."""
        return _refusal(
            f"answer.choices.{self.index}.token_ids",
            "needed, since the choice is more than a text; ask for return_token_ids",
        )

    def is_text_of(self, token_ids: tuple[int, ...], decode: Callable[[list[int]], str]) -> bool:
        """Return whether the choice's text stands in that of its tokens, spaces aside.

        A stop sequence is in the tokens only. Tool calls are written anew and thinking has marks:
        `written_answer.py` compares them. A completion may repeat its prompt (`echo`).
        """
        echoed = () if self.message is not None else self.prompt_token_ids or ()
        return self.stands_in(decode([*echoed, *token_ids]))

    def stands_in(self, text: str) -> bool:
        """Return whether the choice's text stands in another one, spaces aside."""
        own = self.choice.get("text") if self.message is None else self.message.get("content")
        return not isinstance(own, str) or bare(own) in bare(text)


def bare(text: str) -> str:
    """Return a text without spaces, and without what stands for half a character."""
    return "".join(text.replace("\ufffd", "").split())


def read_answer(document: Mapping[str, Any], index: int) -> GivenAnswer:
    """Read one choice. Raises BadRequestError."""
    found = [choice for choice in _choices(document) if choice.get("index", 0) == index]
    if not found:
        raise _refusal("answer.choices", f"has no choice with the index {index}")
    path = f"answer.choices.{index}"
    ids = found[0].get("prompt_token_ids", document.get("prompt_token_ids"))
    return GivenAnswer(
        index=index,
        document=document,
        choice=found[0],
        prompt_token_ids=_ids("answer.prompt_token_ids", ids),
        token_ids=_ids(f"{path}.token_ids", found[0].get("token_ids")),
    )


def _choices(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the choices; of a response or a message its text and thinking as the only one."""
    listed = document.get("choices")
    if isinstance(listed, list):
        return [choice for choice in listed if isinstance(choice, dict)]
    parts = document.get("output", document.get("content"))
    texts, thoughts = _texts(parts), _thoughts(parts)
    message = {"content": "".join(texts), "reasoning_content": "".join(thoughts)}
    return [{"message": message}] if texts or thoughts else []


def _texts(parts: object) -> list[str]:
    """Return the texts of an answer's parts, those of messages among them; others have none."""
    texts: list[str] = []
    for part in parts if isinstance(parts, list) else ():
        if isinstance(part, dict) and part.get("type") != "reasoning":
            text = part.get("text")
            texts += [text] if isinstance(text, str) else _texts(part.get("content"))
    return texts


def _thoughts(parts: object) -> list[str]:
    """Return the thinking in the parts of a message, or in the items of a response."""
    thoughts: list[str] = []
    for part in parts if isinstance(parts, list) else ():
        if isinstance(part, dict):
            thought = part.get("thinking") if part.get("type") == "thinking" else None
            thoughts += [thought] if isinstance(thought, str) else _texts(part.get("summary"))
    return thoughts


def _ids(param: str, value: object) -> tuple[int, ...] | None:
    """Read token ids. Raises BadRequestError."""
    if value is None:
        return None
    if not isinstance(value, list) or not value or not all(map(_is_id, value)):
        raise _refusal(param, "must be a list of token ids that is not empty")
    return tuple(value)


def _is_id(value: object) -> bool:
    return type(value) is int and 0 <= value < _MOST_ID


def read_receipt(answer: GivenAnswer, keys: SigningKeys) -> Receipt | None:
    """Read and check the receipt of an answer; None where it has none.

    Raises BadRequestError for one that was changed, or that this gateway cannot check.
    """
    raw = answer.report.get("receipt")
    if raw is None:
        return None
    try:
        receipt = msgspec.convert(raw, Receipt, strict=True)
        signature = from_base64(receipt.signature)
    except (msgspec.ValidationError, ValueError) as error:
        raise _refusal(_RECEIPT, f"is no receipt: {error}") from None
    if receipt.payload.version != VERSION:
        version = receipt.payload.version
        raise _refusal(f"{_RECEIPT}.payload.version", f"{version} is not known, {VERSION} is")
    try:
        is_signed = keys.has_signed(receipt.key_id, signature, canonical(raw["payload"]))
    except NoSigningKeyError as error:
        raise _refusal(_RECEIPT, f"this gateway has no keys: {error}") from None
    if is_signed is None:
        raise _refusal(
            f"{_RECEIPT}.key_id",
            "no key of this gateway (/.well-known/outrider-keys); leave the receipt out to verify "
            "the answer without it",
            code="unknown_receipt_key",
        )
    if not is_signed:
        raise _refusal(
            f"{_RECEIPT}.signature",
            "does not fit the payload, of which a field was changed",
            code="receipt_changed",
        )
    return receipt


def receipt_choice(receipt: Receipt, index: int) -> tuple[int, ReceiptChoice]:
    """Return a choice of a receipt, and its place. Raises BadRequestError."""
    for place, choice in enumerate(receipt.payload.choices):
        if choice.index == index and place < len(receipt.nonces):
            return place, choice
    raise _refusal("index", f"the receipt has no choice {index}, or no nonces for it")


def opens(receipt: Receipt, index: int, part: str, token_ids: tuple[int, ...]) -> bool:
    """Return whether tokens are those that a receipt commits to. Raises BadRequestError."""
    place, choice = receipt_choice(receipt, index)
    nonces = receipt.nonces[place]
    try:
        if part == "prompt":
            return commit("prompt", nonces.prompt, token_ids) == choice.prompt
        return commit("answer", nonces.answer, token_ids) == choice.answer
    except ValueError as error:
        raise _refusal(f"{_RECEIPT}.nonces", str(error)) from None


def _refusal(param: str, reason: str, *, code: str | None = None) -> BadRequestError:
    return BadRequestError(f"{param}: {reason}.", param=param, code=code)
