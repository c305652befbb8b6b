"""Trees of guesses from the small model, earlier text, predictions and grammars."""

import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from math import inf

from draft.budget import AcceptanceEstimate, DraftGain, StepBudget, TreeBudget
from draft.calibration import EdgeCalibration
from draft.config import DraftConfig
from draft.device_growth import DeviceGrowth
from draft.draft_state import Draft, DraftState
from draft.growing_tree import MAX_TREE_SLOTS, GrowingTree
from draft.host_growth import Growth, HostGrowth
from draft.lessons import Lessons
from draft.model_guesses import ModelGuesses
from draft.node_selection import least_chance, select_nodes, weighted_probs
from draft.step_paces import StepPaces
from draft.text_sources import TextSources
from draft.token_map import TokenMap
from engine.cache.kv_view import KVView
from engine.passes.runner import ModelRunner
from engine.protocols import Proposal, Trees, Verdict
from engine.sequences.own_failure import OwnFailure
from engine.sequences.sequence import Sequence
from engine.trees.token_tree import SOURCE_BIT, TokenTree

# How far a request's pace may count for or against its nodes.
_LEAST_URGENCY, _MOST_URGENCY = 0.5, 4.0
# The chance that a grammar's only token is the right one: the text may end before it.
_FORCED = 1.0
# A guess that the text hardly gets to is not worth a look at the grammar behind it.
_WORTH_FORCING = 0.1


class TreeDrafter:
    """Drafts with the small model that also answers: same weights, same passes, own KV views.

    Text and grammars make guesses for nothing; all guesses of a sequence share one prefix tree, and
    all trees of a step one budget. A view that has fallen behind (drafting was off, or guesses were
    accepted that the small model never computed) catches up in the first pass of a proposal.
    `token_map`: for a small model with another vocabulary. `clock`: seconds, as the engine's.
    `device_target`: the large model's runner where trees grow on the device (`DeviceGrowth`).
    """

    def __init__(
        self,
        *,
        runner: ModelRunner,
        config: DraftConfig | None = None,
        budget: TreeBudget | None = None,
        token_map: TokenMap | None = None,
        calibration: EdgeCalibration | None = None,
        device_target: ModelRunner | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runner = runner
        self._config = config or DraftConfig()
        self._budget = budget
        self._token_map = token_map
        self._clock = clock
        self._states: dict[str, DraftState] = {}
        self._paces = None if budget is None else StepPaces(clock)
        self._model = ModelGuesses(
            runner=runner,
            config=self._config,
            token_map=token_map,
            make_room=self._make_room,
            on_new=self._force,
        )
        self._text = TextSources(max_depth=self._config.max_text_depth)
        self._lessons = Lessons(calibration or EdgeCalibration())
        host = HostGrowth(model=self._model, config=self._config, clock=clock)
        self._host_times = host.host_times
        self._growth: Growth = host
        if device_target is not None:
            self._growth = DeviceGrowth(
                runner=runner,
                target=device_target,
                model=self._model,
                host=host,
                config=self._config,
                lessons=self._lessons,
                clock=clock,
            )

    # ---- the engine's protocol ------------------------------------------------------------

    @property
    def gives_logits(self) -> bool:
        """True if a cascade is possible; see `engine.protocols.Drafter`."""
        return self._token_map is None

    def propose(self, sequences: SequenceOf[Sequence]) -> Proposal:
        """Draft one tree for each sequence; see `engine.protocols.Drafter`."""
        if self._paces is not None and not self._paces.wants_guesses(sequences):
            self._growth.note_plain_step()
            return Trees(host={})
        drafts = [self._init_tree(sequence) for sequence in sequences]
        step = self._step_budget(drafts)
        for draft in drafts:
            self._guess_from_text(draft)
        growers = self._choose_growers(drafts, step)
        return (yield from self._growth.grow(growers, drafts, step))

    def propose_from_text(
        self, sequence: Sequence, *, max_nodes: int, num_rows: int, num_beside: int
    ) -> TokenTree | None:
        """Return what is predicted or was written before; see `engine.protocols.Drafter`."""
        expects = sequence.proposal_token_ids or sequence.request.prediction_token_ids
        if sequence.cascade is not None or not expects:
            return None
        draft = self._init_tree(sequence, max_nodes=max_nodes)
        self._guess_from_text(draft)
        step: StepBudget | None = None
        if self._budget is not None:
            step = self._budget.of_step(
                num_sequences=num_rows,
                context=len(sequence.token_ids),
                base_tokens=num_beside + draft.urgency,
            )
            if not num_beside:  # no other sequence waits, and the first token comes with more
                step = replace(step, longest_s=inf)
        floor = least_chance([draft], step, spent_s=0.0)
        return select_nodes([draft], floor)[sequence.request_id]

    def commit(self, sequence: Sequence, verdict: Verdict) -> tuple[list[int], list[int]]:
        """Learn from the verdict, keep the accepted path; see `engine.protocols.Drafter`."""
        state = self._states.get(sequence.request_id)
        if state is None or state.tree is None:
            return [], []
        tree, state.tree = state.tree, None
        self._lessons.learn_tree(state, tree, verdict.token_ids)
        return state.keep_accepted(tree, verdict)

    def adopt(self, sequence: Sequence, view: KVView) -> None:
        """Draft on from an existing small view."""
        self._state(sequence).adopt(view)

    def release(self, sequence: Sequence) -> None:
        """Give back the sequence's draft view; an answer that ended may repeat in later ones."""
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
        wanted = self._runner.pool.num_available + num_blocks
        self._release_views(list(self._states.values()), until=wanted)

    def _make_room(self, draft: Draft, num_blocks: int) -> None:
        """Let the drafts of later arrivals go until so many blocks are free."""
        arrival = draft.sequence.arrival_number
        later = [s for s in self._states.values() if s.sequence.arrival_number > arrival]
        later.sort(key=lambda state: state.sequence.arrival_number)
        self._release_views(later, until=num_blocks)

    def _release_views(self, states: list[DraftState], *, until: int) -> None:
        """Give back views, the last first, until so many blocks are free."""
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
                token_map=self._token_map,
                acceptance=AcceptanceEstimate(self._lessons.acceptance.value),
            )
            self._states[sequence.request_id] = state
        return state

    def _init_tree(self, sequence: Sequence, *, max_nodes: int = MAX_TREE_SLOTS) -> Draft:
        """A tree of the root only, with the limits of the config and of the request."""
        own, config = sequence.request.speculation, self._config
        state = self._state(sequence)
        state.was_asked = False
        nodes = min(config.max_draft_nodes, max_nodes) if own.enabled else 0
        if own.max_draft_nodes is not None:
            nodes = min(nodes, own.max_draft_nodes)
        own_depth = nodes if own.max_draft_depth is None else own.max_draft_depth
        # The last token of an answer comes from the target itself, and the small model's context
        # may be the shorter one.
        num_ahead = sequence.num_remaining_tokens - 1
        assert self._runner.max_context is not None
        num_positions = self._runner.max_context - len(sequence.token_ids)
        sources = frozenset(config.sources)
        if own.sources is not None:
            sources &= frozenset(own.sources)
        state.tree = GrowingTree(
            root_token_id=sequence.token_ids[-1],
            root_slot=len(sequence.token_ids) - 1,
            max_nodes=nodes,
            max_depth=min(config.max_draft_depth, own_depth, num_ahead, num_positions),
            calibrate=self._lessons.calibrate(sequence),
            keeps_logits=sequence.request.cascade is not None,
        )
        return Draft(
            state=state,
            tree=state.tree,
            sources=sources,
            urgency=self._urgency(sequence),
            max_text_depth=min(config.max_text_depth, own_depth, num_ahead, nodes),
            max_answer_depth=min(own_depth, num_ahead, nodes),
            needs_root=sequence.request.cascade is not None,
        )

    def _urgency(self, sequence: Sequence) -> float:
        """Weight of a token: greater for a request that is behind the pace it asked for."""
        wanted_s = sequence.request.speculation.inter_token_s
        if wanted_s is None or sequence.first_token_s is None:
            return 1.0
        spent_s = self._clock() - sequence.first_token_s
        pace_s = spent_s / max(sequence.num_own_tokens, 1)
        return min(max(pace_s / wanted_s, _LEAST_URGENCY), _MOST_URGENCY)

    def _step_budget(self, drafts: SequenceOf[Draft]) -> StepBudget | None:
        if self._budget is None:
            return None
        lengths = [len(draft.sequence.token_ids) for draft in drafts]
        return self._budget.of_step(
            num_sequences=len(drafts),
            context=sum(lengths) / max(len(lengths), 1),
            base_tokens=sum(draft.urgency for draft in drafts),
            level_host_s=self._host_times(len(drafts)),
            beside_s=self._growth.beside_s(len(drafts)),
        )

    # ---- guesses that cost no pass --------------------------------------------------------

    def _guess_from_text(self, draft: Draft) -> None:
        """Add the guesses that cost no pass; where they cannot be made, the request fails alone."""
        with OwnFailure(draft.sequence):
            self._add_text(draft)

    def _add_text(self, draft: Draft) -> None:
        """Add what a grammar forces, what the client predicted and what the text repeats."""
        limit = draft.max_text_depth
        if limit <= 0:
            return
        self._force(draft, [0])
        self._retrace(draft)
        guesses = self._text.guess(draft.sequence, draft.sources, limit)
        grammar = draft.sequence.grammar
        floor = self._config.min_path_prob
        for source, chains in guesses.items():
            for chain in chains:
                tokens, confidences = chain.token_ids, chain.edge_probs
                if grammar is not None:
                    num_valid = grammar.num_valid(draft.sequence.token_ids, [], tokens)
                    tokens, confidences = tokens[:num_valid], confidences[:num_valid]
                draft.tree.add_chain(
                    SOURCE_BIT[source],
                    tokens,
                    confidences,
                    min_path_prob=floor,
                    is_recalled=chain.is_recalled,
                )

    def _retrace(self, draft: Draft) -> None:
        """Add what the small model wrote before the answer changed its tier, and its rivals."""
        sequence = draft.sequence
        if not sequence.proposal_candidates or "model" not in draft.sources:
            return
        place = self._text.num_retraced(sequence)
        if place is not None:
            draft.tree.add_answer(
                sequence.proposal_token_ids[place:],
                sequence.proposal_candidates[place : place + draft.max_answer_depth],
                min_path_prob=self._config.min_path_prob,
            )

    def _force(self, draft: Draft, nodes: SequenceOf[int]) -> None:
        """Behind these nodes, add the tokens that the grammar leaves no choice about."""
        grammar, tree = draft.sequence.grammar, draft.tree
        if grammar is None or "grammar" not in draft.sources:
            return
        for node in nodes if draft.sequence.failure is None else ():
            candidate = tree.candidates[node]
            limit = draft.max_text_depth - candidate.depth
            if limit > 0 and candidate.path_prob >= _WORTH_FORCING:
                with OwnFailure(draft.sequence):
                    forced = grammar.forced_tokens(draft.sequence.token_ids, tree.path(node), limit)
                    tree.add_chain(SOURCE_BIT["grammar"], forced, [_FORCED] * len(forced), node)

    # ---- the small model's guesses --------------------------------------------------------

    def _choose_growers(self, drafts: SequenceOf[Draft], step: StepBudget | None) -> list[Draft]:
        """The sequences that the small model drafts for in this step, in the given order."""
        able = [
            draft
            for draft in drafts
            if (draft.may_ask_model or draft.needs_root)
            and draft.state.can_be_read(self._runner.vocab_size)
        ]
        if step is None:
            return able
        max_depth = self._config.max_draft_depth
        gains = [(self._draft_gain(draft), draft) for draft in able if draft.may_ask_model]
        gains.sort(key=lambda item: -item[0].gain(max_depth))
        number = step.num_worth_drafting(
            [gain for gain, _ in gains], weighted_probs(drafts), max_depth
        )
        chosen = {id(draft) for _, draft in gains[:number]}
        for draft in able:
            if id(draft) not in chosen:
                draft.state.acceptance.forget()
        if not chosen:
            self._lessons.acceptance.forget()
        return [draft for draft in able if id(draft) in chosen or draft.needs_root]

    def _draft_gain(self, draft: Draft) -> DraftGain:
        # A cascade accepts no text that the small model has not read.
        text_tokens = 0.0 if draft.needs_root else sum(prob for prob, _ in draft.tree.verifiable())
        return DraftGain(
            acceptance=draft.state.acceptance.value,
            text_tokens=text_tokens,
            urgency=draft.urgency,
        )
