"""P-EAGLE and DFlash heads that know some answers by heart, so that whole blocks are accepted."""

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.draft.heads.protocol import HeadModel
from outrider.engine.passes.runner import ForwardSlice, ModelRunner
from outrider.engine.request import EngineRequest
from tests.draft.heads.head_files import (
    VOCAB,
    Weights,
    dflash_config,
    dflash_reference,
    dflash_weights,
    eagle3_features,
    eagle3_reference,
    peagle_weights,
    specforge_config,
    specforge_names,
)
from tests.heads import random_pair, read_written
from tests.laws.mixed import mixed_requests
from tests.laws.same_answers import plainly

DEPTHS = 4
_MASK = VOCAB - 1
_STEPS = 30

Loss = Callable[[Weights], Tensor]


def taught_requests() -> list[EngineRequest]:
    """Greedy and sampled ones with short prompts."""
    return mixed_requests()[:6]


@cache
def taught_head(kind: str) -> HeadModel:
    """A head for `random_pair` that was taught the answers to `taught_requests`."""
    head = peagle_weights(num_tokens=VOCAB) if kind == "peagle" else dflash_weights()
    taps = (1, 2, 3) if kind == "peagle" else (1, 3)
    loss = _peagle_loss if kind == "peagle" else _dflash_loss
    requests = taught_requests()
    right = plainly(random_pair(), requests)
    texts = [(list(request.prompt_token_ids), right[request.request_id]) for request in requests]
    weights = _fitted(head, [loss(*text, taps_of(text[0] + text[1], taps)) for text in texts])
    if kind == "peagle":
        config = specforge_config(weights, ptd_token_id=_MASK, block_size=DEPTHS)
        return read_written(specforge_names(weights), config, random_pair().large)
    config = dflash_config(weights, block_size=DEPTHS + 1)
    return read_written(weights, config, random_pair().large)


def taps_of(token_ids: list[int], taps: tuple[int, ...]) -> Tensor:
    """What the large model makes of a text's tokens but the last, [n - 1, len(taps) * hidden]."""
    runner = ModelRunner(model=random_pair().large, num_blocks=32, taps=taps)
    view = runner.new_view("")
    view.reserve(len(token_ids))
    piece = ForwardSlice(view=view, token_ids=token_ids[:-1], start_slot=0, num_logit_rows=0)
    found = runner.forward([piece]).taps
    assert found is not None
    return found.clone()


def _fitted(weights: Weights, losses: list[Loss]) -> Weights:
    """Adam over all weights; the losses are of one text each."""
    with torch.inference_mode(mode=False), torch.enable_grad():
        known = {n: w.clone().requires_grad_() for n, w in weights.items()}
        optimizer = torch.optim.Adam(known.values(), lr=6e-3)
        for _ in range(_STEPS):
            optimizer.zero_grad()
            torch.stack([loss(known) for loss in losses]).mean().backward()
            optimizer.step()
    return {name: weight.detach() for name, weight in known.items()}


def _roots(prompt: list[int], answer: list[int]) -> Tensor:
    """Places of a text's tokens behind which the head drafts: from the prompt's last one on."""
    return torch.arange(len(prompt) - 1, len(prompt) + len(answer) - 1).clamp(min=1).unique()


def _blocks(roots: Tensor, depths: Tensor) -> tuple[Tensor, Tensor]:
    """Places so far behind each root, and the number of the root that each belongs to."""
    places = (roots[:, None] + depths).flatten()
    return places, torch.arange(len(roots)).repeat_interleave(len(depths))


def _targets(token_ids: Tensor, places: Tensor) -> Tensor:
    """The tokens behind these places; -100 behind the text."""
    known = places + 1 < len(token_ids)
    return torch.where(known, token_ids[(places + 1).clamp(max=len(token_ids) - 1)], -100)


def _peagle_loss(prompt: list[int], answer: list[int], taps: Tensor) -> Loss:
    """Row j has the token at j + 1; behind it masks, of each root its own."""
    token_ids, roots = torch.tensor(prompt + answer), _roots(prompt, answer)
    num_text = len(token_ids) - 1
    places, block = _blocks(roots, torch.arange(1, DEPTHS))
    of_text = torch.arange(1, num_text + 1)
    positions = torch.cat((of_text, places)) - 1
    owner = torch.cat((torch.full((num_text,), -1), block))
    own = (owner[:, None] == owner) & (positions[:, None] >= positions)
    last = torch.cat((of_text, roots[block]))
    before = (owner == -1) & (positions[None, :] < last[:, None])
    rows = torch.cat((token_ids[1:], torch.full((len(places),), _MASK)))
    is_wanted = torch.cat((torch.isin(of_text, roots), torch.ones(len(places)).bool()))
    targets = _targets(token_ids, positions + 1).masked_fill(~is_wanted, -100)
    embedding = random_pair().large.embedding  # type: ignore[attr-defined]

    def loss(weights: Weights) -> Tensor:
        mask = eagle3_features(weights, weights["mask_hidden"])[0]
        features = torch.cat((eagle3_features(weights, taps), mask.expand(len(places), -1)))
        config = {"num_hidden_layers": 1}
        logits, _ = eagle3_reference(
            weights, config, embedding, rows, features, positions, own | before
        )
        return F.cross_entropy(logits, targets)

    return loss


def _dflash_loss(prompt: list[int], answer: list[int], taps: Tensor) -> Loss:
    """Text row j is of the token at j; a block begins with its root's token."""
    token_ids, roots = torch.tensor(prompt + answer), _roots(prompt, answer)
    places, block = _blocks(roots, torch.arange(DEPTHS + 1))
    is_root = places == roots[block]
    rows = torch.where(is_root, token_ids[roots[block]], _MASK)
    sees_text = torch.arange(len(taps)) < roots[block][:, None]
    sees = torch.cat((sees_text, block[:, None] == block), dim=1)
    targets = _targets(token_ids, places - 1).masked_fill(is_root, -100)
    embedding = random_pair().large.embedding  # type: ignore[attr-defined]
    head = random_pair().large_reference.lm_head.weight.detach()

    def loss(weights: Weights) -> Tensor:
        hidden = dflash_reference(weights, embedding, taps, rows, places, sees)
        return F.cross_entropy(hidden @ head.T, targets)

    return loss


def random_block(kind: str, token_ids: list[int]) -> Tensor:
    """What the published forward passes make of `random_head` behind a text: logits by depth."""
    large, reference = random_pair().large, random_pair().large_reference
    embedding = large.embedding  # type: ignore[attr-defined]
    if kind == "dflash":
        block = torch.tensor([token_ids[-1], *[_MASK] * 4])
        hidden = dflash_reference(dflash_weights(), embedding, taps_of(token_ids, (1, 3)), block)
        return (hidden @ reference.lm_head.weight.T)[1:]
    weights = peagle_weights(num_tokens=60)
    features = eagle3_features(weights, taps_of(token_ids, (1, 2, 3)))
    mask = eagle3_features(weights, weights["mask_hidden"])[0].expand(3, -1)
    rows = torch.tensor([*token_ids[1:], *[_MASK] * 3])
    logits, _ = eagle3_reference(
        weights,
        {"num_hidden_layers": 1},
        embedding,
        rows,
        torch.cat((features, mask)),
        torch.arange(len(rows)),
        torch.ones(len(rows), len(rows)).tril().bool(),
    )
    return logits[-4:]
