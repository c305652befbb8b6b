"""One model's reasoning: how its answers are read, and the grammar of what comes before them."""

from gateway.text.channels import ChannelSplitter, behind_channels
from gateway.text.grammar_parts import GrammarPart
from gateway.text.reasoning_formats import ReasoningDialect
from gateway.text.thinking import TextSplitter, Thinking, ThinkingSplitter, behind_thinking


def make_splitter(dialect: ReasoningDialect, *, opens_thinking: bool = False) -> TextSplitter:
    """Return a reader of one answer. `opens_thinking`: the prompt ends inside a thought."""
    if dialect.format.has_channels:
        return ChannelSplitter(opens_thinking=opens_thinking)
    return ThinkingSplitter(dialect.format, opens_thinking=opens_thinking)


def behind_reasoning(
    answer: GrammarPart,
    thinking: Thinking,
    dialect: ReasoningDialect,
    *,
    is_framed: bool = False,
    has_marks: bool = True,
) -> GrammarPart:
    """Return the grammar of an answer with the reasoning in front of it.

    `is_framed`: the answer has headers of its own. `has_marks`: the marks around answers may stand
    around this one.
    """
    if dialect.format.has_channels:
        return behind_channels(answer, thinking, dialect, is_framed=is_framed)
    return behind_thinking(answer, thinking, dialect, has_marks=has_marks)
