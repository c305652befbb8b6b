"""The metrics scope of keys, and the gateways that count limits by themselves."""

from typing import Final

import sqlalchemy as sa
from alembic import op

revision: Final = "0003"
down_revision: Final = "0002"
branch_labels: Final = None
depends_on: Final = None


def upgrade() -> None:
    """Add a column and a table."""
    op.add_column(
        "keys",
        sa.Column("reads_metrics", sa.Boolean(), nullable=False, server_default=sa.false()),
    )
    op.create_table(
        "gateways",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("host", sa.String(), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("beat", sa.BigInteger(), nullable=False),
        sa.Column("seen_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_gateways")),
    )
