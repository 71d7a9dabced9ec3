"""Alembic's scripts, which make the tables and bring them up to date."""
