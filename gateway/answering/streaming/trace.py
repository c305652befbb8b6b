"""The fields of a traced stream about its tokens (docs/api.md)."""

from dataclasses import dataclass, replace

from outrider.engine.trace import NodeSource, StepTrace, TokenOrigin
from outrider.gateway.answering.text.chat import ChatTokenizer


@dataclass(frozen=True, slots=True)
class Mark:
    """The origin of a piece of text."""

    was_drafted: bool
    origin: TokenOrigin | None = None
    """For traced requests."""
    step: int = 0
    """For traced requests: counts the engine's emissions for the choice, from 0 on."""


DRAFTED = Mark(True)
OWN = Mark(False)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTree:
    """The guesses that a step has judged: (text, parent's place, sources, whether accepted).

    The first is the root, whose parent is -1; parents stand before children.
    """

    step: int
    nodes: tuple[tuple[str, int, tuple[NodeSource, ...], bool], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaTrace:
    """The trace of a delta."""

    origins: tuple[TokenOrigin, ...]
    """One a piece."""
    steps: tuple[int, ...]
    """One a piece."""
    trees: tuple[StepTree, ...] = ()
    """The trees of new steps."""


class ChoiceTrace:
    """Marks the tokens of one choice, and keeps its trees until their steps have text."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._step = -1
        self._trees: list[StepTree] = []

    def note(self, trace: StepTrace) -> None:
        """Note the trace of a step."""
        self._step += 1
        if trace.nodes:
            nodes = tuple(
                (self._text(node.token_id), node.parent, node.sources, node.is_accepted)
                for node in trace.nodes
            )
            self._trees.append(StepTree(step=self._step, nodes=nodes))

    def mark(self, trace: StepTrace, position: int, *, was_drafted: bool) -> Mark:
        """Mark where the token at a position of the step came from."""
        return Mark(was_drafted, trace.origins[position], self._step)

    def of_pieces(self, marks: list[Mark]) -> DeltaTrace | None:
        """Return the trace of these pieces, a tree once; None where an engine has sent none."""
        origins = tuple(mark.origin for mark in marks if mark.origin is not None)
        if len(origins) < len(marks):
            return None
        newest = max(mark.step for mark in marks)
        due = tuple(tree for tree in self._trees if tree.step <= newest)
        self._trees = self._trees[len(due) :]
        return DeltaTrace(
            origins=origins,
            steps=tuple(mark.step for mark in marks),
            trees=due,
        )

    def _text(self, token_id: int) -> str:
        return self._tokenizer.token_bytes(token_id).decode("utf-8", "replace")


def as_reused(trace: StepTrace) -> StepTrace:
    """Relabel predictions as reused, for a tier whose prediction was another tier's answer."""
    return StepTrace(
        origins=tuple("reused" if origin == "prediction" else origin for origin in trace.origins),
        nodes=tuple(
            replace(
                node,
                sources=tuple(
                    "reused" if source == "prediction" else source for source in node.sources
                ),
            )
            for node in trace.nodes
        ),
    )
