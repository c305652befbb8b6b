"""Keys, teams and the ledger."""

from typing import Final

import sqlalchemy as sa
from alembic import op

revision: Final = "0001"
down_revision: Final = None
branch_labels: Final = None
depends_on: Final = None


def upgrade() -> None:
    """Make the tables."""
    op.create_table(
        "key_version",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_key_version")),
    )
    op.create_table(
        "ledger",
        sa.Column("row_id", sa.String(), nullable=False),
        sa.Column("request_id", sa.String(), nullable=False),
        sa.Column("ended_at", sa.Double(), nullable=False),
        sa.Column("day", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("outcome", sa.String(), nullable=False),
        sa.Column("tier", sa.String(), nullable=False),
        sa.Column("key_id", sa.String(), nullable=False),
        sa.Column("team_id", sa.String(), nullable=True),
        sa.Column("client_request_id", sa.String(), nullable=False),
        sa.Column("endpoint", sa.String(), nullable=False),
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("replica", sa.String(), nullable=False),
        sa.Column("arm", sa.String(), nullable=False),
        sa.Column("hand_off", sa.String(), nullable=False),
        sa.Column("failure", sa.String(), nullable=False),
        sa.Column("num_prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("num_cached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("num_computed_tokens", sa.BigInteger(), nullable=False),
        sa.Column("num_completion_tokens", sa.BigInteger(), nullable=False),
        sa.Column("num_reasoning_tokens", sa.BigInteger(), nullable=False),
        sa.Column("num_drafted_tokens", sa.BigInteger(), nullable=False),
        sa.Column("num_accepted_tokens", sa.BigInteger(), nullable=False),
        sa.Column("num_held_tokens", sa.BigInteger(), nullable=False),
        sa.Column("num_discarded_tokens", sa.BigInteger(), nullable=False),
        sa.Column("num_charged_tokens", sa.BigInteger(), nullable=False),
        sa.Column("usage_source", sa.String(), nullable=False),
        sa.Column("cost_nanos", sa.BigInteger(), nullable=False),
        sa.Column("charge_nanos", sa.BigInteger(), nullable=False),
        sa.Column("price_version", sa.String(), nullable=False),
        sa.Column("queue_s", sa.Double(), nullable=True),
        sa.Column("ttft_s", sa.Double(), nullable=True),
        sa.Column("duration_s", sa.Double(), nullable=False),
        sa.Column("is_streamed", sa.Boolean(), nullable=False),
        sa.Column("is_degraded", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("row_id", name=op.f("pk_ledger")),
    )
    op.create_index(op.f("ix_ledger_ended_at"), "ledger", ["ended_at"], unique=False)
    op.create_index(
        op.f("ix_ledger_key_id_ended_at"), "ledger", ["key_id", "ended_at"], unique=False
    )
    op.create_index(
        op.f("ix_ledger_team_id_ended_at"), "ledger", ["team_id", "ended_at"], unique=False
    )
    op.create_table(
        "price_versions",
        sa.Column("version", sa.String(length=32), nullable=False),
        sa.Column("document", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("version", name=op.f("pk_price_versions")),
    )
    op.create_table(
        "secrets",
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("value", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_secrets")),
    )
    op.create_table(
        "teams",
        sa.Column("id", sa.String(length=16), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("limits", sa.Text(), nullable=False),
        sa.Column("weight", sa.Double(), nullable=False),
        sa.Column("labels", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_teams")),
        sa.UniqueConstraint("name", name=op.f("uq_teams_name")),
    )
    op.create_table(
        "keys",
        sa.Column("id", sa.String(length=16), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("team_id", sa.String(length=16), nullable=True),
        sa.Column("hash", sa.String(length=64), nullable=False),
        sa.Column("hashed_with", sa.String(length=16), nullable=False),
        sa.Column("old_hash", sa.String(length=64), nullable=True),
        sa.Column("old_hash_until", sa.Double(), nullable=True),
        sa.Column("models", sa.Text(), nullable=True),
        sa.Column("tiers", sa.Text(), nullable=True),
        sa.Column("is_admin", sa.Boolean(), nullable=False),
        sa.Column("limits", sa.Text(), nullable=False),
        sa.Column("weight", sa.Double(), nullable=False),
        sa.Column("labels", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=True),
        sa.Column("revoked_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["team_id"], ["teams.id"], name=op.f("fk_keys_team_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_keys")),
    )
    op.create_index(op.f("ix_keys_name"), "keys", ["name"], unique=False)


def downgrade() -> None:
    """Drop them, with all that is in them."""
    op.drop_index(op.f("ix_keys_name"), table_name="keys")
    op.drop_table("keys")
    op.drop_table("teams")
    op.drop_table("secrets")
    op.drop_table("price_versions")
    op.drop_index(op.f("ix_ledger_team_id_ended_at"), table_name="ledger")
    op.drop_index(op.f("ix_ledger_key_id_ended_at"), table_name="ledger")
    op.drop_index(op.f("ix_ledger_ended_at"), table_name="ledger")
    op.drop_table("ledger")
    op.drop_table("key_version")
