"""All tables. Money is in whole nano-dollars, times are seconds since 1970 (UTC)."""

from typing import Final

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    false,
)

SCHEMA_VERSION: Final = "0008"
"""The newest migration; a database of another version is migrated, or refused if it is newer."""

metadata: Final = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    }
)


def _number(name: str) -> Column[int]:
    return Column(name, BigInteger, nullable=False)


def _word(name: str) -> Column[str]:
    # Of any length: PostgreSQL gains nothing by a bound, and one long name would fail its batch.
    return Column(name, String, nullable=False)


def _flag(name: str) -> Column[bool]:
    return Column(name, Boolean, nullable=False)


teams: Final = Table(
    "teams",
    metadata,
    Column("id", String(16), primary_key=True),
    Column("name", String(128), nullable=False, unique=True),
    Column("limits", Text, nullable=False),  # JSON of a LimitSpec
    Column("weight", Double, nullable=False),
    Column("labels", Text, nullable=False),  # JSON of names to texts
    Column("created_at", Double, nullable=False),
)

keys: Final = Table(
    "keys",
    metadata,
    Column("id", String(16), primary_key=True),
    Column("name", String(128), nullable=False, index=True),
    Column("team_id", String(16), ForeignKey("teams.id"), nullable=True),
    Column("hash", String(64), nullable=False),  # in hexadecimals
    Column("hashed_with", String(16), nullable=False),  # which secret, without telling it
    # The secret before the last rotation, while it is still taken.
    Column("old_hash", String(64), nullable=True),
    Column("old_hash_until", Double, nullable=True),
    Column("models", Text, nullable=True),  # JSON of a list; null: all
    Column("tiers", Text, nullable=True),  # JSON of a list; null: all
    _flag("is_admin"),
    Column("reads_metrics", Boolean, nullable=False, server_default=false()),
    Column("reveals", String(16), nullable=True),
    Column("prefer", String(16), nullable=True),
    Column("limits", Text, nullable=False),  # JSON of a LimitSpec
    Column("weight", Double, nullable=False),
    Column("labels", Text, nullable=False),  # JSON of names to texts
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double, nullable=True),
    Column("revoked_at", Double, nullable=True),
)

key_version: Final = Table(
    "key_version",
    metadata,
    # One row. A change of keys or teams raises its version, so that unchanged tables are not read
    # again.
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("version", BigInteger, nullable=False),
)

secrets: Final = Table(
    "secrets",
    metadata,
    Column("name", String(64), primary_key=True),
    Column("value", Text, nullable=False),
)

gateways: Final = Table(
    "gateways",
    metadata,
    # Gateways that count limits in their own memory. One that lives raises `beat` every few
    # seconds; `seen_at` is its wall clock then, for people and for clearing old rows away.
    Column("id", String(32), primary_key=True),
    Column("host", String, nullable=False),
    Column("pid", Integer, nullable=False),
    Column("beat", BigInteger, nullable=False),
    Column("seen_at", Double, nullable=False),
)

price_versions: Final = Table(
    "price_versions",
    metadata,
    Column("version", String(32), primary_key=True),
    Column("document", Text, nullable=False),  # JSON of the prices
    Column("created_at", Double, nullable=False),
)

ledger: Final = Table(
    "ledger",
    metadata,
    # The fields of a ledger's row, under the same names, and the day of its end. No foreign keys:
    # rows outlive keys.
    Column("row_id", String, primary_key=True),
    _word("request_id"),
    Column("ended_at", Double, nullable=False),
    Column("day", Integer, nullable=False),  # whole days since 1970-01-01 (UTC)
    _word("kind"),
    _word("outcome"),
    _word("tier"),
    _word("key_id"),
    Column("team_id", String, nullable=True),
    _word("client_request_id"),
    _word("endpoint"),
    _word("model"),
    _word("replica"),
    _word("arm"),
    Column("end_user", String, nullable=False, server_default=""),
    _word("hand_off"),
    _word("failure"),
    _number("num_prompt_tokens"),
    _number("num_cached_tokens"),
    _number("num_computed_tokens"),
    _number("num_completion_tokens"),
    _number("num_reasoning_tokens"),
    _number("num_drafted_tokens"),
    _number("num_accepted_tokens"),
    _number("num_held_tokens"),
    _number("num_discarded_tokens"),
    _number("num_charged_tokens"),
    _word("usage_source"),
    _number("cost_nanos"),
    _number("charge_nanos"),
    _word("price_version"),
    Column("queue_s", Double, nullable=True),
    Column("ttft_s", Double, nullable=True),
    Column("duration_s", Double, nullable=False),
    _flag("is_streamed"),
    _flag("is_degraded"),
    Index(None, "ended_at"),
    Index(None, "key_id", "ended_at"),
    Index(None, "team_id", "ended_at"),
)

experiments: Final = Table(
    "experiments",
    metadata,
    # The state of an experiment's newest version.
    Column("name", String(32), primary_key=True),
    Column("version", Integer, nullable=False),
    Column("state", String(16), nullable=False),
    Column("share", Double, nullable=False),
    Column("slots", Text, nullable=False),  # JSON of ranges of its layer's slots
    Column("source", String(16), nullable=False),
    Column("fingerprint", String(64), nullable=True),  # of the settings that were last applied
    Column("created_at", Double, nullable=False),
)

experiment_versions: Final = Table(
    "experiment_versions",
    metadata,
    Column("experiment", String(32), primary_key=True),
    Column("version", Integer, primary_key=True, autoincrement=False),
    Column("document", Text, nullable=False),  # JSON of an ExperimentSpec
    Column("arm_slots", Text, nullable=False),  # JSON of arms to ranges of slots
    Column("stopped_arms", Text, nullable=False),  # JSON of arms to reasons and times
    Column("created_at", Double, nullable=False),
    Column("started_at", Double, nullable=True),
    Column("stopped_at", Double, nullable=True),
)

experiment_events: Final = Table(
    "experiment_events",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("experiment", String(32), nullable=False, index=True),
    Column("version", Integer, nullable=False),
    Column("at", Double, nullable=False),
    Column("kind", String(32), nullable=False),
    Column("detail", Text, nullable=False),
)

experiment_changes: Final = Table(
    "experiment_changes",
    metadata,
    # One row, as in key_version.
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("version", BigInteger, nullable=False),
)

experiment_measures: Final = Table(
    "experiment_measures",
    metadata,
    # One row per arm and gateway process; the rows of an arm are added up. No foreign keys: a
    # gateway may still be counting when an experiment is deleted.
    Column("experiment", String(32), primary_key=True),
    Column("version", Integer, primary_key=True, autoincrement=False),
    Column("arm", String(32), primary_key=True),
    Column("writer", String(32), primary_key=True),
    _number("sequence"),  # of the writer's last addition, so that none is made twice
    Column("updated_at", Double, nullable=False),
    Column("document", Text, nullable=False),  # JSON: counts, sums and sketches
)

feedback: Final = Table(
    "feedback",
    metadata,
    # The last word on a request by name; one row for each arm that it was in, arm "" for none.
    Column("request_id", String, primary_key=True),
    Column("name", String(64), primary_key=True),
    Column("experiment", String(32), primary_key=True),
    _number("version"),
    _word("arm"),
    _number("unit_bucket"),
    _word("key_id"),
    _word("kind"),  # score, success, label
    Column("value", Double, nullable=False),
    _word("label"),
    Column("given_at", Double, nullable=False),
    Index(None, "experiment", "version"),
)

audit_log: Final = Table(
    "audit_log",
    metadata,
    Column("sequence", BigInteger, primary_key=True, autoincrement=False),
    Column("at", Double, nullable=False),
    _word("actor"),
    _word("action"),
    _word("target"),
    _word("request_id"),
    Column("details", Text, nullable=True),  # JSON of before, after, nonce; null: erased
    Column("details_hash", String(64), nullable=False),
    Column("previous_hash", String(64), nullable=False),
    Column("hash", String(64), nullable=False),
)

audit_head: Final = Table(
    "audit_head",
    metadata,
    # One row: the newest of the log. Its lock makes writers append in turn.
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("sequence", BigInteger, nullable=False),
    Column("hash", String(64), nullable=False),
)

alert_states: Final = Table(
    "alert_states",
    metadata,
    # The last alert about each subject, of all gateways, so that it is sent once.
    Column("subject", String, primary_key=True),
    _word("state"),
    Column("at", Double, nullable=False),
)

files: Final = Table(
    "files",
    metadata,
    # Files of /v1/files. Their contents lie in the folder of batches, under their ids.
    Column("id", String(40), primary_key=True),
    _word("tenant"),
    _word("key_id"),
    _word("purpose"),
    Column("filename", Text, nullable=False),
    _number("num_bytes"),
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double, nullable=False),
    Index(None, "tenant", "created_at"),
)

batches: Final = Table(
    "batches",
    metadata,
    Column("id", String(40), primary_key=True),
    _word("tenant"),
    _word("key_id"),
    _word("endpoint"),
    _word("status"),
    _word("model"),  # of its first request; empty until it is validated
    Column("input_file_id", String(40), nullable=False),
    Column("output_file_id", String(40), nullable=True),
    Column("error_file_id", String(40), nullable=True),
    Column("output_ttl_s", Double, nullable=False),
    Column("fields", Text, nullable=True),  # JSON of the metadata
    Column("errors", Text, nullable=True),  # JSON of a list
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double, nullable=False),
    *(
        Column(f"{status}_at", Double, nullable=True)
        for status in (
            *("in_progress", "finalizing", "completed", "failed"),
            *("expired", "cancelling", "cancelled"),
        )
    ),
    *(
        _number(name)
        for name in (
            *("num_total", "num_completed", "num_failed", "num_prompt_tokens"),
            *("num_cached_tokens", "num_completion_tokens", "num_reasoning_tokens"),
        )
    ),
    # The gateway's process that works on it, until then; it takes longer by asking in time.
    Column("owner", String(32), nullable=True),
    Column("owned_until", Double, nullable=False),
    Index(None, "tenant", "created_at"),
    Index(None, "status"),
)

batch_results: Final = Table(
    "batch_results",
    metadata,
    # A row for each request of a batch that is over, until its files are written. It is inserted
    # with the ledger's rows in one transaction, so that no request is answered or charged twice.
    Column("batch_id", String(40), primary_key=True),
    Column("line", Integer, primary_key=True, autoincrement=False),
    _flag("is_error"),
    Column("result", Text, nullable=False),  # a line of the output or error file
)
