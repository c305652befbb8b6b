"""Figures of bench_gguf: rates and ratios within rounds, by server and by domain."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final

from benchmarks.peers.gguf.requests import DraftedTurn
from benchmarks.peers.gguf.servers import DRAFTING, PLAIN
from benchmarks.shared.prompts import Prompt
from benchmarks.shared.record import Summary, paired_ratio
from benchmarks.shared.turns import Turn, Turns

# A rate of fewer tokens is mostly that of the clock.
_LEAST_DECODED: Final = 15


def case_of(
    name: str, turns: Turns, prompts: Sequence[Prompt], peers: Sequence[str]
) -> dict[str, Any]:
    """Rates of a case, their ratios within the rounds, and first tokens that are equal."""
    bases = [base for base in (PLAIN, *peers) if base in turns.by_case]
    return {
        **rates_of(name, turns, bases),
        "equal_to": {base: _equality(name, base, turns, prompts) for base in bases if base != name},
    }


def rates_of(name: str, turns: Turns, bases: Sequence[str]) -> dict[str, Any]:
    """Rates of a case; `over`: their ratios to those of each base."""
    return {
        **turns.report(name),
        "decode": _summary([_rate(turn) for turn in turns.all_of(name) if _is_long(turn)]),
        "over": {base: _ratio(turns, name, base) for base in bases},
    }


def _equality(name: str, base: str, turns: Turns, prompts: Sequence[Prompt]) -> dict[str, Any]:
    compared = turns.compare(name, base, prompts)
    equal = [len(answer) for answer in turns.answers(base)]
    for divergence in compared.divergences:
        equal[divergence.index] = divergence.position
    return {"first_tokens": Summary.of(equal), "whole_answers": compared.num_equal}


def first_of(name: str, turns: Turns, num_tokens: int, peers: Sequence[str]) -> dict[str, Any]:
    """Times to the first token of the long prompts, the prompts' rate, and the ratios of times."""
    times_s = [turn.wall_s for turn in turns.all_of(name)]
    return {
        "first_token_s": Summary.of(times_s),
        "prompt_tokens_per_s": num_tokens / statistics.median(times_s),
        "first_token_over": {
            base: paired_ratio(times_s, [turn.wall_s for turn in turns.all_of(base)])
            for base in peers
        },
    }


def domains_of(
    turns: Turns, prompts: Sequence[Prompt], peers: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """For each kind of prompt, every case's rates, ratios and guesses, and guesses by depth."""
    bases = [base for base in (PLAIN, *peers) if base in turns.by_case]
    found: dict[str, dict[str, Any]] = {}
    for kind in dict.fromkeys(prompt.kind for prompt in prompts):
        own = [number for number, prompt in enumerate(prompts) if prompt.kind == kind]
        part = Turns(
            by_case={
                name: [rounds[number] for number in own] for name, rounds in turns.by_case.items()
            }
        )
        found[kind] = {
            "num_prompts": len(own),
            "median_prompt_tokens": statistics.median(len(prompts[at].token_ids) for at in own),
            "cases": {name: rates_of(name, part, bases) for name in part.by_case},
            **depths_of(part.all_of(DRAFTING) if DRAFTING in part.by_case else ()),
        }
    return found


def depths_of(turns: Sequence[Turn]) -> dict[str, list[float]]:
    """Verified guesses at each depth, and the accepted share of them; depth 1 comes first."""
    known = [turn for turn in turns if isinstance(turn, DraftedTurn)]
    depth = max((len(turn.verified_by_depth) for turn in known), default=0)
    verified, accepted = ([0] * depth for _ in range(2))
    for turn in known:
        for at, count in enumerate(turn.verified_by_depth):
            verified[at] += count
            accepted[at] += turn.accepted_by_depth[at]
    while verified and not verified[-1]:
        verified.pop()
    shares = [
        good / count if count else 0.0 for good, count in zip(accepted, verified, strict=False)
    ]
    return {"verified_by_depth": [*map(float, verified)], "accepted_share_by_depth": shares}


def fastest_peer(entry: Mapping[str, Any], peers: Sequence[str]) -> str | None:
    """Return the peer over which a case's ratio is least: the fastest one."""
    known = {name: entry["over"][name] for name in peers if entry["over"].get(name) is not None}
    return min(known, key=lambda name: known[name].median, default=None)


def _rate(turn: Turn) -> float:
    return turn.num_decoded_tokens / turn.decode_s


def _is_long(turn: Turn) -> bool:
    return turn.num_decoded_tokens >= _LEAST_DECODED and turn.decode_s > 0


def _summary(samples: Sequence[float]) -> Summary | None:
    return Summary.of(samples) if samples else None


def _ratio(turns: Turns, name: str, base: str) -> Summary | None:
    pairs = zip(turns.all_of(name), turns.all_of(base), strict=True)
    return _summary([_rate(a) / _rate(b) for a, b in pairs if _is_long(a) and _is_long(b)])
