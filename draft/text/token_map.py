"""A drafter with another vocabulary: guesses in its tokens, read as the target's.

Token-level intersection (Timor et al., "Accelerating LLM Inference with Lossless Speculative
Decoding Algorithms for Heterogeneous Vocabularies", 2025, section 4.3: TLI). The drafter's
distribution is restricted to tokens that both vocabularies have, byte for byte, and normalised
again. What the target emits does not depend on it: acceptance looks at target tokens only.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from outrider.draft.text.vocabulary import BYTE_TOKEN, vocabulary_bytes
from outrider.engine.errors import EngineError

MIN_COVERED_SHARE = 0.10
"""Below this share in common a drafter could hardly ever say what the target wants to."""


class VocabMismatchError(EngineError):
    """The two vocabularies have too little in common, or cannot be compared."""

    code = "vocab_mismatch"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialTokens:
    """Ids of the tokens that have a role instead of a text; None where there is no such token."""

    bos: int | None = None
    eos: int | None = None


class TokenMap:
    """Translates between a target's token ids and a drafter's.

    `to_draft[target_id]` is the drafter's token of the same bytes. If the drafter lacks it, it is
    the last of the drafter's tokens that spell it. The drafter then reads a text that differs a
    little, which costs guesses and nothing else. `covered_share`: the tokens that both have, as a
    share of the smaller vocabulary. `num_shared`: their number.
    """

    def __init__(
        self,
        *,
        target: Tokenizer,
        draft: Tokenizer,
        target_vocab_size: int,
        draft_vocab_size: int,
        target_special: SpecialTokens | None = None,
        draft_special: SpecialTokens | None = None,
    ) -> None:
        """Compare two tokenizers. The sizes are the models' (logit widths, padding included).

        Raises VocabMismatchError for a tokenizer whose tokens have no bytes of their own, and when
        less than `MIN_COVERED_SHARE` is in common.
        """
        roles = _same_roles(target_special or SpecialTokens(), draft_special or SpecialTokens())
        same = {
            target_id: draft_id
            for target_id, draft_id in (roles | _same_tokens(target, draft) | roles).items()
            if target_id < target_vocab_size and draft_id < draft_vocab_size
        }
        smaller = min(target.get_vocab_size(), draft.get_vocab_size())
        self.num_shared = len(same)
        self.covered_share = self.num_shared / max(smaller, 1)
        if self.covered_share < MIN_COVERED_SHARE:
            raise VocabMismatchError(
                f"The large and the small model have {self.num_shared:,} tokens in common, "
                f"{self.covered_share:.1%} of the smaller vocabulary ({smaller:,}); at least "
                f"{MIN_COVERED_SHARE:.0%} is needed for drafts to be worth anything. Use another "
                "small model, or speculation.enabled = false."
            )
        self.to_draft = _complete(same, target, draft, target_vocab_size, draft_vocab_size)
        index = torch.zeros(target_vocab_size, dtype=torch.int64)
        is_missing = torch.ones(target_vocab_size, dtype=torch.bool)
        guessed: set[int] = set()
        for target_id, draft_id in same.items():
            if draft_id not in guessed:  # of several with one meaning, the first
                guessed.add(draft_id)
                index[target_id] = draft_id
                is_missing[target_id] = False
        self._index, self._is_missing = index, is_missing

    def logits_to_target(self, logits: Tensor) -> Tensor:
        """Logits over the drafter's tokens as logits over the target's, -inf where it has none.

        `logits`: [num_rows, draft_vocab_size]; returns [num_rows, target_vocab_size].
        """
        if self._index.device != logits.device:
            self._index = self._index.to(logits.device)
            self._is_missing = self._is_missing.to(logits.device)
        return logits.index_select(1, self._index).masked_fill_(self._is_missing, -math.inf)

    def ids_to_draft(self, token_ids: Sequence[int]) -> list[int]:
        """Target tokens as the drafter reads them; one for one."""
        return [self.to_draft[token_id] for token_id in token_ids]


def _same_tokens(target: Tokenizer, draft: Tokenizer) -> dict[int, int]:
    """Draft id of each target id whose bytes, or for special tokens whose name, both have.

    Of target tokens with the same bytes the one that is not a sentencepiece byte comes first.
    """
    target_bytes, draft_bytes = vocabulary_bytes(target), vocabulary_bytes(draft)
    if target_bytes is None or draft_bytes is None:
        raise VocabMismatchError(
            "Only byte-level and sentencepiece vocabularies can be mapped onto each other; the "
            f"{'large' if target_bytes is None else 'small'} model's is neither."
        )
    draft_names = draft.get_vocab(with_added_tokens=True)
    draft_id_of: dict[bytes, int] = {}
    for _, draft_id in _letters_first(draft_names):
        draft_id_of.setdefault(draft_bytes[draft_id], draft_id)
    same: dict[int, int] = {}
    for name, target_id in _letters_first(target.get_vocab(with_added_tokens=True)):
        token = target_bytes[target_id]
        found = draft_id_of.get(token) if token else draft_names.get(name)
        # A name that is special on one side and plain text on the other is not the same token.
        if found is not None and bool(token) == bool(draft_bytes[found]):
            same[target_id] = found
    return same


def _letters_first(vocabulary: Mapping[str, int]) -> list[tuple[str, int]]:
    """Tokens by id, but `<0x41>` behind a token that spells the letter out."""
    return sorted(
        vocabulary.items(), key=lambda item: (BYTE_TOKEN.fullmatch(item[0]) is not None, item[1])
    )


def _same_roles(target: SpecialTokens, draft: SpecialTokens) -> dict[int, int]:
    """Ends and beginnings are the same token whatever they are called."""
    return {
        target_id: draft_id
        for target_id, draft_id in ((target.eos, draft.eos), (target.bos, draft.bos))
        if target_id is not None and draft_id is not None
    }


def _complete(
    same: dict[int, int],
    target: Tokenizer,
    draft: Tokenizer,
    target_vocab_size: int,
    draft_vocab_size: int,
) -> list[int]:
    """A draft id for every target id: the same token, else the last piece of its text."""
    target_bytes = vocabulary_bytes(target) or []
    draft_byte_ids = {
        token: index for index, token in enumerate(vocabulary_bytes(draft) or []) if len(token) == 1
    }
    to_draft = [same.get(target_id, 0) for target_id in range(target_vocab_size)]
    absent = [
        target_id
        for target_id, token in enumerate(target_bytes[:target_vocab_size])
        if token and target_id not in same
    ]
    texts = [target_bytes[target_id].decode(errors="ignore") for target_id in absent]
    encodings = draft.encode_batch(texts, add_special_tokens=False)
    for target_id, encoding in zip(absent, encodings, strict=True):
        # A fragment of a character has no text; its last byte may have a token.
        last = draft_byte_ids.get(target_bytes[target_id][-1:], 0)
        pieces = [piece for piece in encoding.ids if piece < draft_vocab_size]
        to_draft[target_id] = pieces[-1] if pieces else last
    return to_draft
