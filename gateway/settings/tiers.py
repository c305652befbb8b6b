"""Settings of tiers that are upstream servers: `[tiers.NAME]`, `[handoff]` and `[mirror]`."""

import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, Self, TypeVar
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, JsonValue, model_validator
from pydantic_settings import NoDecode

from outrider.gateway.contract.schema.kinds import (
    Capability,
    PassedEndpoint,
    ServerKind,
    UnknownFields,
)
from outrider.gateway.settings.listed_prices import with_listed_price
from outrider.gateway.settings.on_demand import OnDemandSettings, with_on_demand
from outrider.gateway.settings.passed import PassedBounds, UpstreamPriceSettings
from outrider.gateway.settings.paths import did_you_mean
from outrider.gateway.settings.presets import PresetName, SignIn, with_preset
from outrider.gateway.settings.sections import (
    Count,
    ModelSettings,
    Revision,
    Seconds,
    Section,
    Share,
    split_list,
)

RESERVED_NAMES: Final = frozenset({"auto", "small", "large", "none"})
TIER_NAME: Final = re.compile(r"[a-z][a-z0-9_-]{0,31}")

_Names = TypeVar("_Names", tuple[str, ...], dict[str, JsonValue])
_HEADER_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HEADER_VALUE: Final = re.compile(r"[\t\x20-\x7e\x80-\xff]*")
_OUR_HEADERS: Final = frozenset(
    {"accept-encoding", "connection", "content-length", "content-type", "host", "transfer-encoding"}
)


def _base_url(url: str) -> str:
    """Return a base URL in the form of OpenAI's clients, without a trailing slash."""
    parts = urlsplit(url)
    if parts.username or parts.password:  # not to be repeated in a message
        raise ValueError("the URL holds a user name or a password; remove it and set api_key_env")
    if parts.scheme not in ("http", "https") or not parts.hostname or re.search(r"\s", url):
        raise ValueError(f"{url!r} is not a URL; write it like https://host/v1")
    if parts.query or parts.fragment:
        raise ValueError(
            f"{url!r} has a query or a fragment; remove it, and set api_key_env for a key"
        )
    try:
        _ = parts.port
    except ValueError:
        raise ValueError(f"{url!r} has an invalid port; use 0 to 65535") from None
    return url.rstrip("/")


def _all_different(urls: tuple[str, ...]) -> tuple[str, ...]:
    for url in urls:
        if urls.count(url) > 1:
            raise ValueError(f"{url} is listed twice; give each replica its own address")
    return urls


def _sendable(headers: dict[str, str]) -> dict[str, str]:
    """Return headers that HTTP can carry. Values may be secret and are not repeated in errors."""
    for name, value in headers.items():
        if not _HEADER_NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not an HTTP header name; use letters, digits and -")
        if name.lower() in _OUR_HEADERS:
            raise ValueError(f"the gateway sets {name} itself; remove it")
        if not _HEADER_VALUE.fullmatch(value):
            raise ValueError(
                f"the value of {name} has characters that HTTP cannot carry; use ASCII"
            )
    return headers


def _words(value: object) -> object:
    """Split a command as a shell would, without being one; return a list unchanged."""
    return tuple(shlex.split(value)) if isinstance(value, str) else value


Url = Annotated[str, AfterValidator(_base_url)]
Urls = Annotated[
    tuple[Url, ...],
    NoDecode,
    BeforeValidator(split_list),
    Field(min_length=1),
    AfterValidator(_all_different),
]
Headers = Annotated[dict[str, str], AfterValidator(_sendable)]
Capabilities = Annotated[tuple[Capability, ...], NoDecode, BeforeValidator(split_list)]
Endpoints = Annotated[tuple[PassedEndpoint, ...], NoDecode, BeforeValidator(split_list)]
CommandWords = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_words)]
VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


_OWN_FIELDS: Final = frozenset(
    {
        *("model", "messages", "prompt", "stream", "stream_options", "n", "best_of", "outrider"),
        *("max_tokens", "max_completion_tokens", "cache_salt"),
    }
)


def _free_to_set(names: _Names) -> _Names:
    for name in names:
        if name in _OWN_FIELDS:
            raise ValueError(f"the gateway sets {name} itself; remove it")
    return names


FieldNames = Annotated[
    tuple[str, ...], NoDecode, BeforeValidator(split_list), AfterValidator(_free_to_set)
]
ForcedFields = Annotated[dict[str, JsonValue], AfterValidator(_free_to_set)]


class TimeoutSettings(Section):
    """Times after which an upstream server counts as failed."""

    connect_s: Seconds = 5.0
    """Time to connect."""
    first_token_s: Seconds = 60.0
    """Time to the first token; for an answer that is not streamed, to its first byte."""
    between_tokens_s: Seconds = 30.0
    """Time between two tokens, or two parts of an answer that is not streamed."""
    total_s: Seconds = 600.0
    """Time for the whole answer."""


class UpstreamSettings(Section):
    """A tier that is one upstream server, or several replicas with the same model."""

    preset: PresetName | None = None
    """Known service: it sets url, server, sign_in and api_key_env where they are not set. One of
    openai, anthropic, azure (needs resource), bedrock (region), vertex (project, region), gemini,
    openrouter, groq, cerebras, together, fireworks, mistral, deepseek and xai."""
    region: str | None = None
    """Region of the preset bedrock or vertex."""
    project: str | None = None
    """Project of the preset vertex."""
    resource: str | None = None
    """Resource of the preset azure."""
    url: Urls
    """Base URL in the form of OpenAI's clients, e.g. https://host/v1; several are replicas."""
    server: ServerKind = "openai"
    """Kind of server: openai (any server with that API), outrider, vllm, sglang, tgi, tensorrt_llm,
    llama_cpp or anthropic. It decides which fields are sent and how answers continue after a
    failure."""
    continues: bool | None = None
    """The server goes on with a chat whose last message is the assistant's, so that it can continue
    what another server's failure broke off; unset: if all servers of its kind do (outrider, vllm,
    sglang). llama.cpp's does since 2025."""
    local: bool = False
    """The server runs on this device: private requests may use it."""
    logprobs: Literal["auto", "on", "off"] = "auto"
    """Ask for log-probabilities, by which a small model's answers are judged (handoff.small); auto:
    if the server has some when it is asked at the start."""
    model: str | None = None
    """The model's name on that server; unset: the MODEL of a request for TIER/MODEL, else the first
    one that the server lists."""
    api_key_env: VariableName | None = None
    """Environment variable that holds the key; unset: no key is sent."""
    api_key_file: Path | None = None
    """File that holds the key, such as a mounted secret; read again when it changes."""
    api_key_command: CommandWords = ()
    """Program that prints the key, with its arguments; no shell is involved. It runs again after
    api_key_ttl_s, and when the server rejects the key."""
    api_key_ttl_s: Seconds = 300.0
    """Time after which api_key_command runs again."""
    sign_in: SignIn | None = None
    """key (bearer), api_key_header (Azure's), entra (Azure's tokens), google (service account or
    default credentials) or aws (SigV4); unset: the preset's, else key. The last three need the
    extras azure, google and aws."""
    google_account_file: Path | None = None
    """Service account's file for sign_in google; unset: the application's default credentials."""
    headers: Headers = Field(default_factory=dict)
    """Headers added to every request."""
    tokenizer: str | None = None
    """Folder or Hugging Face id of its tokenizer, to check the usage that the server reports."""
    tokenizer_revision: Revision | None = None
    """Branch, tag or full commit hash of that tokenizer on the hub; unset: main."""
    max_context: Count | None = None
    """Tokens of prompt and answer together; unset: unknown."""
    allow_fields: FieldNames = ()
    """Request fields that are forwarded in addition to those known for this kind of server, e.g.
    service_tier; each may change prices, privacy or the server's behaviour."""
    unknown_fields: UnknownFields | None = None
    """Other request fields: refuse them with a 400, ignore them and name them in the header
    x-outrider-ignored-fields, or pass them on; unset: as the setting unknown_fields says."""
    ignore_fields: FieldNames = ()
    """Request fields that are left out and named in that header, e.g. reasoning_effort for a model
    that refuses it."""
    force_fields: ForcedFields = Field(default_factory=dict)
    """Fields set in every request, overriding the client's, e.g. {store = false}."""
    supports: Capabilities = ("tools", "images", "audio", "files")
    """Capabilities beside text; requests that need another one are not sent to this tier."""
    endpoints: Endpoints = ()
    """Further endpoints that this tier has: embeddings, rerank, images, audio. Requests for them
    are passed on as they come."""
    media_tokens: Count = 4096
    """Most tokens of an image on this server, and least tokens of a sound or a file; reserved for
    each one."""
    max_connections: Count = 256
    """Connections to each replica."""
    max_retries: int = Field(default=2, ge=0, le=10)
    """Further attempts after the first one, as long as nothing was sent to the client."""
    hedge_share: Share = 0.0
    """Share of requests that may be sent a second time when the first token is late; 0: none."""
    ca_file: Path | None = None
    """Certificates to trust in addition to the system's."""
    timeouts: TimeoutSettings = Field(default_factory=TimeoutSettings)
    price: UpstreamPriceSettings = Field(default_factory=UpstreamPriceSettings)
    """Its prices; unset: the model's listed price, where there is one."""
    bounds: PassedBounds = Field(default_factory=PassedBounds)
    on_demand: OnDemandSettings = Field(default_factory=OnDemandSettings)

    @property
    def model_on_demand(self) -> OnDemandSettings | None:
        """Return the model that a process of this machine serves; None: a server elsewhere."""
        return None if self.on_demand.checkpoint is None else self.on_demand

    @property
    def has_price(self) -> bool:
        """True if a price is set or listed; prices of 0 that are set say that tokens are free."""
        return "price" in self.model_fields_set

    @model_validator(mode="before")
    @classmethod
    def _from_preset(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        return with_listed_price(with_preset(with_on_demand(values)))

    @model_validator(mode="after")
    def _signs_in_one_way(self) -> Self:
        sources = (self.api_key_env, self.api_key_file, self.api_key_command or None)
        if sum(source is not None for source in sources) > 1:
            raise ValueError("set only one of api_key_env, api_key_file and api_key_command")
        if self.sign_in == "aws" and self.region is None:
            raise ValueError("sign_in aws needs region, such as us-east-1")
        return self


class HandoffSettings(Section):
    """Use of an upstream tier for requests to `auto`."""

    small: str | None = None
    """Tier in the small model's part: its answers are watched, and what it is too weak for goes to
    the large model or the tier that takes hand-offs."""
    tier: str | None = None
    """Tier that takes hand-offs; unset: the first one that is not the small model's."""
    policy: Literal["auto", "local_only", "prefer_local", "prefer_cloud", "cloud_only"] = "auto"
    """Policy of requests that set none: local_only, prefer_local, prefer_cloud or cloud_only; auto:
    prefer_local if a model is loaded, else cloud_only."""
    strong: Literal["auto", "local", "cloud"] = "auto"
    """Destination of requests that are too hard for the small model: local or cloud; auto: the
    large model if one is loaded, else the upstream tier."""
    max_queue_ms: Annotated[float, Field(gt=0)] | None = None
    """Predicted wait for the local models above which a request is handed over; unset: only a
    deadline or a full queue hands over."""
    deadline_ms: Annotated[float, Field(gt=0)] | None = None
    """Time for the whole answer, for requests that set no deadline."""
    continue_on_failure: bool | None = None
    """When a server fails in mid-answer, let another model continue the text that was sent; unset:
    for requests with the policy prefer_local, and for chains of models."""


class MirrorSettings(Section):
    """Background copies of requests for a second opinion. Private requests are never copied."""

    tier: str | None = None
    """Upstream tier that gets the copies."""
    share: Share = 0.0
    """Share of the requests that is copied."""
    max_in_flight: Count = 4
    """Concurrent copies; further ones are dropped."""
    file: Path | None = None
    """JSON lines file to which request and both answers are appended, one for each day with that in
    its name: mirror.jsonl becomes mirror-2026-11-29.jsonl; unset: metrics only."""
    retention_days: Count | None = None
    """Files older than this are deleted; unset: never."""


class Complaint(NamedTuple):
    """A setting that contradicts another one. `value` None: the message is about the section."""

    path: tuple[str, ...]
    value: object
    what: str


def tier_complaints(
    models: ModelSettings,
    tiers: Mapping[str, UpstreamSettings],
    handoff: HandoffSettings,
    mirror: MirrorSettings,
) -> Iterator[Complaint]:
    """Yield contradictions between the local models and the upstream tiers."""
    if not models.is_any and not tiers:
        yield Complaint(
            ("models",),
            None,
            "both tiers are switched off; name a model for one of them, or an upstream server "
            "(--tier cloud=https://host/v1)",
        )
    for name in tiers:
        if what := _name_complaint(name):
            yield Complaint(("tiers", name), None, what)
    named = (
        (("handoff", "small"), handoff.small),
        (("handoff", "tier"), handoff.tier),
        (("mirror", "tier"), mirror.tier),
    )
    for path, wanted in named:
        if wanted is not None and wanted not in tiers:
            known = did_you_mean(wanted, list(tiers)) if tiers else "; available: none"
            yield Complaint(path, wanted, f"unknown upstream tier{known}")
    yield from _small_complaints(models, tiers, handoff)
    if mirror.share > 0 and mirror.tier is None:
        yield Complaint(("mirror", "share"), mirror.share, "name the tier in mirror.tier")
    on_device = any(tier.local for tier in tiers.values()) or handoff.small is not None
    has_local = models.is_any or on_device
    yield from _handoff_complaints(handoff, has_local=has_local, has_tiers=bool(tiers))


def _small_complaints(
    models: ModelSettings, tiers: Mapping[str, UpstreamSettings], handoff: HandoffSettings
) -> Iterator[Complaint]:
    """Yield what keeps a server from playing the small model's part."""
    small = handoff.small
    if small is None:
        return
    if models.resolved()["small"] is not None:
        what = "a small model is loaded here as well; set models.small to none"
        yield Complaint(("handoff", "small"), small, what)
    elif small == handoff.tier:
        what = "handoff.tier takes over what this tier is too weak for; name two tiers"
        yield Complaint(("handoff", "small"), small, what)
    elif models.resolved()["large"] is None and not set(tiers) - {small}:
        what = (
            "nothing can take over what this tier is too weak for; name a large model "
            "(--large MODEL), or a second tier (--tier cloud=https://host/v1)"
        )
        yield Complaint(("handoff", "small"), small, what)


def _handoff_complaints(
    handoff: HandoffSettings, *, has_local: bool, has_tiers: bool
) -> Iterator[Complaint]:
    if not has_local and handoff.policy in ("local_only", "prefer_local"):
        what = "no model is loaded on this machine"
        yield Complaint(("handoff", "policy"), handoff.policy, what)
    if not has_tiers and handoff.policy in ("prefer_cloud", "cloud_only"):
        yield Complaint(("handoff", "policy"), handoff.policy, _NO_TIER)
    if not has_tiers and handoff.strong == "cloud":
        yield Complaint(("handoff", "strong"), handoff.strong, _NO_TIER)


_NO_TIER: Final = "there is no upstream tier; set one in [tiers.NAME] or with --tier NAME=URL"


def _name_complaint(name: str) -> str:
    """Return why a tier cannot have this name; empty if it can."""
    if name in RESERVED_NAMES:
        return f"{name} is a reserved name; choose another name"
    if not TIER_NAME.fullmatch(name):
        return (
            "a name is 1 to 32 lower-case letters, digits, - and _, and begins with a letter, "
            "because requests use it as a model name"
        )
    return ""
