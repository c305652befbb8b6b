"""What the rules of acceptance say, against what they are defined to be."""

import pytest
import torch

from benchmarks.speculation.acceptance_rules import (
    MOST_CANDIDATES,
    SampledText,
    cut_behind_first,
    greedy_drafts,
    ratio_test,
    shared_noise,
    tokens_per_pass,
)
from outrider.verifier.params import SamplingParams

_PLACES = 4000
_VOCAB = 12


def _text(*, is_twin: bool = False, **sampling: float) -> SampledText:
    """A text of one target, drawn with its noise at so many places."""
    generator = torch.Generator().manual_seed(5)
    target = torch.randn(1, _VOCAB, generator=generator).expand(_PLACES, -1)
    draft = target if is_twin else target + torch.randn(1, _VOCAB, generator=generator)
    uniform = torch.rand(_PLACES, _VOCAB, generator=generator).clamp(1e-9, 1 - 1e-7)
    text = SampledText(
        token_ids=torch.zeros(_PLACES, dtype=torch.int64),
        target=target,
        draft=draft,
        noise=-(-uniform.log()).log(),
        sampling=SamplingParams(max_tokens=1, **{"temperature": 1.0, **sampling}),
    )
    text.token_ids.copy_(text.chosen())
    return text


def test_the_ratio_test_accepts_what_both_distributions_share() -> None:
    text = _text()
    first = ratio_test(text, torch.Generator().manual_seed(1))[:, 0].mean().item()
    target, draft = text.target[0].softmax(-1), text.draft[0].softmax(-1)
    assert first == pytest.approx(torch.minimum(target, draft).sum().item(), abs=0.02)


@pytest.mark.slow
def test_the_ratio_test_with_several_candidates_is_what_drawing_them_gives() -> None:
    text = _text()
    shares = ratio_test(text, torch.Generator().manual_seed(1)).mean(0)
    generator = torch.Generator().manual_seed(2)
    drawn = torch.zeros(MOST_CANDIDATES)
    for _ in range(_PLACES):
        p, q = text.target[0].softmax(-1), text.draft[0].softmax(-1)
        for rank in range(MOST_CANDIDATES):
            token = int(torch.multinomial(q, 1, generator=generator))
            if torch.rand((), generator=generator) * q[token] < p[token]:
                drawn[rank] += 1
                break
            p = (p - q).clamp(min=0.0)
            p, q = p / p.sum(), q.index_fill(0, torch.tensor([token]), 0.0)
            q = q / q.sum()
    torch.testing.assert_close(shares, drawn / _PLACES, atol=0.03, rtol=0.0)


def test_a_draft_that_is_the_target_is_always_accepted() -> None:
    text = _text(is_twin=True, top_p=0.8)
    for rule in (shared_noise, cut_behind_first):
        assert rule(text)[:, 0].mean() == 1.0
    assert ratio_test(text, torch.Generator())[:, 0].mean() == pytest.approx(1.0)


def test_greedy_drafts_are_the_same_wherever_the_draft_says_the_same() -> None:
    text = _text()
    best = int(text.draft[0].argmax())
    assert greedy_drafts(text)[:, 0].mean() == (text.token_ids == best).float().mean()


def test_cut_tokens_are_candidates_behind_the_best_that_is_kept() -> None:
    text = _text(top_p=0.6)
    hard, soft = shared_noise(text).sum(-1), cut_behind_first(text).sum(-1)
    torch.testing.assert_close(cut_behind_first(text)[:, 0], shared_noise(text)[:, 0])
    assert soft.mean() > hard.mean()


def test_tokens_of_a_pass_are_counted_along_the_text() -> None:
    def chances(first: list[float], second: list[float]) -> torch.Tensor:
        return torch.tensor([first, second]).T

    all_right = [chances([1.0] * 12, [0.0] * 12)]
    assert tokens_per_pass(all_right, num_candidates=1, max_depth=3) == 4.0
    none_right = [chances([0.0] * 12, [0.0] * 12)]
    assert tokens_per_pass(none_right, num_candidates=2, max_depth=3) == 1.0
    # The second candidate ends the path: two tokens, with it the target's own.
    beside = [chances([0.0] * 12, [1.0] * 12)]
    assert tokens_per_pass(beside, num_candidates=2, max_depth=3) == 2.0
    assert tokens_per_pass(beside, num_candidates=1, max_depth=3) == 1.0
    # Half of the passes of one guess have two tokens: 1.5 each.
    half = [chances([0.5] * 3000, [0.0] * 3000)]
    found = tokens_per_pass(half, num_candidates=1, max_depth=1)
    assert found == pytest.approx(1.5, abs=0.01)
