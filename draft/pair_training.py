"""Trains one model of the pair: Llama architecture, Muon + AdamW, warm-up-stable-decay schedule."""

import json
import logging
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from draft.corpus import Packer

logger = logging.getLogger(__name__)

LossFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a Llama model; hidden_size = num_heads * head_dim."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_size: int


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """How long and how to train.

    The budget is `minutes` of training time (resumed time counts) or `tokens`, whichever ends
    first; the schedule follows the fraction of the budget used. The second half stresses what is
    learnt late. The last long_fraction has long rows: the cheap short ones teach the tasks, the
    long ones late positions and chats of many turns.
    """

    minutes: float | None = None
    tokens: int | None = None
    peak_lr: float
    batch_tokens: int = 6144
    short_length: int = 256
    long_length: int = 1024
    warmup_steps: int = 50
    decay_fraction: float = 0.5
    late_fraction: float = 0.5
    long_fraction: float = 0.15
    weight_decay: float = 0.05
    publish_minutes: float = 12.0

    def __post_init__(self) -> None:
        """Raise ValueError for a plan without an end."""
        if self.minutes is None and self.tokens is None:
            raise ValueError("a plan needs a budget: minutes, tokens or both")


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What a run has used so far, also across resumptions."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def fraction(self, plan: TrainingPlan) -> float:
        """Share of the budget used, 0 to 1."""
        used = [0.0]
        if plan.minutes is not None:
            used.append(self.seconds / 60 / plan.minutes)
        if plan.tokens is not None:
            used.append(self.tokens / plan.tokens)
        return min(1.0, max(used))


def build_model(
    shape: ModelShape, tokenizer: PreTrainedTokenizerFast, seed: int
) -> LlamaForCausalLM:
    """A randomly initialised fp32 model with tied embeddings."""
    torch.manual_seed(seed)
    make_config: Any = LlamaConfig
    config = make_config(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden_size,
        intermediate_size=shape.mlp_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=tokenizer.model_max_length,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        # On CPU the fused attention's backward pass costs more than the whole MLP; plain products
        # compiled by inductor do not.
        attn_implementation="eager",
    )
    return LlamaForCausalLM(config)


def learning_rate(plan: TrainingPlan, progress: Progress) -> float:
    """Warm-up, then constant, then linear to zero over the last decay_fraction of the budget."""
    warm = min(1.0, (progress.step + 1) / plan.warmup_steps)
    left = (1.0 - progress.fraction(plan)) / plan.decay_fraction
    return plan.peak_lr * warm * min(1.0, left)


def label_loss(model: LlamaForCausalLM, device: torch.device) -> LossFunction:
    """Weighted cross-entropy of the next token."""

    def loss(input_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(input_ids=input_ids, use_cache=False).logits  # [rows, length, vocab]
        losses = functional.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), input_ids[:, 1:].flatten(), reduction="none"
        )
        flat_weights = weights[:, 1:].flatten()
        return (losses * flat_weights).sum() / flat_weights.sum()

    return loss


def distillation_loss(
    model: LlamaForCausalLM, teacher: LlamaForCausalLM, device: torch.device
) -> LossFunction:
    """KL from the teacher's next-token distribution, which is what draft acceptance depends on."""

    def loss(input_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            with torch.no_grad():
                goal = teacher(input_ids=input_ids, use_cache=False).logits
            logits = model(input_ids=input_ids, use_cache=False).logits
        log_goal = functional.log_softmax(goal[:, :-1].float(), dim=-1)
        log_draft = functional.log_softmax(logits[:, :-1].float(), dim=-1)
        divergence = (log_goal.exp() * (log_goal - log_draft)).sum(-1)  # [rows, length - 1]
        return (divergence * weights[:, 1:]).sum() / weights[:, 1:].sum()

    return loss


class Trainer:
    """Training state of one model, with checkpoints it can resume from."""

    def __init__(
        self, model: LlamaForCausalLM, plan: TrainingPlan, run_dir: Path, device: torch.device
    ) -> None:
        self.model = model
        _place(self.model, device=device)
        self.plan = plan
        self.progress = Progress()
        self._run_dir = run_dir
        self._device = device
        matrices = [
            p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name
        ]
        rest = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
        self._optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(
                matrices,
                lr=plan.peak_lr,
                weight_decay=plan.weight_decay,
                adjust_lr_fn="match_rms_adamw",
            ),
            torch.optim.AdamW(rest, lr=plan.peak_lr, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        run_dir.mkdir(parents=True, exist_ok=True)

    @property
    def _checkpoint(self) -> Path:
        return self._run_dir / "checkpoint.pt"

    def save(self) -> None:
        """Write weights, optimizer state and progress; the file is replaced in one step."""
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "progress": asdict(self.progress),
        }
        partial = self._checkpoint.with_suffix(".partial")
        torch.save(state, partial)
        os.replace(partial, self._checkpoint)
        summary = {**asdict(self.progress), "plan": asdict(self.plan)}
        (self._run_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")

    def resume(self) -> bool:
        """Load the last checkpoint of this run folder; False if there is none."""
        if not self._checkpoint.exists():
            return False
        state: dict[str, Any] = torch.load(
            self._checkpoint, map_location=self._device, weights_only=True
        )
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.progress = Progress(**state["progress"])
        logger.info("resumed step=%d tokens=%d", self.progress.step, self.progress.tokens)
        return True

    def run(self, loss_function: LossFunction, packer: Packer, publish: Callable[[], None]) -> None:
        """Train until the budget is used, publishing now and then and at the end."""
        plan, log_path = self.plan, self._run_dir / "loss.jsonl"
        last_publish = started = time.monotonic()
        seconds_before = self.progress.seconds
        with (
            tqdm(total=100.0, unit="%", bar_format="{l_bar}{bar}| {postfix}") as bar,
            log_path.open("a") as log,
        ):
            while (fraction := self.progress.fraction(plan)) < 1.0:
                lr = learning_rate(plan, self.progress)
                loss = self._step(loss_function, packer, lr)
                now = time.monotonic()
                self.progress = replace(self.progress, seconds=seconds_before + now - started)
                bar.n = round(100 * fraction, 1)
                if self.progress.step % 20 == 0:
                    rate = self.progress.tokens / max(self.progress.seconds, 1e-9)
                    row = {**asdict(self.progress), "loss": round(loss, 4), "lr": lr}
                    log.write(json.dumps(row) + "\n")
                    log.flush()
                    bar.set_postfix_str(
                        f"step {self.progress.step} loss {loss:.3f} {rate:.0f} tok/s"
                    )
                if now - last_publish > 60 * plan.publish_minutes:
                    last_publish = now
                    self.save()
                    publish()
        self.save()
        publish()

    def _step(self, loss_function: LossFunction, packer: Packer, lr: float) -> float:
        plan = self.plan
        left = 1.0 - self.progress.fraction(plan)
        length = plan.long_length if left <= plan.long_fraction else plan.short_length
        rows = max(1, plan.batch_tokens // length)
        batch = packer.batch(self.progress.step, rows, length, late=left <= plan.late_fraction)
        self.model.train()
        loss = loss_function(batch.input_ids.to(self._device), batch.weights.to(self._device))
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            optimizer.zero_grad()
        self.progress = replace(
            self.progress,
            step=self.progress.step + 1,
            tokens=self.progress.tokens + rows * length,
        )
        return loss.item()


def publish_folder(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path
) -> None:
    """Write a loadable bf16 checkpoint; each file is replaced in one step, so none is half."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as partial:
        shape = LlamaForCausalLM(model.config)
        _place(shape, dtype=torch.bfloat16)
        shape.load_state_dict(model.state_dict())
        shape.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        for file in sorted(Path(partial).iterdir()):
            os.replace(file, folder / file.name)
    # os.replace keeps the private mode of the temporary file.
    for file in folder.iterdir():
        file.chmod(0o644)


def load_model(folder: Path, dtype: torch.dtype, device: torch.device) -> LlamaForCausalLM:
    """A published model in evaluation mode, with the attention that build_model chose."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    _place(model, device=device)
    torch.nn.Module.eval(model)
    return model


def _place(
    model: LlamaForCausalLM,
    *,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    # transformers' own `to` is decorated in a way that type checkers cannot follow.
    torch.nn.Module.to(model, device=device, dtype=dtype)


def folder_size_bytes(folder: Path) -> int:
    """Total size of the files directly in a folder."""
    return sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
