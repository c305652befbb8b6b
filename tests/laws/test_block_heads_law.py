"""Drafters of a block a pass: blocks of heads that know an answer are accepted, and change no text.

What they compute for a text is what they were published to compute. Other laws: test_heads_law.py.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from outrider.draft.draft_state import Draft
from outrider.draft.guesses.model_guesses import Slices
from outrider.engine.config import EngineConfig
from outrider.engine.core import Engine
from outrider.verifier.sampling import RowGroup, perturbed_scores
from outrider.verifier.token_tree import SOURCE_BIT
from tests.block_heads import DEPTHS, random_block, taught_head, taught_requests
from tests.engines import assert_idle, serve
from tests.heads import head_runner, make_head_engine, random_head, random_pair
from tests.laws.mixed import mixed_requests
from tests.laws.same_answers import assert_same_answers, total, with_head

KINDS = ("peagle", "dflash")


@pytest.mark.slow
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_what_was_taught_is_accepted_block_by_block(kind: str, on_device: bool) -> None:
    """Greedy and sampled: rows, depths and noise belong together."""
    vary = with_head(head=taught_head(kind), on_device=on_device)
    served = assert_same_answers(taught_requests(), of=random_pair(), vary=vary)
    engine, answers = served.engine, served.answers
    accepted = engine.stats().accepted_by_source["head"]
    assert len(accepted) == DEPTHS
    assert sum(accepted) > 0.5 * total(answers, "num_output_tokens")
    assert accepted[-1] > 0.5 * accepted[0]
    assert head_runner(engine).times.num_passes <= max(
        answer.stats.num_steps for answer in answers.values()
    )


@pytest.mark.parametrize("kind", ["peagle", pytest.param("dflash", marks=pytest.mark.slow)])
def test_rules_that_depend_on_the_path(kind: str) -> None:
    """Penalties: what a token is worth depends on those above it, which one pass cannot know."""
    requests = [
        replace(
            request,
            sampling=replace(request.sampling, frequency_penalty=0.7, presence_penalty=0.2),
        )
        for request in taught_requests()
    ]
    vary = with_head(head=taught_head(kind))
    engine = assert_same_answers(requests, of=random_pair(), vary=vary).engine
    assert sum(engine.stats().accepted_by_source["head"][1:]) > 0


def check_first_choices(draft: Draft, logits: Tensor) -> None:
    """At every depth the best guess is what the target would choose from these logits there."""
    for node in draft.tree.candidates:
        own = [draft.tree.candidates[child] for child in node.children.values()]
        named = [child for child in own if child.sources & SOURCE_BIT["head"]]
        if named:
            group = RowGroup(sequence=draft.sequence, depths=[node.depth], paths=list)
            scores = perturbed_scores(logits[node.depth, None], [group])
            best = max(named, key=lambda child: child.model_confidence)
            assert best.token_id == int(scores.argmax())


def watch_blocks(engine: Engine) -> dict[tuple[int, ...], Tensor]:
    """A dict that gets the logits of the head's blocks by depth from now on, by text."""
    guesses = engine._drafter._growths["head"]._model  # type: ignore[union-attr]
    receive, seen = guesses.receive, {}
    first_row = guesses.block.first_row

    def noted(slices: Slices, logits: Tensor, hidden: Tensor | None = None) -> None:
        row, blocks = 0, []
        for draft, piece in slices:
            if piece.num_logit_rows:
                first, row = row + first_row, row + piece.num_logit_rows
                found = seen[tuple(draft.sequence.token_ids)] = logits[first:row].clone()
                blocks.append((draft, guesses._to_target(found)))
        receive(slices, logits, hidden)
        for draft, own in blocks:
            check_first_choices(draft, own)

    guesses.receive = noted
    return seen


@pytest.mark.parametrize("kind", ["dflash", pytest.param("peagle", marks=pytest.mark.slow)])
def test_what_a_block_computes_depends_on_the_text_alone(kind: str) -> None:
    """Not on chunks of its prompt, hits of the prefix cache, pre-emption or earlier steps.

    It is what the published forward pass says, ranked by the noise of each position.
    """
    alone: dict[tuple[int, ...], Tensor] = {}
    requests = mixed_requests()[3:9]
    for request in requests:
        engine = make_head_engine(random_pair(), random_head(kind), prefix_caching=False)
        seen = watch_blocks(engine)
        serve(engine, [request])
        alone |= seen
    engine = make_head_engine(
        random_pair(),
        random_head(kind),
        num_blocks=60,
        block_size=4,
        config=EngineConfig(max_tokens_per_step=20),
    )
    seen = watch_blocks(engine)
    num_cached = num_preempted = num_common = 0
    for _ in range(2):
        answers = serve(engine, requests)
        num_cached += total(answers, "num_cached_tokens")
        num_preempted += total(answers, "num_preemptions")
    for tokens, logits in seen.items():
        if tokens in alone:
            num_common += 1
            torch.testing.assert_close(logits, alone[tokens], rtol=1e-3, atol=1e-3)
    tokens = max(seen, key=len)
    wanted = random_block(kind, list(tokens))
    torch.testing.assert_close(seen[tokens], wanted, rtol=1e-3, atol=1e-3)
    assert num_cached > 30
    assert num_preempted > 0
    assert num_common > len(seen) / 2
    assert_idle(engine)
