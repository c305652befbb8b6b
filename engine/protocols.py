"""The drafter, as an engine needs it, and what passes between the two."""

from collections.abc import Generator, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from torch import Tensor

from outrider.engine.cache.kv_view import KVView
from outrider.engine.passes.device_rows import DeviceRows
from outrider.engine.passes.level_graphs import RecordedTrees
from outrider.engine.passes.runner import ForwardSlice, ModelRunner
from outrider.engine.sequences.sequence import Sequence
from outrider.engine.trees.forest import Forest
from outrider.verifier.token_tree import TokenTree
from outrider.verifier.verdict import Verdict

# The models that draft: the small one, whose passes advance small answers too, and a head that
# reads the large one's hidden states.
DraftModel = Literal["small", "head"]


@dataclass(slots=True, kw_only=True)
class DraftPass:
    """The rows that a proposal wants in the next pass of a model that drafts."""

    slices: list[ForwardSlice]
    owners: list[Sequence]
    """The sequences of the slices, in order, then those of the views."""
    device_rows: DeviceRows | None = None
    """Tree nodes that only the device knows, in front of the slices' rows, equally many for each of
    its views."""
    model: DraftModel = "small"
    features: Tensor | None = None
    """What a head's rows carry beside their tokens, [num_rows, feature_size], those of the device
    rows first."""
    level: "DraftLevel | None" = None
    """In place of device rows, where their level was recorded whole."""
    levels: "DraftLevels | None" = None
    """In place of slices. Nobody need run them: then the rows of the next level are wanted."""

    def num_rows_each(self) -> list[int]:
        """Rows computed for each of the owners, padding included."""
        counts = [len(piece.token_ids) for piece in self.slices]
        num_views = len(self.owners) - len(self.slices)
        if self.device_rows is not None:
            counts += [self.device_rows.total_rows // num_views] * num_views
        elif self.level is not None:
            counts += [self.level.num_rows_each] * num_views
        elif self.levels is not None:
            counts += self.levels.num_rows_each
        return counts


class DraftLevel(Protocol):
    """A level of trees on the device that can be run as one recorded graph."""

    @property
    def recorded(self) -> RecordedTrees:
        """The trees, which the replay grows."""

    @property
    def num_rows_each(self) -> int:
        """Rows of each tree, padding included."""

    def beside(self, wanted: DraftPass) -> DraftPass:
        """Return the pass with the level's rows in front, where other rows share it.

        Then what the pass gives for them is the drafter's to take in.
        """


class DraftLevels(Protocol):
    """Levels of trees that one call of the compiled library runs, as long as one is worth it."""

    @property
    def num_rows_each(self) -> list[int]:
        """Rows computed for each owner."""

    def run(self) -> None:
        """Run them: their passes are over, and the trees have grown, when this returns."""


@dataclass(slots=True, kw_only=True)
class DraftLogits:
    """Logits of a draft pass, float32, valid until that model's next pass."""

    of_slices: Tensor
    """[num_logit_rows, vocab_size], in the slices' order."""
    of_device_rows: Tensor | None = None
    """[total_rows, vocab_size], where such rows were wanted. None where a recorded level was
    replayed, which has grown the trees itself."""
    hidden: Tensor | None = None
    """The hidden states of a head's pass, in the slices' order, [num_logit_rows, hidden_size]."""
    hidden_of_device_rows: Tensor | None = None
    """[total_rows, hidden_size]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureRows:
    """The accepted rows of one sequence in a pass of the large model."""

    sequence: Sequence
    first: int
    """The position in the text of the first row; the others follow it."""
    rows: SequenceOf[int]
    """Their rows of the pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trees:
    """A step's trees: by request id those that the host knows, and those that the device grew."""

    host: dict[str, TokenTree]
    forest: Forest | None = None

    @property
    def num_guesses(self) -> int:
        """Count the nodes behind the roots."""
        forest, on_host = self.forest, sum(tree.num_draft_nodes for tree in self.host.values())
        return on_host if forest is None else on_host + forest.total_rows - forest.num_trees


@dataclass(frozen=True, slots=True, kw_only=True)
class LargeWork:
    """Work of a large pass beside the trees of a proposal."""

    streams: SequenceOf[Sequence] = ()
    """Sequences that decode without a tree; they wait for the step as well."""
    num_prompts: int = 0
    num_prompt_rows: int = 0
    """Rows of all `num_prompts` prompts together."""
    prompts: SequenceOf[tuple[Sequence, int]] = ()
    """Sequences that will want trees, and how many tokens of their prompts the pass computes."""


NO_LARGE_WORK: Final = LargeWork()

# Rows wanted in the next draft pass go out, their logits come in, the trees are returned.
Proposal = Generator[DraftPass, DraftLogits, Trees]


class FeatureReader(Protocol):
    """Takes in the large model's hidden states, for a head that reads them."""

    @property
    def runner(self) -> ModelRunner:
        """The head's runner."""

    @property
    def reads_any(self) -> bool:
        """True if the head reads any sequence at present; if not, `read` need not be called."""

    def begin(self, sequence: Sequence, num_cached: int) -> int:
        """Take from the head's cache what it has of a sequence that is about to start.

        `num_cached`: the tokens that the large model's prefix cache gives it. Returns how many of
        them it should take: fewer where the head lacks some of the last ones. Then a few tokens are
        computed again, rather than missing in the head's view for good.
        """

    def forget(self, sequence: Sequence) -> None:
        """Give back what `begin` took: the sequence cannot start yet."""

    def read(self, taps: Tensor, pieces: SequenceOf[FeatureRows]) -> None:
        """Keep what the head needs of a large pass.

        `taps`: [num_rows, number of taps * hidden_size]. Called before emitted tokens join their
        sequences, and before the large model's next pass.
        """

    def take_in(self) -> Iterator[DraftPass]:
        """The head's passes over rows that wait, where they are many: those of prompts above all.

        Go on when a pass was run; its logits are not wanted.
        """


@dataclass(slots=True, kw_only=True)
class StretchCounts:
    """Steps with guesses, of decodes alone, whose time was compared with that of plain steps.

    A request whose guesses fail gets on slower by plain_steps / num_steps: the stretch.
    """

    num_steps: int = 0
    plain_steps: float = 0.0
    """Number of plain steps that they lasted."""

    def add(self, stretch: float) -> None:
        """Count a step that lasted so many plain ones."""
        self.num_steps += 1
        self.plain_steps += stretch


class Drafter(Protocol):
    """Makes guesses for large-tier sequences with the passes of models that draft."""

    @property
    def stretch(self) -> StretchCounts:
        """Return how much longer than plain ones steps with guesses lasted."""

    @property
    def names(self) -> tuple[str, ...]:
        """The models that draft, as `EngineInfo.drafters` names them."""

    @property
    def features(self) -> FeatureReader | None:
        """The reader of the large model's hidden states; None for a drafter that reads none."""

    @property
    def gives_logits(self) -> bool:
        """True if trees carry the small model's logits where a sequence has a cascade.

        Over the ids of the large model's own tokenizer, and for the root at least: a tree without
        the root's is not judged in that step, and is not committed.
        """

    def propose(
        self, sequences: SequenceOf[Sequence], *, large_work: LargeWork = NO_LARGE_WORK
    ) -> Proposal:
        """Draft one tree for each sequence, a level per pass. May yield nothing at all.

        Without a sequence there may be prompts to read, of `large_work`, and there are no trees. A
        forest's slots are reserved in its sequences' views when it is returned.
        """

    def propose_from_text(
        self, sequence: Sequence, *, max_nodes: int, num_rows: int, num_beside: int
    ) -> TokenTree | None:
        """Return guesses that cost no pass: from a prediction or a retracted answer.

        Asked for a sequence whose prefill is complete in this pass, which judges the tree too; its
        root is the last token. At most `max_nodes` guesses; the pass has `num_rows` rows without
        them, and `num_beside` other sequences wait for it. A verdict on it is committed as well.
        """

    def read_judged(self, sequence: Sequence, *, end: int, max_rows: int) -> ForwardSlice | None:
        """Return rows by which the small model reads on in a text that is judged, up to `end`.

        For a cascade's text, so that logits are wanted of the rows that judge its tokens. They come
        all in one slice; what is missing in front of them may take more than one, of `max_rows` at
        most. The caller runs the rows and advances their view. None where blocks are short.
        """

    def texts(self, sequence: Sequence) -> SequenceOf[tuple[str, KVView, list[int]]]:
        """Name what the models that draft would compute of a sequence that is about to start.

        For each of them "small" or "head", an empty view of its cache, and the tokens.
        """

    def commit(
        self, sequences: SequenceOf[Sequence], verdicts: SequenceOf[Verdict]
    ) -> tuple[list[int], list[int]]:
        """Learn the verdicts; returns (source, destination) slots to move in the small KV cache.

        Called before the emitted tokens are appended to the sequences.
        """

    def adopt(self, sequence: Sequence, view: KVView) -> None:
        """Go on drafting for the sequence from a small view that exists already.

        Called before an answer is retracted: the view's computed slots hold `sequence.token_ids`.
        """

    def release(self, sequence: Sequence) -> None:
        """Release what is held for a sequence that ended or was pre-empted."""

    def reclaim(self, num_blocks: int) -> None:
        """Give back at least so many small blocks if they are held: drafts go before answers."""
