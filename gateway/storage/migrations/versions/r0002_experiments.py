"""Experiments, their measurements and feedback."""

from typing import Final

import sqlalchemy as sa
from alembic import op

revision: Final = "0002"
down_revision: Final = "0001"
branch_labels: Final = None
depends_on: Final = None


def upgrade() -> None:
    """Make the tables."""
    _make_experiments()
    _make_measures()


def _make_experiments() -> None:
    op.create_table(
        "experiments",
        sa.Column("name", sa.String(length=32), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("share", sa.Double(), nullable=False),
        sa.Column("slots", sa.Text(), nullable=False),
        sa.Column("source", sa.String(length=16), nullable=False),
        sa.Column("fingerprint", sa.String(length=64), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_experiments")),
    )
    op.create_table(
        "experiment_versions",
        sa.Column("experiment", sa.String(length=32), nullable=False),
        sa.Column("version", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("document", sa.Text(), nullable=False),
        sa.Column("arm_slots", sa.Text(), nullable=False),
        sa.Column("stopped_arms", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=True),
        sa.Column("stopped_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("experiment", "version", name=op.f("pk_experiment_versions")),
    )
    op.create_table(
        "experiment_events",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("experiment", sa.String(length=32), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_experiment_events")),
    )
    op.create_index(
        op.f("ix_experiment_events_experiment"), "experiment_events", ["experiment"], unique=False
    )
    op.create_table(
        "experiment_changes",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_experiment_changes")),
    )


def _make_measures() -> None:
    op.create_table(
        "experiment_measures",
        sa.Column("experiment", sa.String(length=32), nullable=False),
        sa.Column("version", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("arm", sa.String(length=32), nullable=False),
        sa.Column("writer", sa.String(length=32), nullable=False),
        sa.Column("sequence", sa.BigInteger(), nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.Column("document", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint(
            "experiment", "version", "arm", "writer", name=op.f("pk_experiment_measures")
        ),
    )
    op.create_table(
        "feedback",
        sa.Column("request_id", sa.String(), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("experiment", sa.String(length=32), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("arm", sa.String(), nullable=False),
        sa.Column("unit_bucket", sa.BigInteger(), nullable=False),
        sa.Column("key_id", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("value", sa.Double(), nullable=False),
        sa.Column("label", sa.String(), nullable=False),
        sa.Column("given_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("request_id", "name", "experiment", name=op.f("pk_feedback")),
    )
    op.create_index(
        op.f("ix_feedback_experiment_version"), "feedback", ["experiment", "version"], unique=False
    )


def downgrade() -> None:
    """Drop them, with all that is in them."""
    op.drop_index(op.f("ix_feedback_experiment_version"), table_name="feedback")
    op.drop_table("feedback")
    op.drop_table("experiment_measures")
    op.drop_table("experiment_changes")
    op.drop_index(op.f("ix_experiment_events_experiment"), table_name="experiment_events")
    op.drop_table("experiment_events")
    op.drop_table("experiment_versions")
    op.drop_table("experiments")
