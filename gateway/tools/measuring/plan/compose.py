"""Composition of a plan: the device, the variants of serving, and their evidence."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from outrider.engine.errors import UnsupportedModelError
from outrider.engine.model.checkpoint_check import check_checkpoint
from outrider.engine.model.config import ModelConfig
from outrider.engine.model.read_config import read_model_config
from outrider.gateway.engines.backends.step_loop import LoadingCallback
from outrider.gateway.settings.tree import Settings
from outrider.gateway.tools.measuring.bench.results import BenchResult
from outrider.gateway.tools.measuring.plan.capacity import Goal, MemoryUse, Variant, kv_tokens, plan
from outrider.gateway.tools.measuring.plan.check import compare
from outrider.gateway.tools.measuring.plan.devices import DEVICES, SUM_S, UNRECORDED_S, DeviceSpec
from outrider.gateway.tools.measuring.plan.measure import measure
from outrider.gateway.tools.measuring.plan.popular import popular_model
from outrider.gateway.tools.measuring.plan.report import CapacityPlan
from outrider.gateway.tools.measuring.plan.shapes import ModelSizes, largest_pass_bytes, part_of
from outrider.gateway.tools.measuring.plan.simulate import Speculation, System, TierModel
from outrider.gateway.tools.measuring.plan.workload import LengthPairs
from outrider.gateway.wiring.checkpoints import named_models
from outrider.gateway.wiring.tensor_parallel import has_ranks
from outrider.verifier.params import TIERS, Tier

HERE: Final = "here"
_RESERVE_SHARE: Final = 0.1
_ASSUMED_ACCEPTANCE: Final = 0.7
_ASSUMED_HOST_S: Final = 0.0005


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """The serving system and where its figures come from."""

    device: str
    is_measured: bool
    shapes: Sequence[ModelSizes]
    """In the order of the tiers."""
    tiers: Mapping[Tier, TierModel]
    speculation: Speculation | None
    max_context: int
    memory: Sequence[MemoryUse] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanWishes:
    """Questions that the plan answers. `measured`: a run to compare the plan with."""

    lengths: LengthPairs
    goal: Goal
    small_share: float = 0.5
    usd_per_hour: float | None = None
    window: int | None = None
    measured: BenchResult | None = None
    overhead_s: float = 0.0


def ground(
    device: str, settings: Settings, *, acceptance: float | None, on_progress: LoadingCallback
) -> Ground:
    """Return the serving system to plan for. Raises ValueError or EngineError."""
    if device == HERE:
        return _here(settings, acceptance, on_progress)
    if device not in DEVICES:
        known = ", ".join((HERE, *DEVICES))
        raise ValueError(f"--device {device}: unknown; available: {known}")
    return _by_data_sheet(device, settings, acceptance)


def _here(settings: Settings, acceptance: float | None, on_progress: LoadingCallback) -> Ground:
    found = measure(settings, on_progress)
    speculation = found.speculation
    if speculation is not None and acceptance is not None:
        speculation = Speculation(acceptance=acceptance)
    notes = ["Step times and the host's part were measured just now, with the machine as it is."]
    if speculation is not None and acceptance is None:
        notes.append(
            f"{speculation.acceptance:.0%} of the small model's first drafted tokens were "
            "accepted on the prompts that come with Outrider; set --acceptance for your own."
        )
    return Ground(
        device=f"this machine ({found.device})",
        is_measured=True,
        shapes=[found.shapes[tier] for tier in TIERS if tier in found.shapes],
        tiers=found.tiers,
        speculation=speculation,
        max_context=min(shape.max_context for shape in found.shapes.values()),
        notes=tuple(notes),
    )


def _by_data_sheet(name: str, settings: Settings, acceptance: float | None) -> Ground:
    device, options = DEVICES[name], settings.engine
    count = options.tensor_parallel if has_ranks(settings) else 1
    notes: list[str] = []
    configs = {tier: _described(path, notes) for tier, path in named_models(settings).items()}
    parts = {
        tier: part_of(config, count if tier == "large" else 1) for tier, config in configs.items()
    }
    shapes, on_device = _sizes(configs, settings), _sizes(parts, settings)
    tiers = [tier for tier in TIERS if tier in shapes]
    shares = kv_tokens(
        device.memory_bytes,
        [on_device[tier] for tier in tiers],
        reserve_bytes=_RESERVE_SHARE * device.memory_bytes,
        max_sequences=options.max_sequences,
        small_kv_ratio=options.small_kv_ratio,
    )
    num_kv = dict(zip(tiers, shares, strict=True))
    speculation = None
    if len(shapes) > 1:
        speculation = Speculation(
            acceptance=_ASSUMED_ACCEPTANCE if acceptance is None else acceptance
        )
    shared_layers = {"large": configs["large"].num_layers} if count > 1 else {}
    assumes_acceptance = speculation is not None and acceptance is None
    notes += _assumptions(device, count, assumes_acceptance=assumes_acceptance)
    return Ground(
        device=name if count == 1 else f"{count} x {name}",
        is_measured=False,
        shapes=[shapes[tier] for tier in tiers],
        tiers={
            tier: TierModel(
                curve=device.curve(shape, shared_layers=shared_layers.get(tier, 0)),
                num_kv_tokens=num_kv[tier],
                host_s=_ASSUMED_HOST_S,
            )
            for tier, shape in on_device.items()
        },
        speculation=speculation,
        max_context=min(shape.max_context for shape in shapes.values()),
        memory=_memory(device, parts, on_device, num_kv, settings),
        notes=tuple(notes),
    )


def _assumptions(device: DeviceSpec, count: int, *, assumes_acceptance: bool) -> Iterator[str]:
    """Say what a plan for so many devices takes from no measurement."""
    yield (
        f"A roofline with {device.bandwidth_share:.0%} of the bandwidth, {device.flops_share:.0%} "
        f"of the operations, {1e3 * device.launch_s:g} ms of launches a pass and "
        f"{1e3 * _ASSUMED_HOST_S:g} ms of host work a step: assumed, not measured."
    )
    yield f"{_RESERVE_SHARE:.0%} of the memory is left free."
    if assumes_acceptance:
        yield (
            f"The acceptance rate is assumed to be {_ASSUMED_ACCEPTANCE:g}; measure it "
            "(`outrider bench` shows it) and set --acceptance."
        )
    if count > 1:
        yield (
            f"The large model on {count} devices: {1e6 * SUM_S:g} µs for each of two sums over "
            f"them a layer, and {1e6 * UNRECORDED_S:g} µs for its launches: assumed, never "
            "measured. The price is that of all devices."
        )


def _sizes(configs: Mapping[Tier, ModelConfig], settings: Settings) -> dict[Tier, ModelSizes]:
    return {
        tier: ModelSizes.of(
            config,
            dtype=settings.engine.dtype,
            kv_dtype=settings.engine.kv_cache_dtype,
            scheme=settings.models.scheme(tier),
            decodes=settings.models.decodes(tier),
        )
        for tier, config in configs.items()
    }


def _memory(
    device: DeviceSpec,
    parts: Mapping[Tier, ModelConfig],
    sizes: Mapping[Tier, ModelSizes],
    num_kv: Mapping[Tier, int],
    settings: Settings,
) -> list[MemoryUse]:
    """Return what each device holds: the first has all models, the others a part of the large."""
    options = settings.engine
    count = max(config.num_ranks for config in parts.values())
    found = []
    for rank in range(count):
        held: list[Tier] = list(sizes) if rank == 0 else ["large"]
        found.append(
            MemoryUse(
                device=device.name if count == 1 else f"{device.name} {rank}",
                total_bytes=device.memory_bytes,
                weight_bytes=sum(sizes[tier].weight_bytes for tier in held),
                kv_bytes=sum(num_kv[tier] * sizes[tier].kv_bytes_per_token for tier in held),
                pass_bytes=max(
                    largest_pass_bytes(
                        parts[tier],
                        dtype=options.dtype,
                        max_rows=options.max_tokens_per_step,
                        max_sequences=options.max_sequences,
                        has_logits=rank == 0,
                    )
                    for tier in held
                ),
            )
        )
    return found


def _described(path_or_id: str, notes: list[str]) -> ModelConfig:
    """Read a model's config.json; without it a popular model is taken from a table, with a note.

    Raises UnsupportedModelError.
    """
    if Path(path_or_id).expanduser().exists():
        return read_model_config(path_or_id)
    try:
        check_checkpoint(path_or_id)  # asks the hub once, where its client would try for a minute
    except UnsupportedModelError:
        known = popular_model(path_or_id)
        if known is None:
            raise
        notes.append(
            f"{path_or_id}: sizes from Outrider's own table, since the Hugging Face hub did not "
            "give its config.json."
        )
        return known
    return read_model_config(path_or_id)


def compose(found: Ground, wanted: PlanWishes, settings: Settings) -> CapacityPlan:
    """Every way to serve, simulated. Raises ValueError for requests that cannot be served."""
    lengths = wanted.lengths.within(found.max_context)
    usd_per_hour = wanted.usd_per_hour
    if usd_per_hour is not None:
        usd_per_hour *= max(len(found.memory), 1)
    variants = _variants(found, wanted, settings)
    notes = list(found.notes)
    is_measured = found.speculation is not None and bool(found.speculation.measured)
    notes.append(
        "Simulated: chunked prefill, continuous batching, KV reserved for whole answers; no prefix "
        "cache, no pre-emption" + ("." if is_measured else ", and guesses as chains.")
    )
    if lengths.mean_prompt < wanted.lengths.mean_prompt:
        notes.append(f"Lengths were cut to the models' context of {found.max_context} tokens.")
    if wanted.window is not None:
        notes.append(
            f"Window of {wanted.window} tokens: assumes that an answer keeps no more KV. The "
            "models would not see earlier tokens, so answers would change; the engine does this "
            "only for models that were trained with a window."
        )
    compared = (
        compare(variants[-1].system, wanted.measured, overhead_s=wanted.overhead_s)
        if wanted.measured is not None
        else ()
    )
    return CapacityPlan(
        device=found.device,
        is_measured=found.is_measured,
        shapes=found.shapes,
        num_kv_tokens={
            tier: found.tiers[tier].num_kv_tokens for tier in TIERS if tier in found.tiers
        },
        lengths=lengths,
        window=wanted.window,
        goal=wanted.goal,
        memory=found.memory,
        usd_per_hour=usd_per_hour,
        capacities=[
            plan(variant, lengths, wanted.goal, usd_per_hour=usd_per_hour) for variant in variants
        ],
        compared=compared,
        notes=notes,
    )


def _variants(found: Ground, wanted: PlanWishes, settings: Settings) -> list[Variant]:
    """From plain decoding to everything that this pair can do."""
    large, small = found.tiers.get("large"), found.tiers.get("small")
    options = settings.engine
    bare = System(
        large=large,
        small=small if large is None else None,
        max_sequences=options.max_sequences,
        max_rows=options.max_tokens_per_step,
        window=wanted.window,
    )
    name = "small model alone" if large is None else "large model alone"
    variants = [Variant(name=name, system=bare)]
    if large is None or small is None:
        return variants
    both = replace(bare, small=small)
    if found.speculation is not None:
        guessing = replace(both, speculation=found.speculation)
        variants.append(Variant(name="with speculation", system=guessing))
        both = guessing
    if wanted.small_share > 0:
        share = wanted.small_share
        label = f"and the small model answers {share:.0%}"
        variants.append(Variant(name=label, system=both, small_share=share))
    return variants
