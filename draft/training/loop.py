"""Training of a model, the pair's and drafters' alike: Muon + AdamW, warm-up-stable-decay schedule,
checkpoints to resume from, folders to load.
"""

import copy
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

logger = logging.getLogger(__name__)


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
    """Length and settings of a training run. The schedule follows the fraction of the budget that
    is used.
    """

    minutes: float | None = None
    """Training time; time before it was resumed counts."""
    tokens: int | None = None
    """With `minutes` and `steps` the budget: whichever ends first."""
    steps: int | None = None
    peak_lr: float
    batch_tokens: int = 6144
    short_length: int = 256
    """Tokens of the pair's packed rows."""
    long_length: int = 1024
    """Tokens of the pair's long rows."""
    warmup_steps: int = 50
    decay_fraction: float = 0.5
    late_fraction: float = 0.5
    """The end of the budget that stresses what is learnt late, for the pair's rows."""
    long_fraction: float = 0.15
    """The end of the budget that has long rows, for late positions and chats of many turns."""
    weight_decay: float = 0.05
    publish_minutes: float = 12.0

    def __post_init__(self) -> None:
        """Raise ValueError for a plan without an end."""
        if self.minutes is None and self.tokens is None and self.steps is None:
            raise ValueError("a plan needs a budget: minutes, tokens or steps")


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Budget that a run has used so far, also across resumptions."""

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
        if plan.steps is not None:
            used.append(self.step / plan.steps)
        return min(1.0, max(used))


# The tensors of the next batch, token ids first: what a loss function is called with.
Draw = Callable[[TrainingPlan, Progress], tuple[Tensor, ...]]
LossFunction = Callable[..., Tensor]
ModelT = TypeVar("ModelT", bound=torch.nn.Module)


def build_llama(
    shape: ModelShape, *, vocab_size: int, max_positions: int, seed: int, **special: int | None
) -> LlamaForCausalLM:
    """A randomly initialised fp32 model with tied embeddings; `special`: token ids of roles."""
    torch.manual_seed(seed)
    make_config: Any = LlamaConfig
    config = make_config(
        vocab_size=vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.mlp_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=max_positions,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        **special,
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


class Trainer(Generic[ModelT]):
    """Training state of one model, with checkpoints it can resume from."""

    def __init__(
        self, model: ModelT, plan: TrainingPlan, run_dir: Path, device: torch.device
    ) -> None:
        self.model = model
        place(self.model, device=device)
        self.plan = plan
        self.progress = Progress()
        self._run_dir = run_dir
        self._device = device
        matrices: list[torch.nn.Parameter] = []
        rest: list[torch.nn.Parameter] = []
        for name, parameter in model.named_parameters():
            # Tables of token vectors are no maps from one space to another.
            is_map = parameter.ndim == 2 and "embed" not in name and "lm_head" not in name
            (matrices if is_map else rest).append(parameter)
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

    def run(self, loss_function: LossFunction, draw: Draw, publish: Callable[[], None]) -> None:
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
                loss = self._step(loss_function, draw, lr)
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
            bar.n = 100.0
            bar.refresh()
        self.save()
        publish()

    def _step(self, loss_function: LossFunction, draw: Draw, lr: float) -> float:
        batch = [tensor.to(self._device) for tensor in draw(self.plan, self.progress)]
        self.model.train()
        loss = loss_function(*batch)
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
            tokens=self.progress.tokens + batch[0].numel(),
        )
        return loss.item()


def publish_folder(
    model: PreTrainedModel,
    save_tokenizer: Callable[[Path], object],
    folder: Path,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write a loadable checkpoint; each file is replaced in one step, so none is half."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as partial:
        published = copy.deepcopy(model)
        place(published, dtype=dtype)
        published.save_pretrained(partial)
        save_tokenizer(Path(partial))
        for file in sorted(Path(partial).iterdir()):
            # The temporary folder's files are private.
            file.chmod(0o644)
            os.replace(file, folder / file.name)


def load_model(folder: Path, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """A published model in evaluation mode, with the attention that build_llama chose."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", trust_remote_code=False
    )
    place(model, device=device)
    torch.nn.Module.eval(model)
    return model


def place(
    model: torch.nn.Module,
    *,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Move and convert a model in place."""
    # transformers' own `to` is decorated in a way that type checkers cannot follow.
    torch.nn.Module.to(model, device=device, dtype=dtype)
