"""Real questions with references, and their judges: Spec-Bench, HumanEval, below $OUTRIDER_DATA.

The references are what people wrote: worked solutions (GSM8K), accepted short answers about a
passage (Natural Questions), tested functions (HumanEval), translations (WMT14), summaries (CNN and
Daily Mail). The first three tell right from wrong. Of the others, which can be right in many words,
the share of common words is reported.
"""

import ast
import gzip
import json
import os
import re
import resource
import string
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, Final

SPEC_BENCH: Final = "prompts/spec_bench_half.jsonl"
HUMAN_EVAL: Final = "prompts/HumanEval.jsonl.gz"
_TEST_S: Final = 5
_TEST_BYTES: Final = 1 << 30
_NUMBER: Final = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_NOTES: Final = re.compile(r"<<[^>]*>>")  # GSM8K's sums for a calculator
_CODE: Final = re.compile(r"```(?:python)?\n(.*?)(?:```|\Z)", re.DOTALL)
_ARTICLES: Final = frozenset({"a", "an", "the"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RealQuestion:
    """A prompt, and what is known of its answer."""

    kind: str
    prompt: str
    reference: str
    """The answer that people gave."""
    is_right: Callable[[str], bool] | None = None
    """Judges an answer; None where many answers are right."""


def load_questions(folder: Path, per_kind: int) -> list[RealQuestion]:
    """Return the first questions of each kind, the kinds taking turns.

    Raises SystemExit with a sentence where a file is absent.
    """
    kinds: dict[str, list[RealQuestion]] = {}
    for question in chain(_spec_bench(folder / SPEC_BENCH), _human_eval(folder / HUMAN_EVAL)):
        kinds.setdefault(question.kind, []).append(question)
    in_turn = zip_longest(*(questions[:per_kind] for questions in kinds.values()))
    return [question for one in in_turn for question in one if question is not None]


def data_folder() -> Path:
    """Return $OUTRIDER_DATA. Raises SystemExit where it is not set."""
    found = os.environ.get("OUTRIDER_DATA")
    if found is None:
        raise SystemExit(f"OUTRIDER_DATA is not set: {SPEC_BENCH} and {HUMAN_EVAL} are read there.")
    return Path(found)


def _rows(path: Path) -> Iterator[Mapping[str, Any]]:
    if not path.is_file():
        raise SystemExit(f"{path.name} is not under $OUTRIDER_DATA.")
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as file:
        yield from map(json.loads, file)


def _spec_bench(path: Path) -> Iterator[RealQuestion]:
    for row in _rows(path):
        kind, prompt = row["category"], row["turns"][0]
        match kind:
            case "math_reasoning":
                solution = _NOTES.sub("", row["reference"][0])
                yield RealQuestion(
                    kind="sums in words",
                    prompt=prompt,
                    reference=solution.replace("####", "The answer is"),
                    is_right=number_is(solution),
                )
            case "rag":
                names = tuple(map(str, row["reference"][0]))
                yield RealQuestion(
                    kind="a passage",
                    prompt=prompt,
                    reference=names[0],
                    is_right=says_one_of(names),
                )
            case "translation" | "summarization":
                yield RealQuestion(kind=kind, prompt=prompt, reference=row["reference"][0])


def _human_eval(path: Path) -> Iterator[RealQuestion]:
    for row in _rows(path):
        head, body = row["prompt"], row["canonical_solution"]
        yield RealQuestion(
            kind="code",
            prompt=f"Complete this Python function.\n\n```python\n{head}```",
            reference=f"```python\n{head}{body}```",
            is_right=passes_tests(head, row["entry_point"], row["test"]),
        )


# ---- judges -----------------------------------------------------------------------------------


def number_is(solution: str) -> Callable[[str], bool]:
    """Judge by the last number of an answer, as of GSM8K's solutions."""
    wanted = _last_number(solution)
    return lambda answer: wanted is not None and _last_number(answer) == wanted


def _last_number(text: str) -> float | None:
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def says_one_of(names: tuple[str, ...]) -> Callable[[str], bool]:
    """Judge by whether the answer has the words of one of the names in a row."""
    wanted = [f" {' '.join(plain_words(name))} " for name in names]

    def is_right(answer: str) -> bool:
        said = f" {' '.join(plain_words(answer))} "
        return any(name in said for name in wanted)

    return is_right


def plain_words(text: str) -> list[str]:
    """Return words without case, punctuation and articles."""
    kept = "".join(" " if char in string.punctuation else char for char in text.lower())
    return [word for word in kept.split() if word not in _ARTICLES]


def common_words(answer: str, reference: str) -> float:
    """Return the F1 of the words that two texts share, however they are ordered."""
    said, wanted = Counter(plain_words(answer)), Counter(plain_words(reference))
    num_common = (said & wanted).total()
    return 2 * num_common / max(said.total() + wanted.total(), 1)


def passes_tests(head: str, name: str, tests: str) -> Callable[[str], bool]:
    """Judge by running HumanEval's tests, in a process of its own with little time and memory."""

    def is_right(answer: str) -> bool:
        code = written_code(answer, head, name)
        return code is not None and _runs(f"{code}\n{tests}\ncheck({name})\n")

    return is_right


def written_code(answer: str, head: str, name: str) -> str | None:
    """Return the program of an answer: the whole function, or a body behind its head.

    None where it cannot be parsed.
    """
    found = _CODE.search(answer)
    code = answer if found is None else found.group(1)
    # Imports and helpers stand in front of the head.
    program = f"{head}\n    pass\n\n{code}" if f"def {name}" in code else head + code
    try:
        ast.parse(program)
    except (SyntaxError, ValueError):
        return None
    return program


def _runs(program: str) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        try:
            ended = subprocess.run(
                [sys.executable, "-I", "-c", program],
                cwd=folder,
                env={},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                preexec_fn=_bound,
                timeout=4 * _TEST_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return False
    return ended.returncode == 0


def _bound() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (_TEST_S, _TEST_S))
    resource.setrlimit(resource.RLIMIT_AS, (_TEST_BYTES, _TEST_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
