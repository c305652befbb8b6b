"""What is kept of tenants and their texts, for how long, and one setting that bounds it all."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from outrider.gateway.settings.sections import Count, Section

if TYPE_CHECKING:
    from outrider.gateway.settings.tree import Settings

DAY_S: Final = 86_400.0


class RetentionSettings(Section):
    """How long anything is kept. `outrider retention` lists all of it."""

    days: Count | None = None
    """Most days that responses, cached and idempotent answers, captured texts, copies of mirrors,
    keys and values on a disk and the ledger are kept; shortens each of their own settings.
    Unset: as those say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Something that is kept."""

    what: str
    where: str
    setting: tuple[str, ...] | None = None
    """The path of the setting of its time."""
    unit_s: float = 1.0
    """What the setting counts in."""
    otherwise: str = "for ever"
    """How long, where no setting says it."""


KEPT: Final = (
    Kept(
        what="stored responses",
        where="Redis, or memory (responses.store)",
        setting=("responses", "ttl_s"),
    ),
    Kept(what="cached answers", where="Redis, or memory (cache.store)", setting=("cache", "ttl_s")),
    Kept(what="idempotent answers", where="memory", setting=("http", "idempotency_ttl_s")),
    Kept(
        what="captured texts",
        where="telemetry.capture.folder",
        setting=("telemetry", "capture", "retention_days"),
        unit_s=DAY_S,
    ),
    Kept(
        what="keys and values on a disk",
        where="engine.kv_folder",
        setting=("engine", "kv_folder_ttl_s"),
    ),
    Kept(
        what="files and batches",
        where="database, batches.folder",
        setting=("batches", "ttl_s"),
    ),
    Kept(what="named prompts", where="engine, engine.kv_folder", otherwise="as each says"),
    Kept(
        what="the ledger",
        where="database",
        setting=("ledger", "retention_days"),
        unit_s=DAY_S,
    ),
    Kept(what="feedback", where="database", otherwise="until its experiment is deleted"),
    Kept(what="the audit log", where="database"),
    Kept(
        what="requests and both answers of mirrors",
        where="mirror.file, where it is set",
        setting=("mirror", "retention_days"),
        unit_s=DAY_S,
    ),
)
"""All that is kept. Whoever keeps more adds it here, and to gateway/wiring/erasing.py."""


def kept_s(settings: "Settings", kept: Kept) -> float | None:
    """Return the seconds that something is kept; None where no setting says it."""
    if kept.setting is None:
        return None
    value: Any = settings
    for name in kept.setting:
        value = getattr(value, name)
    return None if value is None else value * kept.unit_s


def shortened(settings: "Settings") -> "Settings":
    """Return the settings with nothing kept longer than `retention.days`."""
    days = settings.retention.days
    if days is None:
        return settings
    for kept in KEPT:
        now_s = kept_s(settings, kept)
        if kept.setting is not None and (now_s is None or now_s > days * DAY_S):
            value = days if kept.unit_s == DAY_S else days * DAY_S / kept.unit_s
            settings = _with(settings, kept.setting, value)
    return settings


def _with(section: Any, path: tuple[str, ...], value: float) -> Any:
    name, *rest = path
    inner = _with(getattr(section, name), (*rest,), value) if rest else value
    return section.model_copy(update={name: inner})
