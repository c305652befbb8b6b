"""From tasks to training rows: the tokenizer, the chat format, conversations, packing."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, cast

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from draft.tasks import DIFFICULTIES, FAMILIES, Task, generate, split_of, stream

BOS, END, PAD = "<|bos|>", "<|end|>", "<|pad|>"
ROLES = ("system", "user", "assistant")
SPECIAL_TOKENS = (PAD, BOS, END, *(f"<|{role}|>" for role in ROLES))

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('roles are system, user and assistant, not ' + message['role']) }}"
    "{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
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


class Message(TypedDict):
    """One chat message: role (system, user or assistant) and content."""

    role: str
    content: str


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Packed rows. input_ids: [rows, length] int64; weights: [rows, length] float32, the loss
    weight of *predicting* input_ids at that place (0 at the first)."""

    input_ids: torch.Tensor
    weights: torch.Tensor


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
    tasks = stream(seed, "train")
    for _ in range(num_tasks):
        task = next(tasks)
        yield task.prompt
        yield task.answer


# Looking up, ordering and spelling are learnt late and have few telling tokens each: in the second
# half of a run they are drawn this many times as often as the others.
_LATE_WEIGHTS = {
    "lookup": 3.0,
    "sort_words": 2.5,
    "count_letters": 2.5,
    "reverse_word": 2.5,
    "sort_numbers": 2.0,
    "days_between": 1.5,
    "sequence": 1.5,
    "word_problem": 1.5,
}
_LATE_DRAW = tuple(_LATE_WEIGHTS.get(family, 1.0) for family in FAMILIES)
_EVEN_DRAW = (1.0,) * len(FAMILIES)


def _train_task(rng: random.Random, late: bool) -> Task:
    while True:
        # Difficulty 1 is mostly contained in the others: half as many.
        difficulty = rng.choices(DIFFICULTIES, weights=(2, 4, 4, 4))[0]
        family = rng.choices(FAMILIES, weights=_LATE_DRAW if late else _EVEN_DRAW)[0]
        task = generate(family, difficulty, rng)
        if split_of(task.prompt) == "train":
            return task


def conversation(rng: random.Random, max_turns: int, *, late: bool = False) -> list[Message]:
    """A chat of one to max_turns unrelated tasks, sometimes under a system prompt."""
    messages: list[Message] = []
    if rng.random() < 0.25:
        messages.append({"role": "system", "content": rng.choice(_SYSTEM_PROMPTS)})
    num_turns = 1 if rng.random() < 0.6 else rng.randint(1, max_turns)
    for _ in range(num_turns):
        task = _train_task(rng, late)
        messages.append({"role": "user", "content": task.prompt})
        messages.append({"role": "assistant", "content": task.answer})
    return messages


class Packer:
    """Turns conversations into full rows: whole chats one after the other, the last one cut.

    Batches are a pure function of seed, index and shape, so a resumed run sees the same ones.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
        self._tokenizer: Tokenizer = tokenizer.backend_tokenizer
        # Whoever used it before may have left padding on.
        self._tokenizer.no_padding()
        self._seed = seed
        ids = {token: tokenizer.get_vocab()[token] for token in SPECIAL_TOKENS}
        self._bos_id, self._end_id = ids[BOS], ids[END]
        self._role_ids = {role: ids[f"<|{role}|>"] for role in ROLES}

    def batch(self, index: int, rows: int, length: int, *, late: bool = False) -> Batch:
        """The batch of training step `index`; `late` batches stress what is learnt late."""
        rng = random.Random(f"{self._seed}/{index}")
        packed = [self._row(rng, length, late) for _ in range(rows)]
        return Batch(
            input_ids=torch.tensor([ids for ids, _ in packed]),
            weights=torch.tensor([weights for _, weights in packed]),
        )

    def encode(self, messages: list[Message]) -> tuple[list[int], list[float]]:
        """Token ids as the chat template renders them, and each token's loss weight."""
        encoded = self._tokenizer.encode_batch([message["content"] for message in messages])
        ids, weights = [self._bos_id], [0.0]
        for message, content in zip(messages, encoded, strict=True):
            ids += [self._role_ids[message["role"]], *content.ids, self._end_id]
            weight = 1.0 if message["role"] == "assistant" else _PROMPT_WEIGHT
            weights += [_PROMPT_WEIGHT] + [weight] * (len(content.ids) + 1)
        return ids, weights

    def _row(self, rng: random.Random, length: int, late: bool) -> tuple[list[int], list[float]]:
        ids: list[int] = []
        weights: list[float] = []
        # About 130 tokens a turn: long rows hold long chats.
        max_turns = max(2, length // 130)
        while len(ids) < length:
            more_ids, more_weights = self.encode(conversation(rng, max_turns, late=late))
            ids += more_ids
            weights += more_weights
        return ids[:length], [0.0, *weights[1:length]]


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the tokenizer's files; AutoTokenizer.from_pretrained(folder) reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Read what save_tokenizer or a published folder holds."""
    return cast(PreTrainedTokenizerFast, AutoTokenizer.from_pretrained(folder))
