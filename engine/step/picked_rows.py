"""Picks the rows of a large pass of which only the chosen token is wanted."""

from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor

from outrider.engine.model.shared_vocabulary import PickedRows
from outrider.engine.sequences.sequence import Sequence
from outrider.engine.trees.forest import Forest
from outrider.engine.trees.verify_items import VerifyItem
from outrider.kernels.sampling.sampling_rows import SamplingRows, field_stride
from outrider.verifier.sampling import RowGroup, sampling_rows, truncates


def is_token_all(sequence: Sequence) -> bool:
    """True if a row's token is argmax(logits / temperature + noise), and is all that is wanted.

    Rules, a grammar, a cascade, log-probabilities and what cuts the distribution look at all of
    a row.
    """
    sampling = sequence.request.sampling
    return (
        not sequence.rules
        and sequence.cascade is None
        and sampling.num_logprobs is None
        and not truncates(sampling)
    )


def picked_rows(
    forest: Forest | None, items: SequenceOf[VerifyItem], device: torch.device
) -> PickedRows | None:
    """Return the rows of a pass whose token is all; None where there are none.

    A forest's rows go together: only the device knows which of its rows are whose.
    """
    rows: list[int] = []
    found: list[SamplingRows] = []
    if forest is not None and all(map(is_token_all, forest.sequences)):
        rows += range(forest.total_rows)
        found.append(forest.sampling.rows(forest.tree_index, forest.depth))
    own = [item for item in items if is_token_all(item.sequence)]
    for item in own:
        rows += range(item.first_row, item.first_row + item.tree.num_nodes)
    if own:
        groups = [
            RowGroup(sequence=item.sequence, depths=item.tree.depth, paths=list) for item in own
        ]
        found.append(sampling_rows(groups, device))
    if not rows:
        return None
    is_sampled = any(each.has_sampled for each in found)
    return PickedRows(rows=rows, words=_words(found) if is_sampled else None)


def _words(found: SequenceOf[SamplingRows]) -> Tensor:
    """Return `PickedRows.words` of rows one behind the other."""
    count = sum(each.num_rows for each in found)
    stride = field_stride(count)
    words = found[0].noise_keys.new_zeros(PickedRows.num_words(count))
    torch.cat([each.temperature.view(torch.int32) for each in found], out=words[:count])
    torch.cat([each.noise_keys.reshape(-1) for each in found], out=words[stride:])
    return words
