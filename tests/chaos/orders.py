"""Producers with an outbox: each task is about an order, and is committed with it."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

import sqlalchemy

from kombu_toc import outbox
from kombu_toc.client.options import DatabaseURL

from . import deaths

#: How many of so many are rolled back.
ROLLED_BACK = 0.1


class RolledBackError(Exception):
    """Neither the order nor its task is there."""


class Orders:
    """The application's own table, in the database of the library."""

    def __init__(self) -> None:
        [url] = json.loads(os.environ["CHAOS_LIBRARY"])["toc_library"]
        self._engine = sqlalchemy.create_engine(DatabaseURL(url).reveal(), pool_pre_ping=True)

    @contextmanager
    def committed(self, id: str) -> Iterator[None]:
        """What is sent within this is sent with an order of that id. Raises RolledBackError now and
        then, and whatever the database does."""
        with self._engine.connect() as connection:
            transaction = connection.begin()
            with outbox(connection):
                text = sqlalchemy.text("INSERT INTO orders (id) VALUES (:id)")
                connection.execute(text, {"id": id})
                yield
            if random.random() < ROLLED_BACK:
                transaction.rollback()
                raise RolledBackError("on purpose")
            deaths.step("before", "a commit")
            transaction.commit()
            deaths.step("after", "a commit")
