"""Rows under grammars choose what they choose from logits that are masked one by one."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.cache.block_pool import BlockPool, root_hash
from outrider.engine.cache.kv_view import KVView
from outrider.engine.request import EngineRequest
from outrider.engine.sequences.sequence import Sequence
from outrider.kernels.sampling.choice import MASK_BITS
from outrider.verifier.logit_rules import MaskRule
from outrider.verifier.noise import SequenceNoise
from outrider.verifier.params import SamplingParams
from outrider.verifier.sampling import (
    RowGroup,
    choose_ruled_tokens,
    choose_tokens,
    process_logits,
)

VOCAB_SIZE = 70


class RandomMask(MaskRule):
    """Allows some tokens behind each text of even length, and anything behind others."""

    def __init__(self, share: float, vocab_size: int) -> None:
        self.share = share
        self.vocab_size = vocab_size

    def allowed(self, text: list[int]) -> NDArray[np.bool_]:
        random = np.random.default_rng(text)
        return random.random(self.vocab_size) < self.share

    def masks(self, token_ids: list[int], paths: list[list[int]]) -> list[NDArray[np.int32] | None]:
        masks: list[NDArray[np.int32] | None] = []
        for path in paths:
            bits = np.zeros(-(-self.vocab_size // MASK_BITS) * MASK_BITS, dtype=np.uint8)
            bits[: self.vocab_size] = self.allowed(token_ids + path)
            is_free = len(token_ids + path) % 2
            words = np.packbits(bits, bitorder="little").view(np.int32)
            masks.append(None if is_free else words)
        return masks

    def apply(self, logits: Tensor, token_ids: list[int], paths: list[list[int]]) -> None:
        for row, path in zip(logits, paths, strict=True):
            if len(token_ids + path) % 2:
                continue
            allowed = np.zeros(len(row), dtype=bool)
            own = self.allowed(token_ids + path)[: len(row)]
            allowed[: len(own)] = own
            row.masked_fill_(~torch.from_numpy(allowed), -torch.inf)
            if not row.isfinite().any():  # a rule has the last word, as grammars have
                row.masked_fill_(torch.from_numpy(allowed), 0.0)


def make_group(temperature: float, rule: MaskRule | None, seed: int) -> RowGroup:
    sampling = SamplingParams(max_tokens=9, temperature=temperature, seed=seed)
    prompt = (1, 2, 3, seed)
    sequence = Sequence(
        request=EngineRequest(
            request_id=str(seed), prompt_token_ids=prompt, tier="large", sampling=sampling
        ),
        tier="large",
        view=KVView(BlockPool(num_blocks=8, block_size=16), root=root_hash("")),
        noise=SequenceNoise(sampling, "large", vocab_size=VOCAB_SIZE),
        submitted_s=0.0,
        token_ids=list(prompt),
        rules=[] if rule is None else [rule],
    )
    return RowGroup(sequence=sequence, depths=[0, 1, 1], paths=lambda: [[], [4], [5]])


@pytest.mark.parametrize("vocab_size", [60, VOCAB_SIZE, 100])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_choices_are_those_of_masked_logits(temperature: float, vocab_size: int) -> None:
    random = torch.Generator().manual_seed(1)
    for seed in range(20):
        rules = [RandomMask(0.3, vocab_size), None, RandomMask(0.05, vocab_size)]
        groups = [make_group(temperature, rule, seed + n) for n, rule in enumerate(rules)]
        logits = torch.randn(9, VOCAB_SIZE, generator=random) * 2
        chosen = choose_ruled_tokens(logits, groups).tolist()
        assert chosen == choose_tokens(process_logits(logits, groups), groups).tolist()


def test_a_mask_over_nothing_but_what_other_rules_forbid_has_the_last_word() -> None:
    rule = RandomMask(0.4, VOCAB_SIZE)
    groups = [make_group(1.0, rule, 3)]
    logits = torch.zeros(3, VOCAB_SIZE)
    for path in ([], [4], [5]):
        allowed = torch.from_numpy(rule.allowed([1, 2, 3, 3, *path]))
        logits[len(path) and path[0] - 3] = torch.zeros(VOCAB_SIZE).masked_fill(allowed, -torch.inf)
    chosen = choose_ruled_tokens(logits, groups).tolist()
    assert rule.allowed([1, 2, 3, 3])[chosen[0]]
    assert chosen == choose_tokens(process_logits(logits, groups), groups).tolist()


def test_a_failing_mask_is_its_own_requests_failure() -> None:
    class Broken(RandomMask):
        def masks(
            self, token_ids: list[int], paths: list[list[int]]
        ) -> list[NDArray[np.int32] | None]:
            raise ValueError("broken")

    groups = [
        make_group(1.0, Broken(0.3, VOCAB_SIZE), 1),
        make_group(1.0, RandomMask(0.3, VOCAB_SIZE), 2),
    ]
    logits = torch.randn(6, VOCAB_SIZE, generator=torch.Generator().manual_seed(2))
    chosen = choose_ruled_tokens(logits, groups).tolist()
    assert isinstance(groups[0].sequence.failure, ValueError)
    assert groups[1].sequence.failure is None
    alone = choose_tokens(process_logits(logits[3:], groups[1:]), groups[1:])
    assert chosen[3:] == alone.tolist()
