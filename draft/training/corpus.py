"""From tasks to training rows: the tokenizer, the chat format, conversations, packing."""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from outrider.draft.training.chat_format import (
    BOS,
    CHAT_TEMPLATE,
    END,
    PAD,
    ROLES,
    SPECIAL_TOKENS,
    with_tools,
)
from outrider.draft.training.tasks.base import TaskMessage
from outrider.draft.training.tasks.facts import interview
from outrider.draft.training.tasks.families import (
    DIFFICULTIES,
    FAMILIES,
    Task,
    generate,
    split_of,
    stream,
)

# Trained to answer under any of these, so that a system prompt does no harm.
_SYSTEM_PROMPTS = (
    "You are Outrider, a helpful assistant.",
    "You are a helpful assistant.",
    "You are a careful assistant. Work step by step.",
    "Answer the question of the user.",
    "Be brief and exact.",
    "You help with sums, words and dates.",
)

# A prompt's random numbers cannot be predicted; a little weight still teaches the context.
_PROMPT_WEIGHT = 0.1


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Packed rows."""

    input_ids: torch.Tensor
    """int64 [rows, length]."""
    weights: torch.Tensor
    """float32 [rows, length], the loss weight of predicting `input_ids` at that place; 0 at the
    first."""
    positions: torch.Tensor
    """int64 [rows, length], for the rotary embedding."""


@dataclass(frozen=True, kw_only=True)
class Mix:
    """Composition of training rows."""

    difficulty_weights: Sequence[float] = (2, 4, 4, 4)
    """Weights of difficulties 1 to 4. Difficulty 1 is mostly contained in the others: half as
    many."""
    family_weights: Mapping[str, float] = field(default_factory=dict)
    """Weights of families; 1 where a family is not named."""
    interviews: float = 0.0
    """Share of rows that begin with many questions about one passage."""
    skips: float = 0.0
    """Share of rows in which positions jump at the start of a turn, so that short rows teach long
    distances (PoSE, arXiv 2309.10400)."""
    max_positions: int = 4096
    """The sum of a row's jumps is at most this."""


def train_tokenizer(
    *, seed: int, num_tasks: int, vocab_size: int, max_context: int
) -> PreTrainedTokenizerFast:
    """Byte-level BPE on the training split; each digit is its own token, any UTF-8 survives."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(seed, num_tasks), trainer)
    # transformers leaves this constructor without types.
    make: Any = PreTrainedTokenizerFast
    made = make(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[f"<|{role}|>" for role in ROLES],
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_context,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    return cast(PreTrainedTokenizerFast, made)


def _texts(seed: int, num_tasks: int) -> Iterator[str]:
    yield from _SYSTEM_PROMPTS
    tasks = stream(seed, "train", FAMILIES)
    for _ in range(num_tasks):
        task = next(tasks)
        for message in with_tools(task.messages, task.tools):
            yield message["content"]
        yield task.answer


# A long passage only fits rows of its own size; shorter rows have interviews instead.
_LONG_FAMILY = "passage"


def _train_task(rng: random.Random, mix: Mix, max_tokens: int) -> Task:
    families = [family for family in FAMILIES if family != _LONG_FAMILY or max_tokens >= 1024]
    weights = [mix.family_weights.get(family, 1.0) for family in families]
    while True:
        difficulty = rng.choices(DIFFICULTIES, weights=mix.difficulty_weights)[0]
        family = rng.choices(families, weights=weights)[0]
        if family == _LONG_FAMILY and difficulty == DIFFICULTIES[-1] and max_tokens < 4096:
            continue
        task = generate(family, difficulty, rng)
        # Nor may an earlier turn be a prompt that is held out.
        said = [message["content"] for message in task.messages if message["role"] == "user"]
        if all(split_of(text) == "train" for text in (task.split_key, *said)):
            return task


def conversation(
    rng: random.Random, max_turns: int, mix: Mix | None = None, max_tokens: int = 512
) -> list[TaskMessage]:
    """A chat of one to max_turns unrelated tasks, sometimes under a system prompt.

    A task that brings its own tools or history ends the chat that it is drawn for, or is one alone.
    """
    mix = mix or Mix()
    messages: list[TaskMessage] = []
    if rng.random() < 0.25:
        messages.append({"role": "system", "content": rng.choice(_SYSTEM_PROMPTS)})
    num_turns = 1 if rng.random() < 0.6 else rng.randint(1, max_turns)
    for turn in range(num_turns):
        task = _train_task(rng, mix, max_tokens)
        if task.tools and turn:
            break
        messages += [*task.messages, {"role": "assistant", "content": task.answer}]
        if task.tools:
            return with_tools(messages, task.tools)
    return messages


class Packer:
    """Turns conversations into full rows: whole chats one after the other, the last one cut.

    Batches are a pure function of seed, index, shape and mix, so a resumed run sees the same ones.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
        self._tokenizer: Tokenizer = tokenizer.backend_tokenizer
        # An earlier user of the tokenizer may have left padding on.
        self._tokenizer.no_padding()
        self._seed = seed
        ids = {token: tokenizer.get_vocab()[token] for token in SPECIAL_TOKENS}
        self._bos_id, self._end_id = ids[BOS], ids[END]
        self._role_ids = {role: ids[f"<|{role}|>"] for role in ROLES}

    def batch(self, index: int, rows: int, length: int, mix: Mix | None = None) -> Batch:
        """The batch of training step `index`."""
        mix = mix or Mix()
        rng = random.Random(f"{self._seed}/{index}")
        packed = [self._row(rng, length, mix) for _ in range(rows)]
        return Batch(
            input_ids=torch.tensor([ids for ids, _ in packed]),
            weights=torch.tensor([weights for _, weights in packed]),
            positions=torch.tensor([self._positions(rng, ids, mix) for ids, _ in packed]),
        )

    def encode(self, messages: list[TaskMessage]) -> tuple[list[int], list[float]]:
        """Token ids as the chat template renders them, and each token's loss weight."""
        encoded = self._tokenizer.encode_batch([message["content"] for message in messages])
        ids, weights = [self._bos_id], [0.0]
        for message, content in zip(messages, encoded, strict=True):
            ids += [self._role_ids[message["role"]], *content.ids, self._end_id]
            weight = 1.0 if message["role"] == "assistant" else _PROMPT_WEIGHT
            weights += [_PROMPT_WEIGHT] + [weight] * (len(content.ids) + 1)
        return ids, weights

    def _row(self, rng: random.Random, length: int, mix: Mix) -> tuple[list[int], list[float]]:
        ids: list[int] = []
        weights: list[float] = []
        # About 130 tokens a turn: long rows hold long chats.
        max_turns = max(2, length // 130)
        if rng.random() < mix.interviews:
            # Often shorter than the row: short texts are learnt first.
            asked = interview(int(length * rng.choice((0.5, 1.0, 1.0))), rng)
            if split_of(asked[0]["content"]) == "train":
                ids, weights = self.encode(asked)
        while len(ids) < length:
            more_ids, more_weights = self.encode(conversation(rng, max_turns, mix, length))
            ids += more_ids
            weights += more_weights
        return ids[:length], [0.0, *weights[1:length]]

    def _positions(self, rng: random.Random, ids: list[int], mix: Mix) -> list[int]:
        room = mix.max_positions - len(ids)
        if room <= 0 or rng.random() >= mix.skips:
            return list(range(len(ids)))
        roles = set(self._role_ids.values())
        starts = [place for place, token in enumerate(ids) if token in roles and place > 0]
        jumps = dict.fromkeys(rng.sample(starts, min(2, len(starts))), 0)
        for place in jumps:
            jumps[place] = rng.randrange(room // 2 + 1)
        positions, position = [], 0
        for place in range(len(ids)):
            position += jumps.get(place, 0)
            positions.append(position + place)
        return positions


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the tokenizer's files; AutoTokenizer.from_pretrained(folder) reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Read what save_tokenizer or a published folder holds."""
    return cast(
        PreTrainedTokenizerFast, AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    )
