"""What the answers of a key reveal."""

from typing import Final

import sqlalchemy as sa
from alembic import op

revision: Final = "0004"
down_revision: Final = "0003"
branch_labels: Final = None
depends_on: Final = None


def upgrade() -> None:
    """Add a column."""
    op.add_column("keys", sa.Column("reveals", sa.String(length=16), nullable=True))
