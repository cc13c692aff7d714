"""Alembic runs this: the steps on the connection that study/database.py hands over."""

from alembic import context

from study.database import METADATA

context.configure(connection=context.config.attributes["connection"], target_metadata=METADATA, render_as_batch=True)
with context.begin_transaction():
    context.run_migrations()
