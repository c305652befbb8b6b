"""The order of a tree's guesses: the likeliest first, parents before children."""

from outrider.kernels.trees.tree_state import DEPTH, PATH_PROB
from outrider.kernels.triton_support import jit, tl


def ranked(path_probs: list[float], depths: list[int]) -> list[int]:
    """A sequence's guesses, the likeliest first, parents before children; lists with the root."""
    guesses = range(1, len(path_probs))
    return sorted(guesses, key=lambda node: (-path_probs[node], depths[node], node))


@jit
def _ranking_keys(own, nodes, is_guess, CAPACITY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Int64, the greater the likelier: by path probability, then depth, then age; -1 for others.

    A parent is never less likely than its child, so it has the greater key.
    """
    prob = tl.load(own + PATH_PROB * CAPACITY + nodes, mask=is_guess, other=0).to(tl.int64)
    depth = tl.load(own + DEPTH * CAPACITY + nodes, mask=is_guess, other=0).to(tl.int64)
    # The bits of floats that are not negative are in the floats' order.
    key = (prob << 32) | ((0xFFFF - depth) << 16) | (0xFFFF - nodes.to(tl.int64))
    return tl.where(is_guess, key, -1)


@jit
def ranks_among(  # type: ignore[no-untyped-def]
    own, num_candidates, nodes, CAPACITY: tl.constexpr, GROUP: tl.constexpr
):
    """Int32 [C]: how many of a sequence's guesses are likelier. The root and no one: C at least."""
    is_guess = (nodes > 0) & (nodes < num_candidates)
    keys = _ranking_keys(own, nodes, is_guess, CAPACITY)  # [C]
    rank = tl.where(is_guess, 0, CAPACITY)
    first = 0
    while first < num_candidates:
        rival = first + tl.arange(0, GROUP)
        is_rival = (rival > 0) & (rival < num_candidates)
        rival_keys = _ranking_keys(own, rival, is_rival, CAPACITY)  # [G]
        rank += tl.sum((rival_keys[None, :] > keys[:, None]).to(tl.int32), 1)
        first += GROUP
    return rank
