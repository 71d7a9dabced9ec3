"""The versions of the schema, each a module that Alembic runs."""
