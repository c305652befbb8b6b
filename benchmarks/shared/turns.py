"""One question after the other, each answered by every case before the next one is asked.

This is A B A B at the scale of one answer: what disturbs the machine for a second disturbs all
cases. Which case begins changes with every question.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.shared.compare import Comparison, NextLogits, combine, compare_answers
from benchmarks.shared.driving import Bench, drive
from benchmarks.shared.harness import progress_bar
from benchmarks.shared.intervals import Interval, ratio_of_rates
from benchmarks.shared.prompts import Prompt
from outrider.engine.request import EngineRequest

# Threads of the program that answered last may still be waiting for work, and on a CPU.
_PAUSE_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One answer. `wall_s` has the prompt's time in it.

    `decode_s`, `num_decoded_tokens`: after the first delivery, where the program tells. The counts
    of guesses are those of our engine; 0 for others.
    """

    token_ids: list[int]
    wall_s: float
    decode_s: float = 0.0
    num_decoded_tokens: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    num_passes: int = 0
    thread_s: float = 0.0


Case = Callable[[int], Turn]
"""Answers the question of that number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """All answers of all cases: `by_case[name][question]` has one turn a round."""

    by_case: Mapping[str, Sequence[Sequence[Turn]]]

    @classmethod
    def take(
        cls,
        cases: Mapping[str, Case],
        *,
        num_questions: int,
        num_rounds: int,
        num_warm_up: int = 2,
        description: str = "measuring",
    ) -> "Turns":
        """Ask every case everything, `num_rounds` times, after `num_warm_up` questions unmeasured.

        Raises ValueError for no question or no round.
        """
        if num_questions < 1 or num_rounds < 1:
            raise ValueError(f"{num_questions} questions and {num_rounds} rounds: at least 1 each")
        names = list(cases)
        turns: dict[str, list[list[Turn]]] = {
            name: [[] for _ in range(num_questions)] for name in names
        }
        num_warm_up = min(num_warm_up, num_questions)
        total = len(names) * (num_warm_up + num_questions * num_rounds)
        with progress_bar(description, total) as advance:
            for question in range(num_warm_up):
                for name in names:
                    cases[name](question)
                    advance(f"warm-up, {name}")
            first = 0
            for _ in range(num_rounds):
                for question in range(num_questions):
                    for name in names[first:] + names[:first]:
                        time.sleep(_PAUSE_S)
                        turns[name][question].append(cases[name](question))
                        advance(name)
                    first = (first + 1) % len(names)
        return cls(by_case=turns)

    def all_of(self, name: str) -> list[Turn]:
        """All turns of a case."""
        return [turn for rounds in self.by_case[name] for turn in rounds]

    def answers(self, name: str) -> list[list[int]]:
        """The answers of a case's last round, by question."""
        return [rounds[-1].token_ids for rounds in self.by_case[name]]

    def ratio(self, name: str, base: str, *, decode: bool = False) -> Interval | None:
        """Tokens per second of `name` over those of `base`; the units are questions.

        `decode`: only after the first delivery; None where a program does not tell.
        """
        columns = [
            [sum(part(turn) for turn in rounds) for rounds in self.by_case[case]]
            for part in ((_decoded, _decode_s) if decode else (_tokens, _wall_s))
            for case in (name, base)
        ]
        if not all(sum(column) for column in columns):
            return None
        return ratio_of_rates((columns[0], columns[1]), (columns[2], columns[3]))

    def report(self, name: str) -> dict[str, Any]:
        """Rates and counts of a case over all rounds."""
        turns = self.all_of(name)
        num_tokens = sum(map(_tokens, turns))
        drafted = sum(turn.num_drafted_tokens for turn in turns)
        accepted = sum(turn.num_accepted_tokens for turn in turns)
        passes = sum(turn.num_passes for turn in turns)
        report: dict[str, Any] = {
            "num_answers": len(turns),
            "num_tokens": num_tokens,
            "tokens_per_s": num_tokens / sum(map(_wall_s, turns)),
        }
        if decode_s := sum(map(_decode_s, turns)):
            report["decode_tokens_per_s"] = sum(map(_decoded, turns)) / decode_s
        if passes:
            report["tokens_per_pass"] = num_tokens / passes
        if drafted:
            report["acceptance_rate"] = accepted / drafted
            report["verified_nodes_per_token"] = drafted / num_tokens
            report["wasted_nodes_per_token"] = (drafted - accepted) / num_tokens
        return report

    def compare(
        self,
        name: str,
        base: str,
        prompts: Sequence[Prompt],
        *,
        scores_of: Callable[[int], NextLogits] | None = None,
    ) -> Comparison:
        """Are the answers of two cases equal, question by question, in every round?

        `scores_of`: the function that says how close a call was, for the question of that number.
        """
        comparisons = []
        for question, prompt in enumerate(prompts):
            reference = self.by_case[base][question]
            others = self.by_case[name][question]
            comparisons.append(
                compare_answers(
                    [prompt.token_ids] * len(others),
                    [turn.token_ids for turn in reference],
                    [turn.token_ids for turn in others],
                    next_logits=None if scores_of is None else scores_of(question),
                )
            )
        return combine(comparisons)


def _tokens(turn: Turn) -> float:
    return len(turn.token_ids)


def _wall_s(turn: Turn) -> float:
    return turn.wall_s


def _decoded(turn: Turn) -> float:
    return turn.num_decoded_tokens


def _decode_s(turn: Turn) -> float:
    return turn.decode_s


def engine_case(bench: Bench, request_for: Callable[[int], EngineRequest]) -> Case:
    """Our engine as a case: one request at a time, made for the question of a number.

    It must find nothing of an earlier one; `driving.make_requests` sees to that.
    """

    def answer(question: int) -> Turn:
        begun_s = time.thread_time()
        (stream,) = drive(bench, [request_for(question)], concurrency=1).streams
        thread_s = time.thread_time() - begun_s
        assert stream.stats is not None
        return Turn(
            token_ids=stream.token_ids,
            wall_s=stream.arrivals[-1][0] - stream.submitted_s,
            decode_s=stream.decode_s,
            num_decoded_tokens=stream.num_decoded_tokens,
            num_drafted_tokens=stream.stats.num_drafted_tokens,
            num_accepted_tokens=stream.stats.num_accepted_tokens,
            num_passes=stream.stats.num_steps,
            thread_s=thread_s,
        )

    return answer
