"""The audit log, and which alerts were sent."""

from typing import Final

import sqlalchemy as sa
from alembic import op

revision: Final = "0005"
down_revision: Final = "0004"
branch_labels: Final = None
depends_on: Final = None


def upgrade() -> None:
    """Add three tables."""
    op.create_table(
        "audit_log",
        sa.Column("sequence", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        *(
            sa.Column(name, sa.String(), nullable=False)
            for name in ("actor", "action", "target", "request_id")
        ),
        sa.Column("details", sa.Text(), nullable=True),
        *(
            sa.Column(name, sa.String(length=64), nullable=False)
            for name in ("details_hash", "previous_hash", "hash")
        ),
        sa.PrimaryKeyConstraint("sequence", name="pk_audit_log"),
    )
    op.create_table(
        "audit_head",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("sequence", sa.BigInteger(), nullable=False),
        sa.Column("hash", sa.String(length=64), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_audit_head"),
    )
    op.create_table(
        "alert_states",
        sa.Column("subject", sa.String(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("subject", name="pk_alert_states"),
    )
