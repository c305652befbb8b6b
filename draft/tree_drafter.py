"""Trees of guesses from models that draft, earlier text, predictions and grammars."""

import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from math import inf

from outrider.draft.budget.budget import (
    Floats,
    StepBudget,
    TreeBudget,
)
from outrider.draft.budget.calibration import EdgeCalibration
from outrider.draft.budget.group_choice import StepKind
from outrider.draft.budget.step_choice import MODELS, StepChoice
from outrider.draft.config import DraftConfig
from outrider.draft.device.device_growth import DeviceGrowth
from outrider.draft.draft_state import Draft, DraftState, urgency_of
from outrider.draft.guesses.block_guesses import BlockGuesses
from outrider.draft.guesses.head_guesses import HeadGuesses
from outrider.draft.guesses.head_texts import Head, HeadTexts
from outrider.draft.guesses.model_guesses import ModelGuesses
from outrider.draft.guesses.text_guesses import TextGuesses
from outrider.draft.host_growth import Growth, HostGrowth
from outrider.draft.judged_rows import judged_rows
from outrider.draft.lessons import Lessons
from outrider.draft.node_selection import least_chance, select_nodes, weighted_probs
from outrider.draft.prompt_reading import PromptReading
from outrider.draft.step_budgets import StepBudgets
from outrider.draft.text.text_sources import TextSources
from outrider.draft.text.token_map import TokenMap
from outrider.draft.trees.tree_batch import DraftTree, new_tree
from outrider.engine.cache.kv_view import KVView
from outrider.engine.passes.runner import ForwardSlice, ModelRunner
from outrider.engine.protocols import (
    NO_LARGE_WORK,
    DraftModel,
    FeatureReader,
    LargeWork,
    Proposal,
    StretchCounts,
    Trees,
)
from outrider.engine.sequences.sequence import Sequence
from outrider.kernels.tree_bounds import MAX_TREE_NODES
from outrider.verifier.own_failure import OwnFailure
from outrider.verifier.token_tree import TokenTree
from outrider.verifier.verdict import Verdict


class TreeDrafter:
    """Drafts with the small model that also answers, with a head of the large model, or with both.

    Without either it drafts from text and grammars alone.

    The small model: same weights, same passes, own KV views. A head: own passes, over the hidden
    states that the large model's passes yield. One of them drafts in a step, or none: `StepChoice`.
    Text and grammars make guesses for nothing. All guesses of a sequence share one prefix tree, and
    all trees of a step one budget. A view falls behind while drafting is off, or when guesses are
    accepted that the small model never computed. It catches up in the first pass of a proposal.
    `runner`: the small model's, None where it does not draft. `token_map`: for a small model with
    another vocabulary. `clock`: seconds, as the engine's. `device_target`: the large model's runner
    where the small model's trees grow on the device (`DeviceGrowth`).
    """

    def __init__(  # noqa: PLR0913 - the parts of a drafter
        self,
        *,
        runner: ModelRunner | None,
        head: Head | None = None,
        config: DraftConfig | None = None,
        budget: TreeBudget | None = None,
        token_map: TokenMap | None = None,
        calibration: EdgeCalibration | None = None,
        device_target: ModelRunner | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runner = runner
        self._head = head
        self._config = config or DraftConfig()
        self._budget = budget
        self._token_map = token_map
        self._clock = clock
        self._states: dict[str, DraftState] = {}
        self._text = TextSources(max_depth=self._config.max_text_depth)
        self._free = TextGuesses(self._text, self._config)
        self._lessons = Lessons(calibration or EdgeCalibration())
        self.choice = StepChoice(clock)
        self._head_texts: HeadTexts | None = None
        guesses: dict[DraftModel, ModelGuesses] = {}
        if head is not None:
            self._head_texts = HeadTexts(head, sources=self._config.sources)
            kind = HeadGuesses if head.model.block is None else BlockGuesses
            guesses["head"] = kind(
                head, texts=self._head_texts, config=self._config, on_new=self._free.force
            )
        if runner is not None:
            guesses["small"] = ModelGuesses(
                runner=runner,
                config=self._config,
                token_map=self._token_map,
                make_room=self._make_room,
                on_new=self._free.force,
            )
        self._growths: dict[DraftModel, HostGrowth] = {
            model: HostGrowth(model=each, config=self._config) for model, each in guesses.items()
        }
        # What grows last in a step chooses the nodes, too.
        self._last: dict[DraftModel, Growth] = dict(self._growths)
        if device_target is not None:
            self._last = {
                model: DeviceGrowth(
                    target=device_target,
                    model=each,
                    host=self._growths[model],
                    config=self._config,
                    lessons=self._lessons,
                    source=model,
                )
                for model, each in guesses.items()
            }
        self._budgets = StepBudgets(budget, self._growths, self.choice)
        self._prompts = PromptReading(
            runner,
            config=self._config,
            budgets=self._budgets,
            choice=self.choice,
            acceptance=self._lessons.acceptance,
            offered=self._offered,
            state_of=self._state,
        )

    # ---- the engine's protocol ------------------------------------------------------------

    @property
    def gives_logits(self) -> bool:
        """True if a cascade is possible; see `outrider.engine.protocols.Drafter`."""
        return self._runner is not None and self._token_map is None

    @property
    def names(self) -> tuple[str, ...]:
        """The models that draft; see `outrider.engine.protocols.Drafter`."""
        small = () if self._runner is None else ("small",)
        return small if self._head is None else (*small, self._head.model.kind)

    @property
    def stretch(self) -> StretchCounts:
        """Return how long steps lasted, in plain ones; see `outrider.engine.protocols.Drafter`."""
        return self.choice.stretches

    @property
    def features(self) -> FeatureReader | None:
        """Return the reader of a head's features; see `outrider.engine.protocols.Drafter`."""
        return self._head_texts

    def propose(
        self, sequences: SequenceOf[Sequence], *, large_work: LargeWork = NO_LARGE_WORK
    ) -> Proposal:
        """Draft one tree for each sequence; see `outrider.engine.protocols.Drafter`."""
        if not sequences:
            self._budgets.plain_step_s(sequences, large_work)
            yield from self._prompts.read(sequences, large_work)
            return Trees(host={})
        offered = self._offered(sequences)
        self.choice.learn(sequences)
        self._budgets.begin_step(sequences, large_work)
        plain_s = self._budgets.plain_step_s(sequences, large_work)
        patience = self._budgets.patience
        kind = self.choice.choose(
            sequences,
            offered,
            plain_s=plain_s,
            num_prompts=large_work.num_prompts,
            begin_s=lambda kind: self._catch_up_s(kind, sequences),
            patience=patience,
            # A request that is alone pays in parts when its own text is read.
            begin_patience=patience if len(sequences) + len(large_work.streams) > 1 else inf,
        )
        yield from self._prompts.read(sequences, large_work)
        if kind != "head" and self._head_texts is not None:
            self._head_texts.note_unasked()
        is_plain_due = "plain" in offered and patience < 0.0
        may_be_sure = kind == "plain" and "text" in offered and not is_plain_due
        if may_be_sure and self._free.is_sure(sequences, plain_s):
            kind = "text"
            self.choice.guess_after_all()
        if kind == "plain" or is_plain_due:
            self.choice.turn_plain()
            self._budgets.end_plain_step(sequences)
            return Trees(host={})
        trees = yield from self._grow(sequences, kind)
        self._budgets.end_step(trees)
        return trees

    def _grow(self, sequences: SequenceOf[Sequence], kind: StepKind) -> Proposal:
        """Grow the trees of a step that may have guesses."""
        drafts = [self._init_tree(sequence) for sequence in sequences]
        self._free.add_all(drafts)
        probs = weighted_probs(drafts)
        growers = self._choose_growers(drafts, kind, probs)
        if not any(growers.values()) and not any(d.tree.num_candidates > 1 for d in drafts):
            for draft in drafts:
                draft.state.tree = None
            return Trees(host={})
        if not self._growths:
            floor = least_chance(drafts, self._budgets.of_step(drafts, "small", []))
            return Trees(host=select_nodes(drafts, floor))
        last: DraftModel = "small" if self._runner is not None else "head"
        asked = [*growers["head"], *growers["small"]]
        if growers["head"] and growers["small"]:  # a forest has one model's trees
            step = self._budgets.of_step(drafts, "head", asked)
            yield from self._growths["head"].run_passes(growers["head"], drafts, step)
            weighted_probs(drafts)
        elif growers["head"]:
            last = "head"
        step = self._budgets.of_step(drafts, last, asked)
        return (yield from self._last[last].grow(growers[last], drafts, step))

    def propose_from_text(
        self, sequence: Sequence, *, max_nodes: int, num_rows: int, num_beside: int
    ) -> TokenTree | None:
        """Guess what was predicted or written; see `outrider.engine.protocols.Drafter`."""
        expects = sequence.proposal_token_ids or sequence.request.prediction_token_ids
        if sequence.cascade is not None or not expects:
            return None
        draft = self._init_tree(sequence, max_nodes=max_nodes)
        self._free.add(draft)
        step: StepBudget | None = None
        if self._budget is not None:
            step = self._budget.of_step(
                "small",
                num_sequences=num_rows,
                context=len(sequence.token_ids),
                base_tokens=num_beside + draft.urgency,
            )
            if not num_beside:  # no other sequence waits, and the first token comes with more
                step = replace(step, longest_s=inf)
        floor = least_chance([draft], step)
        return select_nodes([draft], floor)[sequence.request_id]

    def commit(
        self, sequences: SequenceOf[Sequence], verdicts: SequenceOf[Verdict]
    ) -> tuple[list[int], list[int]]:
        """Learn, and keep the accepted paths; see `outrider.engine.protocols.Drafter`."""
        states: list[DraftState] = []
        trees: list[DraftTree] = []
        judged: list[Verdict] = []
        for sequence, verdict in zip(sequences, verdicts, strict=True):
            state = self._states.get(sequence.request_id)
            if state is not None and state.tree is not None:
                states.append(state)
                trees.append(state.tree)
                judged.append(verdict)
                state.tree = None
        sources: list[int] = []
        destinations: list[int] = []
        if not trees:
            return sources, destinations
        found = self._lessons.learn_trees(states, trees, [each.token_ids for each in judged])
        for state, verdict, offsets in zip(states, judged, found, strict=True):
            if state.model == "head":
                assert self._head_texts is not None
                self._head_texts.drop_tree(state.sequence)
                continue
            own_sources, own_destinations = state.keep_accepted(verdict, offsets)
            sources += own_sources
            destinations += own_destinations
        return sources, destinations

    def read_judged(self, sequence: Sequence, *, end: int, max_rows: int) -> ForwardSlice | None:
        """Read on in a text that is judged; see `outrider.engine.protocols.Drafter`."""
        if self._runner is None:
            return None
        state = self._state(sequence)
        return judged_rows(
            state, self._runner, end=end, max_rows=max_rows, make_room=self._make_room
        )

    def texts(self, sequence: Sequence) -> list[tuple[str, KVView, list[int]]]:
        """Name what drafting reads of a sequence; see `outrider.engine.protocols.Drafter`."""
        if sequence.tier != "large" or not sequence.request.speculation.enabled:
            return []
        found: list[tuple[str, KVView, list[int]]] = []
        if self._runner is not None and self._token_map is None:
            view = self._runner.new_view(sequence.request.cache_salt)
            found.append(("small", view, sequence.token_ids))
        if self._head_texts is not None:
            found.append(("head", self._head_texts.new_view(sequence), sequence.token_ids[1:]))
        return found

    def adopt(self, sequence: Sequence, view: KVView) -> None:
        """Draft on from an existing small view."""
        if self._runner is None:
            view.release()
        else:
            self._state(sequence).adopt(view)

    def release(self, sequence: Sequence) -> None:
        """Give back the sequence's draft views; an answer that ended may repeat in later ones."""
        if self._head_texts is not None:
            self._head_texts.forget(sequence)
        state = self._states.pop(sequence.request_id, None)
        if state is not None:
            state.release()
        if sequence.finish_reason is not None:
            if sequence.tier == "large" or self._token_map is None:
                with OwnFailure(sequence):
                    self._text.remember(sequence)
            self._text.release(sequence)

    def reclaim(self, num_blocks: int) -> None:
        """Give back draft views, the latest first, until `num_blocks` blocks are free again."""
        if self._runner is not None:
            wanted = self._runner.pool.num_available + num_blocks
            self._release_views(list(self._states.values()), until=wanted)

    def _make_room(self, sequence: Sequence, num_blocks: int) -> None:
        """Let the drafts of arrivals later than a sequence go until so many blocks are free."""
        arrival = sequence.arrival_number
        later = [s for s in self._states.values() if s.sequence.arrival_number > arrival]
        later.sort(key=lambda state: state.sequence.arrival_number)
        self._release_views(later, until=num_blocks)

    def _release_views(self, states: list[DraftState], *, until: int) -> None:
        """Give back views, the last first, until so many blocks are free."""
        assert self._runner is not None
        for state in reversed(states):
            if self._runner.pool.num_available >= until:
                return
            state.release()

    # ---- the roots ------------------------------------------------------------------------

    def _state(self, sequence: Sequence) -> DraftState:
        state = self._states.get(sequence.request_id)
        if state is None:
            state = DraftState(
                sequence=sequence,
                limits=self._config.limits_of(sequence.request.speculation),
                token_map=self._token_map,
                acceptance=self._lessons.acceptance.of_one(),
                head_acceptance=self._lessons.head_acceptance.of_one(),
            )
            self._states[sequence.request_id] = state
        return state

    def _init_tree(self, sequence: Sequence, *, max_nodes: int = MAX_TREE_NODES) -> Draft:
        """A tree of the root only, with the limits of the config and of the request."""
        state, config = self._state(sequence), self._config
        limits, state.was_asked = state.limits, False
        nodes = min(limits.max_nodes, max_nodes)
        own_depth = nodes if limits.max_depth is None else limits.max_depth
        num_ahead = sequence.num_remaining_tokens - 1  # the last token comes from the target itself
        state.tree = new_tree(
            root_token_id=sequence.token_ids[-1],
            root_slot=len(sequence.token_ids) - 1,
            max_nodes=nodes,
            max_depth=min(config.max_draft_depth, own_depth, num_ahead),
            calibration=self._lessons.calibrate(sequence),
            keeps_logits=sequence.request.cascade is not None,
        )
        return Draft(
            state=state,
            tree=state.tree,
            sources=limits.sources,
            urgency=urgency_of(sequence, self._clock()),
            max_text_depth=min(config.max_text_depth, own_depth, num_ahead, nodes),
            max_answer_depth=min(own_depth, num_ahead, nodes),
            needs_root=sequence.request.cascade is not None,
        )

    def _catch_up_s(self, kind: StepKind, sequences: SequenceOf[Sequence]) -> float:
        """Expected seconds until the small model has read one of these, if it is to draft."""
        if kind != "small" or self._budget is None:
            return 0.0
        return self._budget.draft_pass_s(
            min(self._state(sequence).num_missing_tokens for sequence in sequences)
        )

    def _readable(self, able: list[Draft], most_s: float) -> list[Draft]:
        """Return those whose texts the small model can read in so many seconds.

        Requests wait for it, and the more a probe begins with, the less it may find out.
        """
        assert self._budget is not None
        num_rows, cheapest = 0, sorted(able, key=lambda draft: draft.state.num_missing_tokens)
        for number, draft in enumerate(cheapest):
            num_rows += draft.state.num_missing_tokens
            is_dear = self._budget.draft_pass_s(num_rows) > most_s
            if is_dear and num_rows > 2 * len(able):  # what any step takes in is no catching up
                return cheapest[:number]
        return cheapest

    # ---- which model drafts, and for which sequences --------------------------------------

    def _offered(self, sequences: SequenceOf[Sequence]) -> list[StepKind]:
        """The kinds that the step of these sequences may be of."""
        texts, own = self._head_texts, [s for s in sequences if s.cascade is None]
        kinds: list[StepKind] = []
        if texts is not None and any(texts.can_draft(sequence) for sequence in own):
            kinds.append("head")
        if self._runner is not None and any(
            "model" in self._config.sources_of(each.request.speculation) for each in own
        ):
            kinds.append("small")
        if self._budget is None:  # always the largest trees
            return kinds or ["text"]
        if not any(s.cascade or s.request.speculation.may_guess for s in sequences):
            return ["plain"]
        return [*kinds, "text", "plain"] if len(own) == len(sequences) else [*kinds, "text"]

    def _choose_growers(
        self, drafts: SequenceOf[Draft], kind: StepKind, probs: Floats
    ) -> dict[DraftModel, list[Draft]]:
        """The sequences that each model drafts for in this step, in the given order.

        `probs`: of the guesses that are there (`weighted_probs`).
        """
        able: dict[DraftModel, list[Draft]] = {"small": [], "head": []}
        for draft in drafts:
            draft.state.model = "small"
            if kind in MODELS or draft.needs_root:
                models = self._able_models(draft)
                if models:
                    draft.state.model = MODELS[kind] if kind in models else models[0]
                    able[draft.state.model].append(draft)
        return {model: self._worth_asking(model, able[model], drafts, probs) for model in able}

    def _able_models(self, draft: Draft) -> list[DraftModel]:
        """The models that can draft for a sequence in this step. A cascade wants the small one."""
        models: list[DraftModel] = []
        texts, runner = self._head_texts, self._runner
        if texts is not None and not draft.needs_root and draft.may_ask("head"):
            models += ["head"] if texts.can_draft(draft.sequence) else []
        if runner is not None and (draft.may_ask("small") or draft.needs_root):
            assert runner.max_context is not None
            has_room = draft.needs_root or len(draft.sequence.token_ids) < runner.max_context
            can_read = draft.state.can_be_read(runner.vocab_size)
            models += ["small"] if has_room and can_read else []
        return models

    def _worth_asking(
        self, model: DraftModel, able: list[Draft], drafts: SequenceOf[Draft], probs: Floats
    ) -> list[Draft]:
        """Return the sequences, in the given order, for which the model is worth asking."""
        step = self._budgets.of_step(drafts, model, able) if able else None
        if step is None:
            return able
        growth, is_probe = self._growths[model], self.choice.is_probe
        readable = able
        if model == "small":
            most_s = self._budgets.reading_s([draft.sequence for draft in able])
            most_s = min(self.choice.probe_s, most_s) if is_probe else most_s
            readable = self._readable(able, most_s)
        gains = [
            (draft.gain(growth.num_missing(draft), is_probe=is_probe), draft)
            for draft in readable
            if draft.may_ask_model
        ]
        max_depth = self._config.max_draft_depth
        if (block := growth.block) is not None:
            max_depth = min(max_depth, block.num_depths)
        gains.sort(key=lambda item: -item[0].gain(max_depth))
        number = step.num_worth_drafting([gain for gain, _ in gains], probs, max_depth)
        if 0 < number < len(able):  # the others only wait
            gains = gains[:number]
            step = self._budgets.of_step(drafts, model, [draft for _, draft in gains])
            assert step is not None
            number = step.num_worth_drafting([gain for gain, _ in gains], probs, max_depth)
        chosen = {id(draft) for _, draft in gains[:number]}
        for draft in able:
            if id(draft) not in chosen:
                draft.acceptance.forget()
            if model == "head" and self._head_texts is not None:
                self._head_texts.note_asked(id(draft) in chosen)
        return [draft for draft in able if id(draft) in chosen or draft.needs_root]
