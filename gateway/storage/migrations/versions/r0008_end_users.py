"""The end users of requests."""

from typing import Final

import sqlalchemy as sa
from alembic import op

revision: Final = "0008"
down_revision: Final = "0007"
branch_labels: Final = None
depends_on: Final = None


def upgrade() -> None:
    """Add a column."""
    op.add_column("ledger", sa.Column("end_user", sa.String(), nullable=False, server_default=""))
