"""The table of events."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Make it."""
    op.create_table(
        "events",
        sa.Column("reader", sa.String(200), primary_key=True),
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column("at", sa.BigInteger, nullable=False),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("line", sa.Text, nullable=False),
    )
    op.create_index("events_by_time", "events", ["reader", "at"])
