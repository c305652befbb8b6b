"""Sections of the settings: fields, defaults and bounds."""

import re
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_settings import NoDecode

from outrider.engine.config import EngineRole
from outrider.engine.model.quantised.formats import (
    DECODE,
    SCHEMES,
    STORED_WAYS,
    SchemeName,
    StoredWay,
)
from outrider.gateway.contract.schema.kinds import ToolFormatName
from outrider.gateway.settings.public_models import public_path
from outrider.verifier.params import SOURCES, TIERS, Source, Tier

NONE = "none"
"""Model name that switches a tier off."""
DEMO = "demo"
"""Model name of the tier's model in the pair that comes with Outrider."""

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "bfloat16", "float16", "float32"]
KVCacheDtype = Literal["auto", "fp8"]
OnDevice = Literal["auto", "on", "off"]

Count = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Price = Annotated[float, Field(ge=0)]


def split_list(value: object) -> object:
    """Split a comma-separated list from a flag or a variable; return other values unchanged."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


_SCHEMES: Final[tuple[SchemeName | StoredWay, ...]] = (*SCHEMES, *STORED_WAYS)


def schemes(text: str) -> dict[Tier, SchemeName | StoredWay]:
    """Read "int8" or "large=int8,small=decode" as each tier's weights. Raises ValueError."""
    found: dict[Tier, SchemeName | StoredWay] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        tier, has_tier, scheme = (each.strip() for each in part.rpartition("="))
        tiers = [each for each in TIERS if not has_tier or each == tier]
        named = [each for each in _SCHEMES if each == scheme]
        if not tiers or not named:
            raise ValueError(
                f"{part}: write a scheme ({', '.join(_SCHEMES)}) for both tiers, or one for a tier "
                f"({' or '.join(TIERS)}) as in large=int8"
            )
        found |= dict.fromkeys(tiers, named[0])
    return found


def _known_schemes(text: str) -> str:
    schemes(text)
    return text


Sources = Annotated[tuple[Source, ...], NoDecode, BeforeValidator(split_list)]


Revision = Annotated[str, Field(pattern=r"^\S+$")]


def is_local(name: str) -> bool:
    """Return whether a model's name means a folder or file of this machine that is there."""
    path = Path(name).expanduser()
    return path.is_dir() or path.is_file()


def is_missing_folder(name: str) -> bool:
    """Return whether a model's name looks like a missing folder or GGUF file.

    Hub ids are `owner/name`.
    """
    if is_local(name):
        return False
    is_gguf = Path(name).suffix == ".gguf"
    return is_gguf or name.startswith(("/", ".", "~")) or name.count("/") != 1


def _place(name: str | None) -> str | None:
    return name if name is None or is_local(name) else public_path(name)


def bundled_pair() -> Path:
    """Return the folder of the pair of models that comes with Outrider."""
    return Path(str(files("outrider.draft"))) / "pair"


def template_files(text: str) -> dict[Tier, Path]:
    """Read "FILE" for both tiers, or "large=FILE,small=FILE", as each tier's chat template."""
    named = re.split(r"(?:^|,)\s*(large|small)=", text)
    if named[0]:
        return dict.fromkeys(TIERS, Path(text).expanduser())
    files = dict(zip(named[1::2], named[2::2], strict=True))
    return {tier: Path(files[tier].strip()).expanduser() for tier in TIERS if tier in files}


class Section(BaseModel):
    """Base of all sections; refuses unknown settings."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ServerSettings(Section):
    """Address, port and shutdown of the gateway."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen on; 0 for any free one."""
    drain_timeout_s: float = Field(default=30.0, ge=0)
    """Time for running answers to finish after SIGTERM or Ctrl-C."""
    access_log: bool = False
    """Log a line for every HTTP request."""
    drain_grace_s: float = Field(default=0.0, ge=0)
    """Time between SIGTERM and closing the port, during which /ready answers 503 so that a load
    balancer notices. Requests are still answered."""
    workers: int = Field(default=1, ge=1, le=64)
    """Processes that answer requests. More than one share the port and one engine; limits of keys
    and teams need redis_url then."""
    stall_timeout_s: Seconds = 60.0
    """Time for which the event loop stands still after which a process ends: one of several is
    killed and replaced; a lone one ends with status 1 and its stacks in the log."""


class ModelSettings(Section):
    """Models that answer. None set, and no upstream tier: the pair that comes with Outrider, which
    `outrider serve` grows to 150 and 15 million parameters where memory allows."""

    large: str | None = None
    """Folder, GGUF file or Hugging Face id of the large model, or a name of `outrider models list`;
    "none" for no such tier, "demo" for the one that comes with Outrider, as it is."""
    small: str | None = None
    """The same for the small model, which answers easy prompts and drafts for the large one."""
    large_revision: Revision | None = None
    """Branch, tag or full commit hash of the large model on the Hugging Face hub, of which weights,
    tokenizer and template are taken; unset: main."""
    small_revision: Revision | None = None
    """The same for the small model."""
    drafter: str | None = None
    """Folder or Hugging Face id of an EAGLE-3, MTP, P-EAGLE or DFlash drafter that was trained for
    the large model and reads its hidden states; "mtp" for the one in the large model's own
    checkpoint. Beside a small model, whichever of the two gains more drafts."""
    drafter_revision: Revision | None = None
    """Branch, tag or full commit hash of a drafter on the hub; unset: main."""
    router: Path | None = None
    """Folder of a trained router. A router fits one pair of models."""
    encoder: str | None = None
    """Folder or package of the router's sentence encoder, if it is not where the router was
    trained."""
    quantize: Annotated[str, AfterValidator(_known_schemes)] = ""
    """Round weights when they are loaded: int8 or int4 for both tiers, large=int8 for one. Takes
    half or nearly a quarter of bfloat16's memory, and less time on CPUs. Weights that a checkpoint
    stores quantised stay as they are otherwise, and CPUs round what they multiply with them to 8
    bits; exact: they do not, decode: make plain numbers of such weights."""
    chat_template: str = ""
    """File with a chat template (Jinja) to use in place of the checkpoints' own: for both tiers, or
    large=FILE, small=FILE for each."""
    generation_config: Literal["checkpoint", "none"] = "checkpoint"
    """Sampling parameters of requests that set none: those of the checkpoint's
    generation_config.json, or of a GGUF file (temperature, top_p, top_k, min_p,
    repetition_penalty); of two models the large one's, for both tiers. none: the API's own."""
    tool_format: Literal["auto", ToolFormatName] = "auto"
    """Format of the models' tool calls; auto: taken from their chat templates."""

    @property
    def has_revision(self) -> bool:
        """True if a model's revision is set."""
        return any((self.large_revision, self.small_revision, self.drafter_revision))

    def revision(self, tier: Literal["large", "small"]) -> str | None:
        """Return the revision of a tier's model on the hub; None for main, and for a folder."""
        return self.large_revision if tier == "large" else self.small_revision

    def scheme(self, tier: Literal["large", "small"]) -> SchemeName | None:
        """Return how a tier's weights are rounded."""
        found = schemes(self.quantize).get(tier)
        return found if found in SCHEMES else None

    def stored_way(self, tier: Literal["large", "small"]) -> StoredWay | None:
        """Return what becomes of a tier's weights that come quantised; None: they stay."""
        found = schemes(self.quantize).get(tier)
        return found if found in STORED_WAYS else None

    def decodes(self, tier: Literal["large", "small"]) -> bool:
        """Return whether a tier's weights become plain numbers, though products could hold them."""
        return self.stored_way(tier) == DECODE

    def template_file(self, tier: Literal["large", "small"]) -> Path | None:
        """Return the file of a tier's chat template; None for the checkpoint's own."""
        return template_files(self.chat_template).get(tier)

    @property
    def is_any(self) -> bool:
        """True if at least one tier has a model on this machine."""
        return any(path is not None for path in self.resolved().values())

    def resolved(self) -> dict[Literal["large", "small"], str | None]:
        """Return the path or hub id of each tier; None for a tier without a model.

        A public model's name is the path of its file, unless a folder here has that name.
        A custom model never shares an engine with half of the bundled pair: naming one tier loads
        only that tier.
        """
        named = {"large": self.large, "small": self.small}
        bundled = {tier: str(bundled_pair() / tier) for tier in named}
        if all(name in (None, NONE) for name in named.values()):
            named = {tier: name or bundled[tier] for tier, name in named.items()}
        named = {tier: bundled[tier] if name == DEMO else name for tier, name in named.items()}
        found = {tier: None if name == NONE else _place(name) for tier, name in named.items()}
        return {"large": found["large"], "small": found["small"]}

    def resolved_router(self) -> Path | None:
        """Return the router's folder: the configured one, or the bundled one with its own pair."""
        named = (self.large, self.small)
        is_bundled = self.is_any and all(name in (None, NONE, DEMO) for name in named)
        if self.router is None and is_bundled:
            router = bundled_pair() / "router"
            return router if router.is_dir() else None
        return self.router


class EngineSettings(Section):
    """Models' execution: device, precision, memory and bounds of the queue."""

    device: Device = "auto"
    """Device that runs the models; auto takes a GPU if there is one."""
    dtype: Dtype = "auto"
    """Precision of weights and KV cache; auto is the checkpoint's own."""
    num_threads: Count | None = None
    """CPU threads of the engine; unset: by the models' size, at most the physical cores."""
    tensor_parallel: Count = 1
    """Devices that share the large model, each with a process of its own."""
    block_size: int = Field(default=16, ge=1, le=256)
    """Tokens in a block of the KV cache."""
    kv_cache_gib: Annotated[float, Field(gt=0)] | None = None
    """Memory for both KV caches; unset: a share of the free memory. Excludes num_blocks."""
    num_blocks: Count | None = None
    """Blocks in each tier's KV cache. Excludes kv_cache_gib."""
    small_kv_ratio: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Tokens in the small tier's KV cache for each of the large tier's. Large answers' drafts take
    as many as their answers, but are let go before any answer waits."""
    max_context: Count | None = None
    """Tokens of prompt and answer together; unset: the model's own limit."""
    max_sequences: Count = 64
    """Answers generated concurrently."""
    max_tokens_per_step: Count = 2048
    """Rows in one forward pass; longer prompts are split."""
    max_waiting: int = Field(default=512, ge=0)
    """Requests that may wait; further ones are refused with status 429, or 503 while the engine
    restarts."""
    prefix_caching: bool = True
    """Keep the KV of prompts for later requests that begin the same."""
    kv_folder: Path | None = None
    """Private folder on a disk for keys and values that leave the memory; unset: they are computed
    again. On a CPU, and not with tensor_parallel. Requests with outrider.privacy = "private" never
    get there."""
    kv_folder_gib: Annotated[float, Field(gt=0)] = 8.0
    """Size of that folder; what is least likely to save time goes first."""
    kv_folder_key: Path | None = None
    """File outside of it with the key that seals it; made where it is not there; unset: kv.key in
    the user's cache folder for outrider."""
    kv_folder_ttl_s: Seconds = 7 * 86400.0
    """Time since their last use after which keys and values are removed from the folder."""
    role: EngineRole = "both"
    """Part of an engine among others (outrider engine): prefill computes prompts for those with
    decode, which have long ones computed there; both computes its own."""
    process: bool = True
    """Run the engine in its own process, which is restarted when it dies."""
    stall_timeout_s: Seconds = 120.0
    """Time without an answer after which the engine's process is killed and restarted."""
    unready_after_s: Seconds = 10.0
    """Time without an answer, or processor time of its process, after which /ready is 503 and new
    requests go to other tiers."""
    resume_within_s: float = Field(default=60.0, ge=0)
    """Time for which answers under way, to be continued, and new requests wait for a new engine
    process after a death; 0: they end with an error at once."""
    start_within_s: Seconds = 120.0
    """Time that requests wait for an engine to be started, where a fleet has none (min_replicas = 0
    in its fleet.toml)."""
    reserve_process: bool = False
    """Keep a second process that has imported torch, so that the engine restarts in less than half
    the time; takes some 300 MB."""
    kv_cache_dtype: KVCacheDtype = "auto"
    """Precision of the KV cache; auto is the weights' precision, fp8 holds almost twice as many
    tokens as 16 bits."""
    deterministic: bool | Literal["auto"] = "auto"
    """Make an answer's tokens independent of concurrent requests, also in 16 bits. auto does where
    it costs nothing: in bfloat16 on a CPU with the compiled products; elsewhere passes take
    longer."""
    numerics: Literal["auto", "portable"] = "auto"
    """portable computes with the same bits on every CPU with compiled products, so that a fleet may
    mix processors and an answer go on anywhere; auto takes what is fastest on this one."""
    cuda_graphs: bool = True
    """On a GPU, replay recorded passes; off, for debugging, launches their kernels one by one."""
    overlap: bool = True
    """On a GPU, send a step's tokens and update statistics while the next step runs; off, for
    debugging: before it."""
    grammar_compile_s: Seconds = 5.0
    """CPU time for compiling one grammar; above it the request is refused with status 400."""
    grammar_memory_mib: Count = 1024
    """Memory for compiling one grammar, which runs in its own process."""
    grammar_size_mib: Count = 64
    """Size of one compiled grammar in memory. All cached grammars together have 256 MiB."""

    replicas: Annotated[tuple[str, ...], NoDecode, BeforeValidator(split_list)] = ()
    """Engines that run elsewhere (`outrider engine`), instead of one here: tcp://HOST:PORT,
    dns://NAME:PORT for all addresses of a name, or http://HOST:PORT/ for those that a page lists
    (`outrider fleet`). models.large and models.small name their models, whose tokenizers this
    gateway needs."""
    replicas_key: Path | None = None
    """File with the keys of these engines and their gateways (`outrider engine keygen`)."""
    replicas_insecure: bool = False
    """Allow engines of other machines without keys: everybody in that network can read prompts and
    use them."""
    kv_events: str | None = None
    """Address, tcp://*:PORT, on which the engine publishes what its prefix cache keeps and drops,
    as vLLM does (ZeroMQ, msgpack), for routers that listen to that. The messages hold the text of
    prompts, but of private ones: an address that other machines reach needs replicas_key, with
    whose CURVE keys subscribers connect, or replicas_insecure."""
    kv_events_replay: str | None = None
    """Address on which subscribers ask for messages that they missed."""
    kv_events_topic: str = ""
    """Topic of these messages; llm-d reads kv@POD@MODEL."""
    cache_folder: Path | None = None
    """Private folder for measured pass times, which later starts use instead of measuring; unset:
    outrider in the user's cache folder."""

    @model_validator(mode="after")
    def _one_size(self) -> "EngineSettings":
        if self.kv_cache_gib is not None and self.num_blocks is not None:
            raise ValueError("kv_cache_gib and num_blocks exclude each other; set one of them")
        return self


class SpeculationSettings(Section):
    """Drafting for the large model, by the small one or by models.drafter. Requests can only lower
    these limits."""

    enabled: bool = True
    """Draft at all."""
    adaptive: bool = True
    """Size trees by the measured cost of passes; off: always up to the limits."""
    max_draft_nodes: int = Field(default=64, ge=0, le=255)
    """Drafted tokens in one answer's tree."""
    max_draft_depth: int = Field(default=16, ge=0, le=255)
    """Consecutive tokens drafted by a model: the small one, or models.drafter."""
    max_text_depth: int = Field(default=48, ge=0, le=255)
    """Consecutive tokens drafted from earlier text, predictions and grammars."""
    max_branching: int = Field(default=3, ge=1, le=64)
    """Alternatives for one token."""
    max_frontier: int = Field(default=4, ge=1, le=64)
    """Nodes of one answer's tree that one pass of the drafting model extends."""
    sources: Sources = SOURCES
    """Sources of drafts: the small model, repeated text, predictions, a grammar, and models.drafter
    (head)."""
    on_device: OnDevice = "auto"
    """Grow trees on the device, without the host between passes; auto: on a GPU."""
    allow_vocab_mismatch: bool = False
    """Draft across different tokenizers, through the tokens that both have. Off: refused."""


class LimitSettings(Section):
    """Largest size of one request."""

    default_max_tokens: Count | None = None
    """Tokens of an answer when the request sets no limit; unset: the rest of the context."""
    max_body_bytes: Count = 8 * 1024 * 1024
    """Size of a request's body."""
    max_prompt_chars: Count = 1_000_000
    """Characters in the messages and tools of one prompt, or of a text to tokenise. A context of
    more than 200,000 tokens may need more."""
    max_json_values: Count = 200_000
    """Values in a request's body, such as the token ids of a prompt."""
    max_json_objects: Count = 10_000
    """Objects and lists in a request's body: messages, parts, tools, tool calls and their parts."""
    max_json_fields: Count = 25_000
    """Fields of all objects in a request's body."""
    max_json_strings: Count = 100_000
    """Texts and names of fields in a request's body."""
    max_json_nesting: int = Field(default=200, ge=8, le=200)
    """Nesting depth of objects and lists in a request's body."""
