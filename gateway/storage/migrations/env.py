"""Alembic's entry: runs the migrations on a connection whose transaction its caller ends."""

from alembic import context

from outrider.gateway.storage.tables import metadata

connection = context.config.attributes["connection"]
context.configure(
    connection=connection,
    target_metadata=metadata,
    transactional_ddl=True,  # SQLite's too: its transactions are begun by our own hand
    render_as_batch=connection.dialect.name == "sqlite",
)
with context.begin_transaction():
    context.run_migrations()
